"""The few linear passes over vertices that numpy cannot say in one call, in C++ where there is a compiler.

Each function but `seat` has two forms with the same answer; the numpy one takes a step per level, never one per vertex.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import native
from weft.core.errors import KernelError

Ints = NDArray[np.int64]
I64 = ctypes.c_int64
SOURCE = Path(__file__).with_name("structure.cpp")


@functools.cache
def library() -> Any | None:
    """The compiled passes, or None: no compiler, or an interpreter whose objects they do not know."""
    known = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not known or not native.available():
        return None
    try:
        found = native.load(SOURCE.read_text(), kind=ctypes.PyDLL)
    except KernelError:
        return None
    for name, result, count in (("count", I64, 0), ("flatten", I64, 5), ("depth", I64, 4)):
        function = getattr(found, f"weft_{name}")
        function.restype = result
        function.argtypes = [ctypes.py_object] + [ctypes.c_void_p] * count
    found.weft_depth.argtypes = [I64] + [ctypes.c_void_p] * 3
    found.weft_order.argtypes = [I64, I64] + [ctypes.c_void_p] * 5
    found.weft_edges.argtypes = [I64] + [ctypes.c_void_p] * 9
    found.weft_schedule.argtypes, found.weft_schedule.restype = [I64, I64] + [ctypes.c_void_p] * 16, I64
    found.weft_seat.argtypes, found.weft_seat.restype = [I64, I64] + [ctypes.c_void_p] * 5 + [I64] + [ctypes.c_void_p] * 4, I64
    found.weft_reverse.argtypes = [I64, I64] + [ctypes.c_void_p] * 3
    return found


def flatten(trees: Sequence[Any]) -> tuple[Ints, Ints, Ints, Ints, Ints] | None:
    """(first, child, row, sample, depth) of nested tuples, or None where only the slow reader can say what is wrong."""
    lib = library()
    if lib is None or not isinstance(trees, (list, tuple)):
        return None
    count = lib.weft_count(trees)
    if count < 0:
        return None
    first, child, row = np.empty(count + 1, np.int64), np.empty(max(count, 1), np.int64), np.empty(count, np.int64)
    sample, depth = np.empty(len(trees) + 1, np.int64), np.empty(count, np.int64)
    if lib.weft_flatten(trees, _at(first), _at(child), _at(row), _at(sample), _at(depth)) < 0:
        return None
    return first, child[: first[-1]], row, sample, depth


def depth(first: Ints, child: Ints) -> tuple[Ints, int]:
    """The longest path below each vertex, and a vertex on a cycle or -1."""
    lib = library()
    if lib is None:
        return _depth(first, child)
    out = np.empty(len(first) - 1, np.int64)
    return out, lib.weft_depth(len(out), _at(first), _at(child), _at(out))


def order(first: Ints, child: Ints, rounds: Ints, start: Ints) -> Ints:
    """The vertices, round after round, each round in the order in which later rounds read it."""
    lib = library()
    if lib is None:
        return _order(first, child, rounds, start)
    out = np.empty(len(rounds), np.int64)
    lib.weft_order(len(rounds), len(start) - 1, _at(first), _at(child), _at(rounds), _at(start), _at(out))
    return out


class Levels(NamedTuple):
    """A schedule by depth: what `weft_schedule` fills in. `rounds` has (class, first place, size) of every level."""

    klass: Ints
    vertex: Ints
    place: Ints
    rounds: Ints
    range: Ints
    rows: Ints
    edge_first: Ints
    edge_child: Ints
    edge_parent: Ints


def levels(first: Ints, child: Ints, kind: Ints, row: Ints, depth: Ints, slots: Sequence[int], rest: Sequence[bool]) -> Levels | None:
    """The schedule by depth in one call, or None: no compiler, levels of several classes, or children that are not as they should be."""
    lib, n, kinds = library(), len(row), len(slots)
    if lib is None or n == 0:
        return None
    sizes = (n, n, n + 1, 3 * n, 4 * kinds, n, n + 1, len(child), len(child))
    parts, at = [], 0
    made = np.empty(sum(sizes), np.int64)
    for size in sizes:
        parts.append(made[at : at + size])
        at += size
    given = [np.ascontiguousarray(a, np.int64) for a in (first, child, kind, row, depth, slots, rest)]
    count = lib.weft_schedule(n, kinds, *map(_at, given), *map(_at, parts))
    if count < 0:
        return None
    edges = int(parts[6][-1])
    parts[3], parts[7], parts[8] = parts[3][: 3 * count].reshape(-1, 3), parts[7][:edges], parts[8][:edges]
    parts[4] = parts[4].reshape(-1, 2)
    return Levels(*parts)


def seat(first: Ints, child: Ints, depth: Ints, klass: Ints, degree: Ints, rooms: Ints) -> Ints | None:
    """The room of every vertex, where rooms (class, rows, edges) run one after the other; None: they do not all fit, or there is no compiler."""
    lib, n = library(), len(klass)
    if lib is None or not n:
        return None
    classes = 1 + int(max(klass.max(), rooms[:, 0].max(initial=0)))
    given = [np.ascontiguousarray(a, np.int64) for a in (first, child, depth, klass, degree, *rooms.T)]
    out = np.empty(n, np.int64)
    failed = lib.weft_seat(n, classes, *map(_at, given[:5]), len(rooms), *map(_at, given[5:]), _at(out))
    return None if failed else out


def edges(first: Ints, child: Ints, vertex: Ints, skip: Ints, degree: Ints, place: Ints) -> tuple[Ints, Ints, Ints]:
    """Edges by place of the parent, as (first, place of the child, place of the parent)."""
    lib, n = library(), len(vertex)
    if lib is None:
        bounds = np.concatenate(([0], np.cumsum(degree)))
        return bounds, place[child[spans(first[vertex] + skip, degree)]], np.repeat(np.arange(n), degree)
    total = int(degree.sum())
    out = np.empty(n + 1, np.int64), np.empty(total, np.int64), np.empty(total, np.int64)
    lib.weft_edges(n, *map(_at, (vertex, first, child, skip, degree, place, *out)))
    return out


def reverse(to: Ints, places: int) -> tuple[Ints, Ints]:
    """The edges that end in each place, as (first, edge)."""
    lib = library()
    if lib is None:
        first = np.concatenate(([0], np.cumsum(np.bincount(to, minlength=places))))
        return first.astype(np.int64), np.argsort(to, kind="stable")
    first, edge = np.empty(places + 1, np.int64), np.empty(len(to), np.int64)
    lib.weft_reverse(len(to), places, _at(to), _at(first), _at(edge))
    return first, edge


def parents(first: Ints, child: Ints) -> tuple[Ints, Ints]:
    """The vertices that read each vertex, once for each time they read it, as (first, vertex)."""
    n = len(first) - 1
    above_first, edge = reverse(np.where(child < 0, n, child), n + 1)
    return above_first[:-1], np.repeat(np.arange(n), np.diff(first))[edge[: above_first[n]]]


def spans(start: Ints, count: Ints) -> Ints:
    """start[0], start[0]+1, ... (count[0] of them), start[1], ...: the concatenation of ranges."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(start - (ends - count), count)


