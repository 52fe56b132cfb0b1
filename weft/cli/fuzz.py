"""`weft fuzz`: random programs x layouts x schedules against the interpreter, or random torch modules against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from weft.cli.output import console, emit, results


def fuzz(
    programs: Annotated[int, typer.Option(help="Number of programs.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    torch: Annotated[bool, typer.Option("--torch", help="Generate torch modules, and compare a step of each with plain torch.")] = False,
    stop_at: Annotated[int, typer.Option(help="Stop after so many mismatches.", min=1)] = 10,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Test random programs: apply random schedules, and compare every rank's results with the unscheduled program.

    With `--torch`, generate random torch modules instead and compare one step of each (interpreted, compiled, and under three plans) with
    plain torch. A mismatch is printed as a script that reproduces it, and the command exits with 1.
    """
    tally = _run(_torch if torch else _schedules, programs, seed, stop_at)
    for script in tally.scripts:
        results().print(script, markup=False, highlight=False, soft_wrap=True)
    if json:
        emit(tally.as_dict())
    elif torch:
        _show_torch(tally)
    else:
        _show(tally.applied, tally.refused)
        results().print(f"{tally.programs} programs, {sum(tally.applied.values())} steps, {tally.mismatches} mismatches")
    raise typer.Exit(1 if tally.mismatches else 0)


def _schedules(*args: Any, **more: Any) -> Any:
    from weft.testing.fuzz import fuzz as run

    return run(*args, **more)


def _torch(*args: Any, **more: Any) -> Any:
    from weft.testing.torch_modules import fuzz as run

    return run(*args, **more)


def _run(run: Callable[..., Any], programs: int, seed: int, stop_at: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(f"seed {seed}", total=programs)
        return run(programs, seed, tell=lambda done: bar.update(task, completed=done), stop_at=stop_at)


def _show_torch(tally: Any) -> None:
    counts = tally.as_dict()
    results().print(", ".join(f"{counts[k]} {k}" for k in ("programs", "equal", "refused", "wrong", "crash", "unstable")))
    for words, count in counts["refused_by"].items():
        results().print(f"  refused {count} times: {words}", markup=False, highlight=False)


def _show(applied: dict[str, int], refused: dict[str, int]) -> None:
    from rich.table import Table

    table = Table("verb", "applied", "refused")
    for verb in sorted({*applied, *refused}):
        table.add_row(verb, str(applied.get(verb, 0)), str(refused.get(verb, 0)))
    results().print(table)
