"""`weft diff A B`: what two plans decide and predict differently."""

from __future__ import annotations

import typer

from weft.cli.output import emit, results


def diff(
    a: str = typer.Argument(..., help="A saved plan."),
    b: str = typer.Argument(..., help="Another saved plan."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Compare two plans."""
    from rich.table import Table

    from weft.plan.plan import load
    from weft.plan.summaries import differences

    found = list(differences(load(a), load(b)))
    table = Table("", a, b, box=None)
    for row in found:
        table.add_row(*row)
    results().print(table if found else "no difference")
    if json:
        emit({"a": a, "b": b, "differences": [{"what": what, "a": x, "b": y} for what, x, y in found]})
