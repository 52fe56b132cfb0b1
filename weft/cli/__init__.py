"""The `weft` command. A command is a function of a module of its name here; COMMANDS lists them in the order help shows.

Importing this package must not import torch: command modules import what is heavy inside their functions.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from weft.core.garbage import COMMAND, seldom_collected

COMMANDS = (
    "bench", "calibrate", "check", "diff", "discover", "doctor", "explain", "export", "fits", "fuzz", "plan", "price", "report", "run",
    "show", "simulate", "tune", "verify", "watch",
)  # fmt: skip


class Group(TyperGroup):
    """A group in which weft's own errors, and files that cannot be used, end the command with their text, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()  # else a full disk is found when nobody can say so any more
            return done
        except KeyboardInterrupt:
            typer.echo("stopped by SIGINT", err=True)
            raise typer.Exit(128 + signal.SIGINT) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _abandon_output()
            typer.echo(f"WeftError: cannot use {error.filename or 'what was to be written'}: {error.strerror or error}", err=True)
            raise typer.Exit(1) from error
        except Exception as error:
            from weft.core.errors import WeftError

            if not isinstance(error, WeftError):
                raise
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(error.status) from error


def _abandon_output() -> None:
    """What could not be written must not be tried again when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


app = typer.Typer(
    cls=Group,
    help="Find the fastest way to train a PyTorch model on a cluster, run it, and check that it equals one device.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from weft import __version__

        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit."),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _name in COMMANDS:
    _home = import_module(f"weft.cli.{_name}")
    _command = getattr(_home, _name)
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, context_settings=getattr(_home, "SETTINGS", None))(_command)


def main() -> None:
    """The console entry point."""
    try:
        with seldom_collected(COMMAND):
            app(prog_name="weft")
    finally:
        gc.freeze()  # the process ends: looking for cycles in all it made would take a second
