"""The four inner loops over a problem, compiled where a compiler is at hand and in Python elsewhere, with the same results.

A kernel holds a problem as the loops want it: for each node its edges and its claims, for each edge two messages.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.core import native
from weft.core.errors import KernelError
from weft.plan.assignment import loops
from weft.plan.assignment.problem import Floats, Ints, Problem, offsets


@dataclass(frozen=True, eq=False)
class Kernel:
    """A problem laid out for the loops. `near` and the claims of node v lie at near_at[v], claim_at[v] .. [v + 1]."""

    nodes: int
    edges: int
    times: int
    k: Ints
    c_at: Ints
    tail: Ints
    head: Ints
    w_at: Ints
    w: Floats
    near_at: Ints
    near: Ints
    claim_at: Ints
    start: Ints
    stop: Ints
    m_at: Ints
    m: Floats
    limit: Floats
    tail_at: Ints
    head_at: Ints

    def __post_init__(self) -> None:
        object.__setattr__(self, "_record", _Record(*(_plain(getattr(self, name)) for name in (*_COUNTS, *_ARRAYS))))

    def silence(self) -> Floats:
        """Messages that say nothing."""
        return np.zeros(int(self.head_at[-1]))

    def sweep(self, c: Floats, messages: Floats, up: bool) -> Floats:
        """Pass messages over all nodes, up or down their numbers, in place; what each node came to believe."""
        beliefs = np.empty(len(c))
        self._loop("sweep", c, messages, beliefs, int(up))
        return beliefs

    def bound(self, c: Floats, messages: Floats) -> float:
        """The lower bound these messages prove for node costs c and these edges."""
        return float(self._loop("bound", c, messages))

    def decode(self, c: Floats, messages: Floats, up: bool) -> Ints | None:
        """A choice within the limits, node by node; None if some node found nothing that fits."""
        x = np.empty(self.nodes, np.int64)
        return x if self._loop("decode", c, messages, int(up), x) else None

    def walk(self, c: Floats, price: Floats, x: Ints, seed: Ints, heat: float, work: int) -> tuple[float, Ints]:
        """Local search from x, in place, until `work` entries were read: the gain of the best choice met, and that choice."""
        best = x.copy()
        gain = float(self._loop("walk", c, price, x, best, seed, float(heat), int(work)))
        return gain, best

    def _loop(self, name: str, *args: Any) -> Any:
        library = _library()
        if library is None:
            return getattr(loops, name)(self, *args)
        function: Any = getattr(library, name)
        function.restype = _RESULT[name]
        return function(ctypes.byref(self._record), *(_plain(a) for a in args))  # type: ignore[attr-defined]


SOURCE = Path(__file__).with_name("native.cpp")


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled loops, which round as `loops.py` does, or None where they cannot be had."""
    try:
        return native.load(SOURCE.read_text(), flags=("-ffp-contract=off",)) if native.available() else None
    except KernelError:
        return None


_COUNTS = ("nodes", "edges", "times")
_ARRAYS = (
    "k", "c_at", "tail", "head", "w_at", "w", "near_at", "near",
    "claim_at", "start", "stop", "m_at", "m", "limit", "tail_at", "head_at",
)  # fmt: skip
_RESULT = {"sweep": None, "bound": ctypes.c_double, "decode": ctypes.c_int64, "walk": ctypes.c_double}


class _Record(ctypes.Structure):
    """struct Problem of native.cpp."""

    _fields_ = (*((name, ctypes.c_int64) for name in _COUNTS), *((name, ctypes.c_void_p) for name in _ARRAYS))


def _plain(value: Any) -> Any:
    """What ctypes passes: addresses of arrays, integers of 64 bits, doubles."""
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous, "the loops read arrays end to end"
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)


def kernel(p: Problem) -> Kernel:
    """Lay a problem out for the loops. The claims of a node must not overlap, as `reduce` leaves them."""
    ends = np.concatenate([p.tail, p.head])
    near = np.argsort(ends, kind="stable") % max(p.edges, 1)
    claims = np.argsort(p.owner, kind="stable")
    length = p.k[p.owner[claims]]
    m_at = offsets(length)
    source = np.repeat(p.m_at[claims] - m_at[:-1], length) + np.arange(len(p.m))
    tail_at = offsets(p.k[p.tail])
    return Kernel(
        p.nodes, p.edges, p.times,
        p.k, p.c_at, p.tail, p.head, p.w_at, p.w,
        offsets(np.bincount(ends, minlength=p.nodes)), near,
        offsets(np.bincount(p.owner, minlength=p.nodes)), p.start[claims], p.stop[claims], m_at, p.m[source],
        p.limit, tail_at, tail_at[-1] + offsets(p.k[p.head]),
    )  # fmt: skip
