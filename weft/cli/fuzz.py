"""`weft fuzz`: random programs x layouts x schedules against the interpreter."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.output import console, emit


def register(app: typer.Typer) -> None:
    app.command("fuzz")(fuzz)


def fuzz(
    programs: Annotated[int, typer.Option(help="How many programs to make.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Where to start; the same seed makes the same programs.")] = 0,
    stop_at: Annotated[int, typer.Option(help="Stop after so many mismatches.", min=1)] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Make random programs, schedule each by random verbs, and compare its meaning on every rank with what it meant before.

    What differs is printed as a script that repeats it, and the command ends with status 1.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from weft.testing.fuzz import fuzz as run

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(f"seed {seed}", total=programs)
        tally = run(programs, seed, tell=lambda done: bar.update(task, completed=done), stop_at=stop_at)
    for script in tally.scripts:
        console.print(script, markup=False, highlight=False, soft_wrap=True)
    if json:
        emit(tally.as_dict())
    else:
        _show(tally.applied, tally.refused)
        console.print(f"{tally.programs} programs, {sum(tally.applied.values())} steps, {tally.mismatches} mismatches")
    raise typer.Exit(1 if tally.mismatches else 0)


def _show(applied: dict[str, int], refused: dict[str, int]) -> None:
    from rich.table import Table

    table = Table("verb", "applied", "refused")
    for verb in sorted({*applied, *refused}):
        table.add_row(verb, str(applied.get(verb, 0)), str(refused.get(verb, 0)))
    console.print(table)
