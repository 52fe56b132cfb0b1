"""From one layout of a tensor to another: which collectives, how many bytes each, and what they cost.

The route is the one `ops.comm.reshard` takes: shards undone from the innermost axis out, then made from the outermost in.
Here layouts are placements by axis, so that a table of all pairs is cheap; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from weft.cluster.spec import Cluster
from weft.core.layout import Layout, Mesh, P, Placement, R, Replicated, S
from weft.core.node import Node
from weft.cost.price import Costs, compiles, on_mesh
from weft.cost.work import Collective, Op, of_node

Placements = tuple[Placement, ...]  # one per axis of the mesh, in order

SLICE = 1e-9  # seconds; taking a part of what is there costs next to nothing, but more than not having to


@dataclass(frozen=True)
class Reshard:
    """One collective on the way. `size` is the full tensor of its group in bytes, or a rank's part for all_to_all."""

    kind: str
    axis: str
    size: float


class Prices(Protocol):
    """Seconds of a collective, and of what the busiest rank does at a node. `chained`: pointwise ops in a row are one kernel."""

    @property
    def chained(self) -> bool: ...

    def move(self, move: Reshard) -> float: ...

    def work(self, ops: Sequence[Op], node: Node) -> float: ...

    def on(self, mesh: Mesh) -> Prices:
        """The same prices for a mesh of the same ranks with some neighbouring axes joined."""
        ...


def of(layout: Layout) -> Placements:
    return tuple(layout.placement(axis) for axis in layout.mesh.axes)


def route(mesh: Mesh, source: Placements, target: Placements, size: float) -> list[Reshard] | None:
    """The collectives that bring a tensor of `size` bytes from source to target; None where there is no way (nothing turns P)."""
    here, moves = list(source), []
    axes = list(mesh.axes)
    for i in reversed(range(len(axes))):
        move, here[i] = _undo(mesh, here, target, i)
        if move:
            moves.append(Reshard(move, axes[i], _size(mesh, here, i, move, size)))
    for i, there in enumerate(target):
        if here[i] == there:
            continue
        if not isinstance(there, S):
            return None
        kind = "reduce_scatter" if isinstance(here[i], P) else "slice"
        moves.append(Reshard(kind, axes[i], _size(mesh, here, i, kind, size)))
        here[i] = there
    return moves


def _undo(mesh: Mesh, here: list[Placement], target: Placements, i: int) -> tuple[str, Placement]:
    """What takes axis i towards its target before anything further out has moved, and what it then holds."""
    now, there = here[i], target[i]
    if now == there and (not isinstance(now, S) or _outer(here, i, now.dim) == _outer(target, i, now.dim)):
        return "", now
    if isinstance(now, S):
        if isinstance(there, S) and there.dim != now.dim and _may_cut(here, target, i, there.dim):
            return "all_to_all", there
        return "all_gather", R
    if isinstance(now, P) and not isinstance(there, S):
        return ("all_reduce", R) if isinstance(there, Replicated) else ("", now)
    return "", now


def _outer(places: list[Placement] | Placements, i: int, dim: int) -> list[tuple[int, Placement]]:
    """The axes further out that shard the same dim."""
    return [(j, p) for j, p in enumerate(places[:i]) if isinstance(p, S) and p.dim == dim]


def _may_cut(here: list[Placement], target: Placements, i: int, dim: int) -> bool:
    """Whether axis i may shard the dim now: all else that shards it in the end does already, and nothing more."""
    cutting = [[(j, p) for j, p in enumerate(places) if j != i and isinstance(p, S) and p.dim == dim] for places in (here, target)]
    return cutting[0] == cutting[1]


def _size(mesh: Mesh, here: list[Placement], i: int, kind: str, size: float) -> float:
    """Bytes of a collective over axis i, from what the other axes leave of the tensor."""
    others = math.prod(mesh.sizes[a] for j, a in enumerate(mesh.axes) if j != i and isinstance(here[j], S))
    whole = size / others
    return whole / mesh.sizes[mesh.axes[i]] if kind == "all_to_all" else whole


@dataclass(frozen=True)
class OnCluster:
    """Prices of a cluster whose devices the mesh covers, last axis innermost; with `issued`, of ops whose host does not run ahead."""

    cluster: Cluster
    mesh: Mesh
    issued: bool = False

    def on(self, mesh: Mesh) -> OnCluster:
        return OnCluster(self.cluster, mesh, self.issued)

    def _seconds(self, op: Op) -> float:
        return self._costs.alone(op) if self.issued else self._costs.seconds(op)

    @property
    def chained(self) -> bool:
        return compiles(self.cluster.device)

    @cached_property
    def _costs(self) -> Costs:
        return on_mesh(self.cluster, self.mesh)

    def move(self, move: Reshard) -> float:
        return SLICE if move.kind == "slice" else self._seconds(Collective(move.kind, move.size, move.axis))

    def work(self, ops: Sequence[Op], node: Node) -> float:
        own = sum(map(self._seconds, ops))
        if node.op.parts is None:
            return own
        return min(own, sum(self._seconds(op) for part in node.op.parts(node) for op in of_node(part)))  # run as it is, or as what defines it
