"""`weft bench orders`: five plans of different kind on the ranks at hand, in the order they are predicted and in the order measured."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Annotated, Any

import typer

KINDS = {"data": "dp{n}", "sharded": "dp{n},zero3", "tensor": "tp{n}", "tensor, tokens cut": "tp{n},sp", "context": "cp{n}"}


def register(app: typer.Typer) -> None:
    @app.command()
    def orders(
        json: Annotated[bool, typer.Option(help="one JSON object on the last line")] = False,
        ranks: Annotated[int, typer.Option(help="processes")] = 2,
        sizes: Annotated[str, typer.Option(help="which, joined by commas")] = "10M",
        rounds: Annotated[int, typer.Option(help="timed steps of each plan")] = 9,
        profile: Annotated[str, typer.Option(help="a calibrated profile; measured first if not given")] = "",
    ) -> None:
        """Run five plans; compare the planner's order with the measured one."""
        from bench._ranks import machine, run_ranks
        from bench.cpu_accuracy import _calibrate, measure
        from weft.cli.output import console, emit

        where = f"{ranks}x{profile or _calibrate(ranks)}"
        plans = [p.format(n=ranks) for p in KINDS.values()]
        rows = [order(size, run_ranks(measure, ranks, size, rounds, plans, where), plans) for size in sizes.split(",")]
        for r in rows:
            console.print(f"{r['case']}: predicted {' < '.join(r['predicted'])}\n{' ' * len(r['case'])}  measured {' < '.join(r['measured'])}")
        if json:
            emit({"bench": "orders", "machine": machine(), "ranks": ranks, "rows": rows})


def order(size: str, found: list[dict[str, Any]], plans: list[str]) -> dict[str, Any]:
    """Both orders, pairs that come out the wrong way round, and by how much the measured times of these differ."""
    failed = {r["case"]: r["reason"] for r in found if r["error"] is None}
    took = {r["case"].split()[-1]: r for r in found if r["error"] is not None}
    by = {key: sorted(took, key=lambda p: took[p][key]) for key in ("predicted", "measured")}
    wrong = {f"{a}, {b}": apart(took, a, b) for a, b in combinations(by["measured"], 2) if by["predicted"].index(a) > by["predicted"].index(b)}
    return {
        "case": f"gpt-{size}", "predicted": by["predicted"], "measured": by["measured"], "same": not wrong and len(took) == len(plans),
        "wrong": wrong, "neighbours": neighbours(took, by["measured"]), "failed": failed, "predicted_ms": {p: took[p]["predicted"] for p in took},
        "measured_ms": {p: took[p]["measured"] for p in took}, "correct": "every plan was checked against the model before it ran",
    }  # fmt: skip


def apart(took: dict[str, dict[str, Any]], a: str, b: str) -> float:
    return took[b]["measured"] / took[a]["measured"] - 1


def neighbours(took: dict[str, dict[str, Any]], measured: list[str]) -> dict[str, dict[str, Any]]:
    """How far apart plans next to one another were, beside what lies between the quartiles of their ratio round by round: a pair nearer
    than that is a tie as far as these rounds can tell."""
    found = {}
    for a, b in pairwise(measured):
        ratios = sorted(y / x for x, y in zip(took[a]["rounds_ms"], took[b]["rounds_ms"], strict=True))
        spread = ratios[(3 * len(ratios)) // 4] - ratios[len(ratios) // 4]
        found[f"{a}, {b}"] = {"apart": apart(took, a, b), "spread": spread, "tie": apart(took, a, b) < spread}
    return found
