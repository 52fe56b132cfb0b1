"""`weft bench kernels --rows FOLDER`: predict every kernel of tables that others measured, and say by class how far off it is."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import typer

from bench._kernel_rows import Table, profile_of, tables
from weft.cli.output import console, emit
from weft.cluster.profile import Profile
from weft.core.errors import ClusterError

HALVES = ("fitted", "held out")


def register(app: typer.Typer) -> None:
    app.command("kernels")(kernels)


def kernels(
    rows: str = typer.Option(..., "--rows", help="A folder of tables: kernels_gemm.csv, kernels_nccl.csv, kernels_attention_*.csv, kernels_moe.csv, ..."),
    half: str = typer.Option("", "--half", help="`fitted` or `held out`: only the rows that constants were fitted on, or only the others."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Predict measured kernels from the shipped profiles: median and 90th percentile of the error, and its sign, by class."""
    if half and half not in HALVES:
        raise typer.BadParameter(f"{' or '.join(HALVES)}, not {half!r}")
    found = [row for table in tables(Path(rows)) for row in summary(table.halves()[HALVES.index(half)] if half else table)]
    if not found:
        needed = "a folder with kernels_gemm.csv or another table of its kind"
        raise ClusterError(f"no table of kernels in {rows}", needed=needed, found=rows, try_="the folder that holds the CSV files")
    from rich.table import Table as Shown

    shown = Shown("device", "dtype", "kind", "class", "rows", "median", "p90", "bias")
    for r in found:
        figures = [f"{r[k]:.1%}" if r[k] is not None else r["refused"] for k in ("median", "p90", "bias")]
        shown.add_row(r["device"], r["dtype"], r["kind"], r["class"], str(r["count"]), *figures)
    console.print(shown)
    if json:
        emit({"bench": "kernels", "machine": platform.processor() or platform.machine(), "rows": found})


def summary(table: Table, profile: Profile | None = None) -> Iterator[dict[str, Any]]:
    """One row for each class of a table, predicted from the shipped profile of its device or from another."""
    profile = profile or profile_of(table.device)
    base = {"device": table.device, "dtype": table.dtype, "kind": table.kind}
    if profile is None:
        yield {**base, "class": "all", "count": len(table.rows), "median": None, "p90": None, "bias": None, "refused": "no profile"}
        return
    try:
        error = table.predict(profile, table.rows) / table.measured - 1
    except ClusterError as refused:
        yield {**base, "class": "all", "count": len(table.rows), "median": None, "p90": None, "bias": None, "refused": str(refused).splitlines()[0]}
        return
    labels = np.array([table.label(r) for r in table.rows])
    for name in sorted(set(labels)):
        some = error[labels == name]
        median, p90 = np.quantile(np.abs(some), (0.5, 0.9))
        yield {**base, "class": name, "count": len(some), "median": float(median), "p90": float(p90), "bias": float(np.median(some))}
