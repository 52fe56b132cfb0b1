"""Every layout a shape can have on a mesh, for tests that leave none out. Meant for small shapes and meshes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from weft.core.errors import LayoutError
from weft.core.layout import REDUCTIONS, Atom, Dim, Layout, Mesh, O, P, Placement, R, canonical


def layouts(mesh: Mesh, shape: Sequence[int], *, partials: bool = True, inner: bool = True) -> list[Layout]:
    """All layouts of the shape: every axis replicated, sharding any atom of any dim, or (`partials`) partial or at a root.

    `inner` adds the shardings of parts of a dim, several axes nested in one dim among them; without it an axis shards entire dims only.
    """
    found: dict[Layout, None] = {}
    for choice in itertools.product(range(-1, len(shape)), repeat=len(mesh.axes)):
        sharded = {axis: d for axis, d in zip(mesh.axes, choice, strict=True) if d >= 0}
        free = [axis for axis in mesh.axes if axis not in sharded]
        for dims in itertools.product(*(_dims(mesh, n, _of(sharded, d), inner) for d, n in enumerate(shape))):
            found.update(dict.fromkeys(_placements(Layout(mesh, dims), free, partials)))
    return list(found)


def _of(sharded: dict[str, int], dim: int) -> tuple[str, ...]:
    return tuple(axis for axis, d in sharded.items() if d == dim)


@lru_cache(maxsize=4096)
def _dims(mesh: Mesh, size: int, axes: tuple[str, ...], inner: bool) -> tuple[Dim, ...]:
    """Every way the axes given, and no others, can shard a dim."""
    found: dict[Dim, None] = {}
    for factors in factorizations(size) if inner and axes else [(size,)]:
        for at in itertools.product(range(len(factors)), repeat=len(axes)):
            shards = [tuple(axis for axis, k in zip(axes, at, strict=True) if k == i) for i in range(len(factors))]
            found[canonical(tuple(map(Atom, factors, shards)), mesh)] = None
    return tuple(found)


def factorizations(size: int) -> Iterator[tuple[int, ...]]:
    """The size as an ordered product of factors above 1; a size of 0 or 1 is its own only factor."""
    yield (size,)
    for first in range(2, size):
        if size % first == 0:
            yield from ((first, *rest) for rest in factorizations(size // first))


def _placements(layout: Layout, free: Sequence[str], partials: bool) -> Iterator[Layout]:
    choices = [list(_places(layout.mesh.sizes[axis])) if partials else [R] for axis in free]
    for places in itertools.product(*choices):
        try:
            yield hold(layout, dict(zip(free, places, strict=True)))
        except LayoutError:  # a sum over one axis and a max over another
            continue


def _places(size: int) -> Iterator[Placement]:
    yield R
    yield from map(P, REDUCTIONS)
    yield from map(O, range(size))


def hold(layout: Layout, places: dict[str, Placement]) -> Layout:
    for axis, place in places.items():
        layout = layout if place == R else layout.hold(axis, place)
    return layout
