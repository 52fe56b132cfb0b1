"""How the part of a tensor that an axis shards lies in a rank's local memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from weft.core.layout import Atom, Layout, O, P, _atom_positions


def local_size(atom: Atom, layout: Layout, coords: Mapping[str, int], without: str | None = None) -> int:
    """Indices of the atom that the rank holds, as if one axis did not shard it."""
    bare = Atom(atom.size, tuple(a for a in atom.axes if a != without))
    start, stop = _atom_positions(bare, layout.mesh, tuple(coords.items()))
    return stop - start


@dataclass(frozen=True)
class LocalShape:
    """How the part an axis shards lies in a rank's local tensor: [before, mine, after], of `full` were it not sharded."""

    before: int
    mine: int
    after: int
    full: int
    start: int  # of this rank's piece within the full part


def local_shape_of(layout: Layout, axis: str, coords: Mapping[str, int]) -> LocalShape:
    at = layout.where_sharded(axis)
    assert at is not None
    d, k = at
    local = layout.local_shape(coords)
    atoms = layout.dims[d]
    before = math.prod(local[:d]) * math.prod(local_size(a, layout, coords) for a in atoms[:k])
    after = math.prod(local_size(a, layout, coords) for a in atoms[k + 1 :]) * math.prod(local[d + 1 :])
    mine = local_size(atoms[k], layout, coords)
    innermost = atoms[k].axes[-1] == axis
    full = local_size(atoms[k], layout, coords, without=axis) if innermost else mine * layout.mesh.size(axis)
    step = -(-full // layout.mesh.size(axis))
    return LocalShape(before, mine, after, full, min(coords[axis] * step, full))


def partial_op(layout: Layout, axis: str) -> str:
    place = layout.placement(axis)
    assert isinstance(place, P)
    return place.op


def root_of(layout: Layout, axis: str) -> int:
    place = layout.placement(axis)
    assert isinstance(place, O)
    return place.root
