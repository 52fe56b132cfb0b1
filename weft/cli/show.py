"""`weft show`: a program as text, before and after a schedule."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    @app.command()
    def show(
        name: Annotated[str | None, typer.Argument(help="an example; without one, the list")] = None,
        schedule: Annotated[str | None, typer.Option(help="one of its schedules")] = None,
        diff: Annotated[bool, typer.Option(help="what the schedule changed")] = False,
        code: Annotated[bool, typer.Option(help="the generated per-rank code")] = False,
        history: Annotated[bool, typer.Option(help="the steps of the schedule")] = False,
    ) -> None:
        """Print a program, after one of its schedules if asked, or what the schedule changed."""
        from weft.programs.catalog import example, scheduled

        if name is None:
            _list()
            return
        program = scheduled(name, schedule)
        if code:
            from weft.codegen import show_code

            typer.echo(show_code(program))
        elif diff:
            before, after = example(name).make().text.splitlines(), program.text.splitlines()
            typer.echo("\n".join(difflib.unified_diff(before, after, name, f"{name} {schedule or ''}".strip(), lineterm="", n=2)))
        else:
            typer.echo(program.text)
        if history:
            typer.echo("\n".join(f"# {step}" for step in program.history))


def _list() -> None:
    from rich.table import Table

    from weft.cli.output import console
    from weft.programs.catalog import line_counts

    table = Table("example", "lines", "schedule", "lines", "verbs", title="Programs and their schedules")
    for name, lines, schedule, sched_lines, steps in line_counts():
        table.add_row(name, str(lines), schedule, str(sched_lines), str(steps))
    console.print(table)
