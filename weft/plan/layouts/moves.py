"""From one layout of a tensor to another: which collectives, how many bytes each, and what they cost.

The route is the one `ops.comm.reshard` takes: cuts undone from the innermost axis out, then made from the outermost in.
Here layouts are placements by axis, so that a table of all pairs is cheap; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from weft.cluster import collectives, kernels
from weft.cluster.collectives import Ranks
from weft.cluster.spec import Cluster
from weft.core.layout import Layout, Mesh, P, Placement, R, Replicated, S
from weft.core.node import DTYPE_NAMES, Node
from weft.core.program import Program
from weft.ops.registry import ONE, Kind, equation_of, flops, memory_traffic, nbytes

Placements = tuple[Placement, ...]  # one per axis of the mesh, in order

SLICE = 1e-9  # seconds; taking a part of what is there costs next to nothing, but more than not having to
DTYPES = {"f64": "fp64", "f32": "fp32", "bf16": "bf16", "f16": "fp16"}


@dataclass(frozen=True)
class Move:
    """One collective on the way. `size` is the whole tensor of its group in bytes, or a rank's part for all_to_all."""

    kind: str
    axis: str
    size: float


class Prices(Protocol):
    """Seconds of a collective, and of what the busiest rank does at a node."""

    def move(self, move: Move) -> float: ...

    def work(self, node: Node) -> float: ...

    def on(self, mesh: Mesh) -> Prices:
        """The same prices for a mesh of the same ranks with some neighbouring axes joined."""
        ...


def of(layout: Layout) -> Placements:
    return tuple(layout.placement(axis) for axis in layout.mesh.axes)


def route(mesh: Mesh, source: Placements, target: Placements, size: float) -> list[Move] | None:
    """The collectives that bring a tensor of `size` bytes from source to target; None where there is no way (nothing turns P)."""
    here, moves = list(source), []
    axes = list(mesh.axes)
    for i in reversed(range(len(axes))):
        move, here[i] = _undo(mesh, here, target, i)
        if move:
            moves.append(Move(move, axes[i], _size(mesh, here, i, move, size)))
    for i, there in enumerate(target):
        if here[i] == there:
            continue
        if not isinstance(there, S):
            return None
        kind = "reduce_scatter" if isinstance(here[i], P) else "slice"
        moves.append(Move(kind, axes[i], _size(mesh, here, i, kind, size)))
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
    """The axes further out that cut the same dim."""
    return [(j, p) for j, p in enumerate(places[:i]) if isinstance(p, S) and p.dim == dim]


def _may_cut(here: list[Placement], target: Placements, i: int, dim: int) -> bool:
    """Whether axis i may cut the dim now: all else that cuts it in the end does already, and nothing more."""
    cutting = [[(j, p) for j, p in enumerate(places) if j != i and isinstance(p, S) and p.dim == dim] for places in (here, target)]
    return cutting[0] == cutting[1]


def _size(mesh: Mesh, here: list[Placement], i: int, kind: str, size: float) -> float:
    """Bytes of a collective over axis i, from what the other axes leave of the tensor."""
    others = math.prod(mesh.sizes[a] for j, a in enumerate(mesh.axes) if j != i and isinstance(here[j], S))
    whole = size / others
    return whole / mesh.sizes[mesh.axes[i]] if kind == "all_to_all" else whole


@dataclass(frozen=True)
class OnCluster:
    """Prices of a cluster whose devices the mesh covers, last axis innermost. Fused pointwise ops touch only what enters and leaves."""

    cluster: Cluster
    mesh: Mesh

    def on(self, mesh: Mesh) -> OnCluster:
        return OnCluster(self.cluster, mesh)

    def move(self, move: Move) -> float:
        if move.kind == "slice":
            return SLICE
        inner = self.mesh.axes[self.mesh.axes.index(move.axis) + 1 :]
        stride, size = math.prod(self.mesh.sizes[a] for a in inner), self.mesh.sizes[move.axis]
        return collectives.seconds(self.cluster, move.kind, move.size, Ranks(self.cluster.members(stride, size)))

    def chained(self, program: Program, node: Node) -> float:
        """Work of a node of a placed program, fused with the pointwise ops around it."""
        seen = outside(node, *edges_of_chain(program, node))
        return self.work(seen) if seen.args or seen.types else 0.0

    def work(self, node: Node) -> float:
        if node.op.parts is not None:  # it is run as it is, or as what defines it
            return min(self._work(node), sum(map(self._work, node.op.parts(node))))
        return self._work(node)

    def _work(self, node: Node) -> float:
        kind, device = node.op.kind, self.cluster.device
        if kind is Kind.VIEW and len(node.args) > 1:  # joining copies
            return kernels.touch(device, 2.0 * sum(nbytes(t) for t in node.types), 1)
        if kind in (Kind.VIEW, Kind.SOURCE):
            return 0.0
        if kind is Kind.CONTRACT:
            return kernels.product(device, *_product(node), _dtype(node))
        moved = kernels.touch(device, memory_traffic(node), 1) + node.op.beside * device.get("kernel.launch")
        if kind is Kind.WHOLE:
            return max(moved, flops(node) / (device.peak(_dtype(node)) * device.get("gemm.efficiency")))
        return moved


def edges_of_chain(program: Program, node: Node) -> tuple[tuple[bool, ...], bool]:
    """Which operands enter a fused chain at this node, and whether its result leaves it; ops that are not pointwise are alone."""
    pointwise = node.op.kind is Kind.POINTWISE
    enters = tuple(not pointwise or a.op.kind is not Kind.POINTWISE for a in node.args)
    users = program.users[node]
    return enters, not pointwise or not users or any(u.op.kind is not Kind.POINTWISE for u in users)


def outside(node: Node, enters: tuple[bool, ...], leaves: bool) -> Node:
    """The node with only those operands and results that pass the edge of a fused chain."""
    args = tuple(a for a, out in zip(node.args, enters, strict=True) if out)
    return Node(node.op, args, node.attrs, node.types if leaves else ())


def _dtype(node: Node) -> str:
    return DTYPES.get(DTYPE_NAMES[node.types[0].dtype], "fp32")


def _product(node: Node) -> tuple[int, int, int, int]:
    """A contraction as m x n x k, batched."""
    eq = equation_of(node)
    assert eq is not None
    left, right, out = (set(eq.ins[0]), set(eq.ins[-1]), set(eq.outs[0]))
    size = dict(_label_sizes(node))
    groups = (left & out - right, right & out - left, left & right - out, left & right & out)
    m, n, k, batch = (math.prod(size[x] for x in group if x != ONE) for group in groups)
    return m, n, k, batch


def _label_sizes(node: Node) -> Iterator[tuple[str, int]]:
    eq = equation_of(node)
    assert eq is not None
    for labels, arg in zip(eq.ins, node.args, strict=True):
        yield from zip(labels, arg.type.layout.largest_local, strict=True)
