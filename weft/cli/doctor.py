"""`weft doctor`: what this machine has, what weft can do with it, and what to change."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor() -> None:
    """Look at this machine and say what to change."""
