"""The `weft` command. A command is a module here with `register(app)`; COMMANDS lists them in the order help shows.

Importing this package must not import torch: command modules import what is heavy inside their functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = (
    "bench",
    "calibrate",
    "check",
    "diff",
    "discover",
    "doctor",
    "explain",
    "fuzz",
    "plan",
    "report",
    "run",
    "show",
    "simulate",
    "tune",
    "verify",
)


class Group(TyperGroup):
    """A group in which weft's own errors end the command with their text and status 1, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from weft.core.errors import WeftError

            if not isinstance(error, WeftError):
                raise
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Group,
    help="Plan computation and communication of distributed PyTorch programs together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Keep sub-commands named even while there is only one."""


for _name in COMMANDS:
    import_module(f"weft.cli.{_name}").register(app)


def main() -> None:
    """The console entry point."""
    app(prog_name="weft")
