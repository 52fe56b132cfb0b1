"""`weft bench NAME`: every bench/*.py next to the package that has `register(app)`, imported only when asked for."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import weft

FOLDER = Path(weft.__file__).parent.parent / "bench"
FORMER = {  # names that scripts of 0.1 call
    "foresight": "accuracy",
    "cpu-foresight": "cpu-accuracy",
    "gpu-products": "gpu-matmuls",
}


class Benches(TyperGroup):
    """The sub-commands of `bench`, found in files. `bench/NAME.py` is looked into first, then all the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({name for stem in _stems() for name in _commands(stem)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        cmd_name = FORMER.get(cmd_name, cmd_name)
        own = cmd_name.replace("-", "_")
        for stem in sorted(_stems(), key=lambda s: (s != own, s)):
            commands = _commands(stem)
            if cmd_name in commands:
                return commands[cmd_name]
        return None


bench = typer.Typer(cls=Benches, no_args_is_help=True, help="Run a benchmark or an accuracy check of the repository.")


def _stems() -> list[str]:
    """Files that may hold a bench. Benches live in the source tree, so an installed wheel has none."""
    from weft.core.errors import UnknownName

    if not FOLDER.is_dir():
        raise UnknownName(
            "benchmarks are not installed with the package",
            needed=f"a folder {FOLDER}",
            found="no such folder",
            try_="clone the repository, install it with `pip install -e .`, and run `weft bench` from there",
        )
    return sorted(f.stem for f in FOLDER.glob("*.py") if not f.stem.startswith("_"))


def _commands(stem: str) -> dict[str, Any]:
    """The commands of bench/STEM.py; none if it is a helper without `register`."""
    root = str(FOLDER.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    module = import_module(f"{FOLDER.name}.{stem}")
    if not hasattr(module, "register"):
        return {}
    sub = typer.Typer()
    module.register(sub)
    return dict(typer.main.get_group(sub).commands)
