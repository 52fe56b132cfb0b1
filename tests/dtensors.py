"""DTensor placements as layouts, the way back from `weft.core.dtensor`: what weft cannot say is a LayoutError, not a guess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.core.dtensor import _left, to_placements
from weft.core.errors import LayoutError
from weft.core.layout import Atom, Layout, Mesh, P, finest


def from_placements(mesh: Mesh, shape: Sequence[int], placements: Sequence[Any]) -> Layout:
    """The layout that DTensor placements, one per mesh axis, give a tensor of the shape."""
    if len(placements) != len(mesh.axes):
        raise LayoutError("not one placement per axis", needed=f"{len(mesh.axes)} for {mesh}", found=str(len(placements)))
    layout = Layout.of(mesh, tuple(shape))
    for axis, placement in zip(mesh.axes, placements, strict=True):
        layout = _placed(layout, axis, placement)
    _require_same(layout, placements)
    return layout


def _placed(layout: Layout, axis: str, placement: Any) -> Layout:
    from torch.distributed.tensor import Partial

    if placement.is_replicate():
        return layout
    if type(placement) is Partial:
        return layout.place(axis, P(placement.reduce_op))
    if not hasattr(placement, "dim"):
        needed = "Shard, _StridedShard, Replicate or Partial"
        raise LayoutError(f"weft has no placement like {placement!r}", needed=needed, found=type(placement).__name__)
    dim = placement.dim % layout.rank
    return layout.shard(axis, dim, _within(layout, axis, dim, getattr(placement, "split_factor", 1)))


def _within(layout: Layout, axis: str, dim: int, blocks: int) -> int:
    """The inner part of the dim that is sharded when each of `blocks` blocks of what a rank holds is."""
    atoms, need = list(finest(layout.dims[dim], layout.mesh)[0]), blocks
    while atoms and (need > 1 or _left(atoms[0], layout.mesh.axes, layout.mesh) == 1):
        atom = atoms.pop(0)
        held = _left(atom, layout.mesh.axes, layout.mesh)
        if need > 1 and not atom.axes and held % need == 0:
            held, atoms = need, [Atom(atom.size // need), *atoms]
        if need % held:
            break
        need //= held
    if need > 1:
        raise LayoutError(f"dim {dim} has no {blocks} blocks to shard along {axis}", needed="blocks made of full atoms", found=str(layout))
    return math.prod(a.size for a in atoms)


def _require_same(layout: Layout, placements: Sequence[Any]) -> None:
    """What the layout says must be what was given: an axis that shards across atoms has no layout."""
    try:
        said = to_placements(layout)
    except LayoutError:
        said = ()
    if [_key(p, layout) for p in said] != [_key(p, layout) for p in placements]:
        found = f"{list(placements)} of {list(layout.shape)}"
        raise LayoutError("weft cannot say these placements", needed="every axis to shard one atom, evenly inside a dim", found=found)


def _key(placement: Any, layout: Layout) -> Any:
    return (placement.dim % layout.rank, getattr(placement, "split_factor", 1)) if hasattr(placement, "dim") else repr(placement)


def device_mesh(mesh: Mesh, device: str = "cpu") -> Any:
    """The DeviceMesh of the same axes; the process group must be there."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(mesh.sizes.values()), mesh_dim_names=mesh.axes)
