"""JSON from files that anybody may have written: read within limits, and whatever is wrong is a ValueError in words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BYTES = 64 << 20  # of a file
DEPTH = 64  # of lists and objects in each other
DIGITS = 40  # of a number


def read_json(path: str | Path, limit: int = BYTES) -> Any:
    """What a JSON file says. Raises OSError where it cannot be read and ValueError where it is not as it should be."""
    with open(path, "rb") as f:
        raw = f.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"more than {limit} bytes")
    return parse_json(raw)


def parse_json(raw: bytes | str) -> Any:
    """What JSON text says; no key twice, only finite numbers no longer than DIGITS, nothing deeper than DEPTH."""
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int, parse_float=_float, parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"lists or objects more than {DEPTH} deep") from None
    if _deeper(value, DEPTH):
        raise ValueError(f"lists or objects more than {DEPTH} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is given twice")
    return out


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    value = float(text) if len(text) <= DIGITS else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text[:DIGITS]} is not a number that can be kept")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than that; level by level, not by calls."""
    level = [value]
    for _ in range(depth + 1):
        level = [x for v in level if isinstance(v, (list, dict)) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return True
