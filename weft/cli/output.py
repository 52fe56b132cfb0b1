"""Where output goes: results to stdout, progress and notices to stderr. With `--json` stdout has one line of JSON and nothing else."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

console = Console(stderr=True, soft_wrap=not sys.stderr.isatty())  # lines are broken on a terminal only
IMBALANCE = "Picks of the busiest rank of ep over those of an average one, in a model with experts."
CLUSTER: Any = typer.Option(
    ..., "--cluster", help="NODESxDEVICESxKIND (hosts, devices per host, device), groups joined by `+`, or a YAML file."
)
_click = import_module(typer.Context.__bases__[0].__module__.removesuffix(".core") + ".globals")  # newer typer has a copy of its own


def count(context: typer.Context, param: typer.CallbackParam, value: int) -> int:
    """An option that takes a number of 1 or more where it is given; 0 stands for its default."""
    from weft.core.errors import PlanError

    source = context.get_parameter_source(str(param.name))
    if value < 1 and source is not None and source.name == "COMMANDLINE":
        raise PlanError(f"{param.opts[0]} is {value}", needed=f"{param.opts[0]} of 1 or more", found=str(value))
    return value


def results() -> Console:
    """Where a command prints its result: stdout, or stderr while stdout carries JSON. Lines are broken on a terminal only."""
    context = _click.get_current_context(silent=True)
    as_json = context is not None and bool(context.params.get("json"))
    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    return Console(stderr=as_json, soft_wrap=not terminal, width=None if terminal or "COLUMNS" in os.environ else 140)


def emit(obj: Mapping[str, Any]) -> None:
    """Print `obj` as one line of JSON. Integers stay integers; NaN and infinity, which JSON lacks, are refused."""
    text = json.dumps(_plain(obj, "$"), ensure_ascii=False)
    sys.stderr.flush()
    print(text, flush=True)


def many(n: int, noun: str) -> str:
    """`1 sample`, `2 samples`, `4 micro-batches`."""
    return f"{n:,} {noun}{'' if n == 1 else 'es' if noun.endswith(('ch', 's')) else 's'}"


def writable(path: str, make: bool = False) -> None:
    """Refuse, before any work is done, a file that cannot be written in the end; with `make` its folder may yet be made.

    Nothing is asked of an empty path.
    """
    from weft.core.errors import WeftError

    if not path:
        return
    folder = Path(path).parent
    while make and not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise WeftError(
            f"cannot write {path}", needed="a file in a folder that is there", found=f"no folder {folder}", try_=f"mkdir -p {folder}"
        )
    if Path(path).is_dir():
        raise WeftError(f"cannot write {path}", needed="the name of a file", found="a folder")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise WeftError(f"cannot write {path}", needed="leave to write there", found="none")


def read_text(path: str | Path, needed: str) -> str:
    """The text of a file that the user named, or a refusal."""
    from weft.core.errors import WeftError, reason

    try:
        return Path(path).read_text()
    except UnicodeDecodeError as error:
        raise WeftError(f"{path} is not text", needed=needed, found=f"byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise WeftError(f"cannot read {path}", needed=needed, found=reason(error)) from error


def _plain(value: Any, path: str) -> Any:
    """`value` in JSON's own types. Scalars of numpy and torch are unwrapped; `path` names the place in an error."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}, which JSON cannot say: leave the key out, or give None and the reason")
    if value is None or isinstance(value, (str, int, float)):
        return value
    if getattr(value, "ndim", None) == 0:
        return _plain(value.item(), path)
    raise TypeError(f"{path} is a {type(value).__name__}, which JSON cannot say: give numbers, text, lists or dicts")
