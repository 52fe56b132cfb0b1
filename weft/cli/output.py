"""Where output goes: words and tables to stderr, one JSON object on one line as the last of stdout."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

console = Console(stderr=True)


def emit(obj: Mapping[str, Any]) -> None:
    """Print `obj` as one line of JSON. Integers stay integers; NaN and infinity, which JSON lacks, are refused."""
    text = json.dumps(_plain(obj, "$"), ensure_ascii=False)
    sys.stderr.flush()
    print(text, flush=True)


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
