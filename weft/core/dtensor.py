"""Layouts as DTensor placements, in mesh-axis order; what DTensor cannot say is a LayoutError, not a guess.

DTensor shards what a rank holds, axis after axis: Shard(d) into chunks, _StridedShard(d, k) each of k blocks into chunks.
So an atom becomes a Shard when nothing replicated stands before it in its dim by then, and a _StridedShard otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.core.errors import LayoutError
from weft.core.layout import Atom, Layout, Mesh, O, P, S, canonical, finest


def to_placements(layout: Layout) -> tuple[Any, ...]:
    """One DTensor placement per mesh axis."""
    return tuple(_placement(layout, axis) for axis in layout.mesh.axes)


def _placement(layout: Layout, axis: str) -> Any:
    from torch.distributed.tensor import Partial, Replicate

    place = layout.placement(axis)
    if isinstance(place, O):
        needed = "a value every rank of the axis has a part in"
        raise LayoutError(f"DTensor cannot say {axis}:{place}", needed=needed, found=str(layout), try_="broadcast it first")
    if isinstance(place, P):
        return Partial(place.op)
    return _shard(layout, axis, place.dim) if isinstance(place, S) else Replicate()


def _shard(layout: Layout, axis: str, dim: int) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = layout.mesh
    before = mesh.axes[: mesh.axes.index(axis)]
    smallest, lone = finest(layout.dims[dim], mesh)
    atoms = (*smallest, *(Atom(1, (a,)) for a in lone))
    k = next(i for i, atom in enumerate(atoms) if axis in atom.axes)
    blocks, rest = (math.prod(_left(atom, before, mesh) for atom in part) for part in (atoms[:k], atoms[k + 1 :]))
    sharded = Atom(atoms[k].size, tuple(a for a in atoms[k].axes if a in before or a == axis))
    if blocks == 1 and len(canonical((sharded, Atom(rest)), mesh)) == 1:
        return Shard(dim)
    if sharded.size % math.prod(mesh.sizes[a] for a in sharded.axes):
        raise LayoutError(
            f"DTensor cannot say how {axis} shards dim {dim}",
            needed="equal shards, where a sharding is not of all a rank holds of the dim",
            found=str(layout),
            try_=f"gather it along {axis} first",
        )
    return _StridedShard(dim, split_factor=blocks)


def _left(atom: Atom, before: Sequence[str], mesh: Mesh) -> int:
    """What the first rank holds of the atom once the axes before have sharded it."""
    size = atom.size
    for axis in atom.axes:
        size = -(-size // mesh.sizes[axis]) if axis in before else size
    return size
