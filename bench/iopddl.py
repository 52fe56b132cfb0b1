"""`weft bench iopddl FILES`: assignment problems in the contest's format, each within a limit of seconds, reading included."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

MARGIN = 0.08  # of the limit, left for taking the answer back to the whole problem


def register(app: typer.Typer) -> None:
    @app.command()
    def iopddl(
        files: list[Path] = typer.Argument(..., help="problems as .json or .json.gz"),
        limit: float = typer.Option(60.0, min=1.0, help="seconds for each problem"),
        threads: int = typer.Option(2, min=1, help="threads to search with"),
        json: bool = typer.Option(False, "--json", help="print one JSON object as the last line"),
    ) -> None:
        """Solve auto-sharding problems with memory limits: cost, bound, and whether a check of the full problem passed."""
        from bench._ranks import machine
        from weft.cli.output import console, emit

        rows = []
        for file in files:
            rows.append(run(file, limit, threads))
            console.print(describe(rows[-1]))
        if json:
            emit({"bench": "iopddl", "machine": machine(), "rows": rows})


def run(file: Path, limit: float, threads: int) -> dict[str, Any]:
    """Read, solve and check one problem."""
    from bench import _iopddl as iopddl
    from bench._assignment import solve

    begun = time.monotonic()
    problem = iopddl.load(file)
    left = limit * (1 - MARGIN) - (time.monotonic() - begun)
    answer = solve(problem, work=float("inf"), seconds=left, threads=threads)
    feasible = answer.x is not None and problem.feasible(answer.x)
    row: dict[str, Any] = {"case": problem.name, "cost": None, "bound": None, "feasible": feasible}
    if answer.x is not None:
        row["cost"] = _number(problem.cost(answer.x))
    if abs(answer.bound) < float("inf"):
        row["bound"] = _number(answer.bound)
    if answer.reason:
        row["reason"] = answer.reason
    return row | {"seconds": round(time.monotonic() - begun, 3)}


def describe(row: dict[str, Any]) -> str:
    if row["cost"] is None:
        return f"{row['case']}: {row['reason']} after {row['seconds']:.1f} s"
    gap = f"{1 - row['bound'] / row['cost']:.2%} above the bound" if row["bound"] and row["cost"] else "no bound"
    proved = "optimal" if row["cost"] == row["bound"] else gap
    return f"{row['case']}: {row['cost']} ({proved}) in {row['seconds']:.1f} s"


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
