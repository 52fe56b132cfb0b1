"""Empty caches of transformers, which a model that is trained hands from layer to layer though nothing is in them.

A cache would make every layer another one. Where a layer is shown to compute the same without it, isomorphic layers are traced without;
whoever then looks into the cache is answered by a trace that keeps it (`CacheNeeded`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class CacheNeeded(Exception):
    """A cache that isomorphic layers were traced without is needed after all."""


def is_cache(x: Any) -> bool:
    theirs = sys.modules.get("transformers.cache_utils")
    return theirs is not None and isinstance(x, theirs.Cache)


def close(cache: Any) -> None:
    """From here on nobody looks into it unnoticed."""
    if type(cache) not in _CLOSED:
        cache.__class__ = _closed(type(cache))


@contextmanager
def opened(caches: list[Any]) -> Iterator[None]:
    kept = [type(c) for c in caches]
    for cache, kind in zip(caches, kept, strict=True):
        cache.__class__ = _CLOSED.get(kind, kind)
    try:
        yield
    finally:
        for cache, kind in zip(caches, kept, strict=True):
            cache.__class__ = kind


_CLOSED: dict[type, type] = {}  # a closed kind -> the kind itself


@functools.cache
def _closed(kind: type) -> type:
    def look(self: Any, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, name)
        raise CacheNeeded(name)

    made = type(kind.__name__, (kind,), {"__getattribute__": look})
    _CLOSED[made] = kind
    return made
