"""Ranks on named axes, and the ways in which those along one axis hold a value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from weft.core.errors import LayoutError


class Mesh:
    """Named axes over ranks, the first axis outermost: `Mesh(dp=2, tp=4)` is 8 ranks."""

    __slots__ = ("__dict__", "_hash", "axes", "sizes")

    def __init__(self, **axes: int) -> None:
        for name, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise LayoutError(f"mesh axis {name!r} has no size", needed="an integer, 1 or more", found=repr(size))
        self.axes: tuple[str, ...] = tuple(axes)
        self.sizes: dict[str, int] = dict(axes)
        self._hash = hash(tuple(axes.items()))

    @cached_property
    def key(self) -> tuple[tuple[str, int], ...]:
        return tuple(self.sizes.items())

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes.values())

    def size(self, axis: str) -> int:
        self.require(axis)
        return self.sizes[axis]

    def require(self, axis: str) -> None:
        if axis not in self.sizes:
            raise LayoutError(f"the mesh has no axis {axis!r}", needed=f"one of {', '.join(self.axes) or '(none)'}", found=repr(axis))

    def coords(self, rank: int) -> dict[str, int]:
        """The rank's place on every axis."""
        place = {}
        for name in reversed(self.axes):
            rank, place[name] = divmod(rank, self.sizes[name])
        return {name: place[name] for name in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        rank = 0
        for name in self.axes:
            rank = rank * self.sizes[name] + coords[name]
        return rank

    def places(self) -> Iterator[dict[str, int]]:
        return (self.coords(r) for r in range(self.ranks))

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that differ along `axis` only, one list per group."""
        self.require(axis)
        groups: dict[tuple[int, ...], list[int]] = {}
        for r in range(self.ranks):
            c = self.coords(r)
            groups.setdefault(tuple(v for a, v in c.items() if a != axis), []).append(r)
        return list(groups.values())

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Mesh) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{a}={n}' for a, n in self.key)})"


class Placement:
    """How one mesh axis holds a value. See `R`, `S`, `P`, `O`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Replicated(Placement):
    """Replicated: every rank along the axis holds the full value."""

    def __str__(self) -> str:
        return "R"


Within: TypeAlias = "int | tuple[int, int] | None"


@dataclass(frozen=True, slots=True)
class S(Placement):
    """Each rank holds its chunk of dim `dim`; with `within`, of the inner `within` indices of that dim.

    `within=(n, k)` shards the inner n indices as k blocks that stay together: 3 rows of 2 over 2 ranks is (6, 3), not 6.
    """

    dim: int
    within: Within = None

    def __str__(self) -> str:
        return f"S({self.dim})" if self.within is None else f"S({self.dim}, within={self.within})"


@dataclass(frozen=True, slots=True)
class P(Placement):
    """Each rank holds a term; the value is the sum (max, min) of the terms over the axis."""

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise LayoutError("a Partial has no such reduction", needed=" or ".join(REDUCTIONS), found=repr(self.op))

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


@dataclass(frozen=True, slots=True)
class O(Placement):  # noqa: E742 - the letter the design uses
    """The rank at place `root` of the axis alone holds the value."""

    root: int = 0

    def __str__(self) -> str:
        return f"O({self.root})"


R = Replicated()
REDUCTIONS = ("sum", "max", "min")
