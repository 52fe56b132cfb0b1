"""A row of things split into parts so that the slowest part is as fast as can be.

With c_i(a, b) the cost of part i from place a to place b, and T(i, b) the slowest of the first i parts where these end at b,

    T(i, b) = min over a of max(T(i - 1, a), c_i(a, b)),      answer T(parts, length).

Of equal answers `tie` decides, and then the part that begins earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

Tie = Callable[[Any, float, int], Any]  # from what it was before, the cost of one more part and where this ends; the least is taken


def even(squares: float | None, cost: float, end: int) -> float:
    """The more even of equal partitions has the smaller sum of squares."""
    return (squares or 0.0) + cost**2


def early(ends: tuple[int, ...] | None, cost: float, end: int) -> tuple[int, ...]:
    """The one whose first parts are shorter."""
    return (*(ends or ()), end)


def either(before: None, cost: float, end: int) -> int:
    return 0


def partition(
    length: int,
    parts: int,
    cost: Callable[[int, int, int], float | None],
    ends: Callable[[int, int], Iterable[int]] | None = None,
    tie: Tie = either,
) -> tuple[int, ...] | None:
    """Where each part ends; None where no partition can be had.

    `cost(i, a, b)` rises with b, and is None for what cannot be had, nor then any longer part. `ends(i, a)`, in rising order, says where
    part i, which is not the last, may end if it begins at a: anywhere, where it is not given, as long as no part is empty. What is slower
    than parts of equal length is not followed.
    """
    ends = ends or (lambda i, a: range(a + 1, length - (parts - i - 1) + 1))
    most = _equal(length, parts, cost, ends)
    best: dict[int, tuple[float, Any, tuple[int, ...]]] = {0: (0.0, None, ())}
    for i in range(parts):
        row: dict[int, tuple[float, Any, tuple[int, ...]]] = {}
        for a, (slowest, tied, before) in best.items():
            for b in ends(i, a) if i < parts - 1 else (length,):
                here = cost(i, a, b)
                if here is None or here > most:
                    break
                found = (max(slowest, here), tie(tied, here, b))
                if b not in row or found < row[b][:2]:
                    row[b] = (*found, (*before, b))
        best = row
    return best[length][2] if length in best else None


def _equal(length: int, parts: int, cost: Callable[[int, int, int], float | None], ends: Callable[[int, int], Iterable[int]]) -> float:
    """The slowest of parts as equal in length as may be; infinity where they cannot be had."""
    slowest, a = 0.0, 0
    for i in range(parts):
        nearest = a + (length - a) / (parts - i)
        b = min(ends(i, a), key=lambda b: abs(b - nearest), default=None) if i < parts - 1 else length
        here = None if b is None else cost(i, a, b)
        if b is None or here is None:
            return math.inf
        slowest, a = max(slowest, here), b
    return slowest


@lru_cache(maxsize=1024)
def even_layers(depth: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk where nothing says otherwise; two chunks more than layers are embedding and head alone."""
    return (0, *[1] * depth, 0) if chunks == depth + 2 else tuple(share(depth, chunks))


def share(layers: int, stages: int) -> list[int]:
    """Layers per stage; what is left over goes to the middle ones, since the outer two do more."""
    counts = [layers // stages] * stages
    middle = sorted(range(stages), key=lambda i: abs(i - (stages - 1) / 2))
    for i in middle[: layers % stages]:
        counts[i] += 1
    return counts
