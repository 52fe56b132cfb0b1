"""`weft check A B`: do two programs denote the same outputs?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.output import emit, read_text, results


def check(
    single: Annotated[str, typer.Argument(help="A program as text in a file, or the name of an example.")],
    sharded: Annotated[str, typer.Argument(help="Another; NAME:SCHEDULE is an example under a schedule.")],
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Check whether two programs compute the same outputs, and name the first op that differs."""
    from weft.rewrite.check import Report, check

    a, b = _load(single), _load(sharded)
    bad = next((x for x in (a, b) if not hasattr(x, "nodes")), None)
    report = Report(False, 0, 0, 0, 0, bad) if bad is not None else check(a, b)
    results().print(str(report), highlight=False, markup=False, soft_wrap=True)
    if json:
        first = report.first
        emit({
            "equal": report.equal, "outputs": report.outputs, "derived": report.derived, "evaluated": report.evaluated,
            "kinds_run": report.kinds_run, "seconds": round(report.seconds, 3), "missing": list(report.missing),
            "first": None if first is None else {"op": first.op, "layer": first.layer, "line": first.line, "why": first.why},
        })  # fmt: skip
    if not report.equal:
        raise typer.Exit(1)


def _load(name: str) -> Any:
    """A program, or the place where its text is wrong."""
    from weft.core.errors import ParseError
    from weft.core.text import parse
    from weft.rewrite.check import Place, locate

    path = Path(name)
    if not path.exists():
        from weft.programs.catalog import scheduled

        example, _, schedule = name.partition(":")
        return scheduled(example, schedule or None)
    text = read_text(path, "a file of program text, or the name of an example")
    try:
        return parse(text)
    except ParseError as e:
        at = re.search(r"line (\d+)", e.message)
        if at is None:
            raise
        found = locate(text, int(at[1]))
        why = f"does not type: {e.message}; needed {e.needed}; found {e.found}"
        return Place("program", "", str(path), why) if found is None else Place(found.op, found.layer, found.line, why)
