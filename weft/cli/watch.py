"""`weft watch RUN`: a run while it trains: one line for every time it is written, and its page, which loads itself again."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from weft.cli.output import console


def watch(
    run: str = typer.Argument(..., help="The folder of a run (`record=` of parallelize)."),
    out: str = typer.Option("", "-o", "--out", help="Where to write the page.", show_default="in the folder"),
    patience: float = typer.Option(120.0, "--patience", min=0.0, help="Stop after so many seconds without news."),
    every: float = typer.Option(2.0, "--every", min=0.1, help="Seconds between two looks."),
) -> None:
    """Follow a training run: print its progress and keep its report up to date, until nothing new comes."""
    from weft.core.errors import WeftError
    from weft.record.run import FILE, load
    from weft.report import report

    file, seen, since, announced = Path(run) / FILE, 0.0, time.monotonic(), False
    if not file.exists():
        console.print(f"waiting for a run in {run}, at most {patience:g} s", markup=False, highlight=False)
    while time.monotonic() - since <= patience:
        now = file.stat().st_mtime if file.exists() else 0.0
        if now > seen:
            seen, since = now, time.monotonic()
            made, (page, _) = load(run), report(run, out, refresh=max(1, round(every)))
            if not announced:
                console.print(f"the page is at {page}", markup=False, highlight=False)
                announced = True
            loss = (made.steps.get("loss") or (0.0,))[-1]
            print(
                f"step {len(made.steps.get('ms', ()))}: loss {loss:.4g}, {made.step_ms:,.1f} ms, {made.per_second:,.0f} {made.unit}/s",
                flush=True,
            )
        time.sleep(min(every, patience))
    if not seen:
        raise WeftError(
            f"no run in {run}", needed="the folder that record= of parallelize names", found=f"nothing for {patience:g} s",
            try_='weft.parallelize(..., record="run/")',
        )  # fmt: skip
    report(run, out)  # without loading itself again
    console.print(f"no news for {patience:g} s", highlight=False)