def _depth(first: Ints, child: Ints) -> tuple[Ints, int]:
    """All that is ready runs together, so the number of a batch is a depth; what is on a cycle, or above one, never runs."""
    out = Frontier(first, child, np.zeros(len(first) - 1, np.int64)).run(lambda _: 0)
    stuck = np.flatnonzero(out < 0)
    return out, _on_cycle(first, child, out, int(stuck[0])) if len(stuck) else -1


def _on_cycle(first: Ints, child: Ints, done: Ints, v: int) -> int:
    """Follow unfinished children until one is met again."""
    seen: set[int] = set()
    while v not in seen:
        seen.add(v)
        v = next(int(c) for c in child[first[v] : first[v + 1]] if c >= 0 and done[c] < 0)
    return v


def _order(first: Ints, child: Ints, rounds: Ints, start: Ints) -> Ints:
    n, unseen = len(rounds), np.iinfo(np.int64).max
    key = np.full(n, unseen, np.int64)  # the first edge, in the order of parents, that reads this vertex
    by_round = np.argsort(rounds, kind="stable")
    out, edges = np.empty(n, np.int64), 0
    for r in range(len(start) - 2, -1, -1):
        here = by_round[start[r] : start[r + 1]]
        here = here[np.argsort(key[here], kind="stable")]
        out[start[r] : start[r + 1]] = here
        below = child[spans(first[here], first[here + 1] - first[here])]
        below = below[below >= 0]
        np.minimum.at(key, below, np.arange(edges, edges + len(below)))
        edges += len(below)
    return out


class Frontier:
    """Runs batches of a chosen class until none is left; a step costs a few array operations, whatever its size."""

    def __init__(self, first: Ints, child: Ints, klass: Ints) -> None:
        self.klass = klass
        self.above_first, self.above = parents(first, child)
        self.waiting = np.bincount(self.above, minlength=len(klass))
        self.batch = np.full(len(klass), -1, np.int64)
        self.ready = split(np.flatnonzero(self.waiting == 0), klass)

    def woken_by(self, vertices: Ints, commit: bool = False) -> Ints:
        """The vertices that wait for nothing else once these have run."""
        first = self.above_first[vertices]
        readers, counts = np.unique(self.above[spans(first, self.above_first[vertices + 1] - first)], return_counts=True)
        left = self.waiting[readers] - counts
        if commit:
            self.waiting[readers] = left
        return readers[left == 0]

    def run(self, choose: Callable[[Frontier], int]) -> Ints:
        done = 0
        while self.ready:
            k = choose(self)
            here = self.ready.pop(k)
            self.batch[here], done = done, done + 1
            for other, vertices in split(self.woken_by(here, commit=True), self.klass).items():
                waiting = self.ready.get(other)
                self.ready[other] = vertices if waiting is None else np.concatenate((waiting, vertices))
        return self.batch


def split(vertices: Ints, klass: Ints) -> dict[int, Ints]:
    return {int(k): vertices[klass[vertices] == k] for k in np.unique(klass[vertices])}


def _at(array: Ints) -> int:
    return int(array.__array_interface__["data"][0])
