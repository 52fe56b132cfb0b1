"""1. Layouts: along each axis of the mesh a value is replicated, sharded, or partial: a sum of which each rank has a term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """What the ranks along one axis hold of a value."""

    kind: str
    dim: int | None = None

    def __repr__(self) -> str:
        return self.kind if self.dim is None else f"S({self.dim})"


R = Placement("R")  # each rank holds all of it
P = Placement("P")  # each rank holds a term; the value is their sum


def S(dim: int) -> Placement:
    """Each rank holds its slice of one dim."""
    return Placement("S", dim)


class Refused(Exception):
    """A program that would not mean what it says."""


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks, the last one varying fastest."""

    axes: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return math.prod(n for _, n in self.axes)

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]


def mesh(**axes: int) -> Mesh:
    return Mesh(tuple(axes.items()))


@dataclass(frozen=True)
class Type:
    """A shape and, for each axis of the mesh, a placement."""

    mesh: Mesh
    shape: tuple[int, ...]
    placements: tuple[tuple[str, Placement], ...]  # every axis, in mesh order

    def __post_init__(self) -> None:
        sharded = [(a, p.dim) for a, p in self.placements if p.dim is not None]
        if len({d for _, d in sharded}) < len(sharded) or any(d >= len(self.shape) or self.shape[d] % self.mesh.size(a) for a, d in sharded):
            raise Refused(f"{self}: each sharding needs a dim of its own that divides evenly")

    def on(self, axis: str) -> Placement:
        return dict(self.placements)[axis]

    def place(self, axis: str, placement: Placement) -> Type:
        return Type(self.mesh, self.shape, tuple((a, placement if a == axis else p) for a, p in self.placements))

    def dim(self, d: int) -> tuple[int, str | None]:
        """The size of a dim and the axis that shards it: two dims are laid out the same exactly if these are equal."""
        return self.shape[d], next((a for a, p in self.placements if p == S(d)), None)

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        return tuple(n // (self.mesh.size(axis) if axis else 1) for n, axis in map(self.dim, range(len(self.shape))))

    def __str__(self) -> str:
        return f"{list(self.shape)} " + " ".join(f"{a}:{p}" for a, p in self.placements)


def tensor(mesh: Mesh, *shape: int, **placements: Placement) -> Type:
    """`tensor(m, 8, 6, dp=S(0))`: replicated along every axis that is not named."""
    return Type(mesh, shape, tuple((axis, placements.get(axis, R)) for axis, _ in mesh.axes))


# What a placement means, in both directions. All else rests on these two functions.


def pieces(placement: Placement, value: Tensor, n: int) -> Sequence[Tensor]:
    """What each of n ranks holds. The terms of a Partial are arbitrary as long as they add up, so they are drawn at random."""
    if placement.dim is not None:
        return value.chunk(n, placement.dim)
    if placement is R:
        return [value] * n
    terms = [torch.randn_like(value) for _ in range(n - 1)]
    return [*terms, value - sum(terms)]


def together(placement: Placement, parts: Sequence[Tensor]) -> Tensor:
    """The value that n ranks hold between them."""
    if placement.dim is not None:
        return torch.cat(list(parts), placement.dim)
    if placement is P:
        return reduce(torch.add, parts)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0])  # replicated means: the same on every rank
    return parts[0]


def shards_of(value: Tensor, type_: Type) -> list[Tensor]:
    """What every rank of the mesh holds of a global value, in rank order."""
    parts = [value]
    for axis, n in type_.mesh.axes:
        parts = [piece for part in parts for piece in pieces(type_.on(axis), part, n)]
    return parts


def collect(parts: Sequence[Tensor], type_: Type) -> Tensor:
    """The global value, from what every rank holds."""
    for axis, n in reversed(type_.mesh.axes):
        parts = [together(type_.on(axis), parts[i : i + n]) for i in range(0, len(parts), n)]
    return parts[0]
