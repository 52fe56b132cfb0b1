"""Which runs of memory a fused body works on: rows, so split that every tensor of the group runs straight through each.

All ranks have the same rows, those of the rank with the largest slice; a row this rank has nothing of is empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

from weft.core.errors import KernelError
from weft.core.layout import Layout
from weft.core.node import Node

REPLICATED = ("terms", "full", "gathered")  # replicated, of which the slice is used


class NotFusable(KernelError):
    """A group that must run unfused, and why."""


class Rows:
    """Rows over the slice that `domain` gives the rank at `coords`, sharded along `axis`."""

    def __init__(self, domain: Layout, axis: str | None, coords: Mapping[str, int]) -> None:
        self.domain, self.axis, self.coords = domain, axis, coords
        self.first = dict.fromkeys(coords, 0)  # by the rule of chunks, nobody has more than the first
        self.largest, self.local = domain.local_shape(self.first), domain.local_shape(coords)
        self.depth = 0  # dims that are rows of their own

    def add(self, node: Node, role: str) -> None:
        """Split rows short enough for this tensor too."""
        self.depth = max(self.depth, self._broken_at(node, role))

    def is_once(self, node: Node, role: str) -> bool:
        """Whether one element of the tensor serves a full row."""
        return role == "own" and self._aligned(node, self.first)[-1:] < self.largest[-1:]

    @property
    def span(self) -> int:
        return math.prod(self.largest[self.depth :])

    def lengths(self) -> tuple[int, ...]:
        mine = math.prod(self.local[self.depth :])
        return tuple(mine if self._is_here(index) else 0 for index in self._indices())

    def offsets(self, node: Node, role: str) -> tuple[int, ...]:
        """Where each row starts in the tensor; for role "index", the number of its first element in the full tensor."""
        if role == "index":
            return tuple(self._numbers())
        strides = self._strides(node)
        base = sum(s * t for s, t in zip(self._starts(node, role), strides, strict=True))
        at = (base + sum(i * t for i, t in zip(index, strides, strict=False)) for index in self._indices())
        return tuple(o if self._is_here(index) else 0 for o, index in zip(at, self._indices(), strict=True))

    def _indices(self) -> Iterable[tuple[int, ...]]:
        return itertools.product(*(range(n) for n in self.largest[: self.depth]))

    def _is_here(self, index: tuple[int, ...]) -> bool:
        return all(i < n for i, n in zip(index, self.local, strict=False))

    def _aligned(self, node: Node, coords: Mapping[str, int]) -> tuple[int, ...]:
        stored = node.type.layout.local_shape(coords)
        return (1,) * (len(self.largest) - len(stored)) + stored

    def _broken_at(self, node: Node, role: str) -> int:
        """How many leading dims must be rows of their own for this tensor."""
        stored = self._aligned(node, self.first)
        if role == "index":
            cut_dims = [d for d, (here, all_) in enumerate(zip(self.largest, self.domain.shape, strict=True)) if here != all_]
            return max(cut_dims, default=0)
        if role in REPLICATED:
            shard = self.domain.where_sharded(self.axis or "")
            return 0 if shard is None or math.prod(stored[: shard[0]]) == 1 else shard[0]
        if stored == self.largest:
            return 0
        return min(_common_tail(stored, self.largest), _common_tail(stored, (1,) * len(stored)))

    def _strides(self, node: Node) -> list[int]:
        shape = self._aligned(node, self.coords)
        strides, step = [0] * len(shape), 1
        for d in reversed(range(len(shape))):
            strides[d] = step if shape[d] > 1 or self.local[d] == 1 else 0
            step *= shape[d]
        return strides

    def _starts(self, node: Node, role: str) -> list[int]:
        """Along each dim, how far into the tensor this rank's slice begins."""
        starts = [0] * len(self.local)
        for d in range(len(self.local)) if role in REPLICATED else ():
            here, there = self.domain.positions(d, self.coords), node.type.layout.positions(d, self.coords)
            starts[d] = int((there < here[0]).sum()) if len(here) else 0
            if len(here) and int(here[-1] - here[0]) + 1 != len(here):
                raise NotFusable("a slice that is not one run of its dim", needed="a dim sharded once", found=str(node.type))
        return starts

    def _numbers(self) -> Iterable[int]:
        at = [self.domain.positions(d, self.coords) for d in range(self.domain.rank)]
        for index in self._indices():
            number = 0
            for d, size in enumerate(self.domain.shape):
                place = index[d] if d < len(index) else 0
                number = number * size + (int(at[d][place]) if place < len(at[d]) else 0)
            yield number


def _common_tail(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Where the longest common tail of two shapes begins."""
    k = len(a)
    while k and a[k - 1] == b[k - 1]:
        k -= 1
    return k
