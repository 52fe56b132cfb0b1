"""Names of a program's inputs and outputs: they print and parse back, and no two keys share one.

A name keeps letters, digits, _ and dots. Any other character of a key is written as `_0x2d_`, its code; a dot inside a key too, since
dots stand between keys. What is no string is marked by `_0x_`, so 0 and "0" are two keys.
"""

from __future__ import annotations

import re
from functools import lru_cache

_ODD = re.compile(r"[^\w.]|_(?=0x)")
_ODD_IN_A_KEY = re.compile(r"[^\w]|_(?=0x)")
_WRITTEN = re.compile(r"_0x([0-9a-f]+)_")
_OTHER = "_0x_"


def _code(found: re.Match[str]) -> str:
    return f"_0x{ord(found[0]):x}_"


@lru_cache(1 << 14)
def _part(key: str) -> str:
    return _ODD_IN_A_KEY.sub(_code, key)


def readable(path: str) -> str:
    """A path of keys with dots between them, as torch names a parameter."""
    return _ODD.sub(_code, path)


def part(key: object) -> str:
    """One key of a mapping, as a part of a name."""
    if type(key) is str:
        return _part(key)
    return _ODD_IN_A_KEY.sub(_code, key) if isinstance(key, str) else _OTHER + _ODD_IN_A_KEY.sub(_code, repr(key))


def original(name: str) -> str:
    """The path that `readable` was given."""
    return _WRITTEN.sub(lambda m: chr(int(m[1], 16)), name)


def bare(name: str) -> str:
    """The name that torch has for the parameter of an input."""
    return original(name.removeprefix("param."))
