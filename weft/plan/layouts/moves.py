"""From one layout of a tensor to another: which collectives, how many bytes each, and what they cost.

The route is the one `ops.comm.reshard` takes: shards undone from the innermost axis out, then made from the outermost in; the other way round
where all that change shard one dim side by side.
Here layouts are placements by axis, so that a table of all pairs is cheap; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from weft.cluster.spec import Cluster
from weft.core.layout import Layout, Mesh, P, Placement, R, Replicated, S
from weft.core.node import Node
from weft.cost.price import Costs, compiles, on_mesh
from weft.cost.work import Collective, Op, of_node
from weft.plan.assignment.problem import Floats

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
    changes = [(now, there) for now, there in zip(source, target, strict=True) if now != there]
    gathers = _side_by_side([now for now, _ in changes]) and all(there == R for _, there in changes)
    scatters = _side_by_side([there for _, there in changes]) and all(isinstance(now, P) for now, _ in changes)
    inward = range(len(axes))
    for i in inward if gathers else inward[::-1]:
        move, here[i] = _undo(mesh, here, target, i)
        if move:
            moves.append(Reshard(move, axes[i], _size(mesh, here, i, move, size)))
    for i in inward[::-1] if scatters else inward:
        there = target[i]
        if here[i] == there:
            continue
        if not isinstance(there, S):
            return None
        kind = "reduce_scatter" if isinstance(here[i], P) else "slice"
        moves.append(Reshard(kind, axes[i], _size(mesh, here, i, kind, size)))
        here[i] = there
    return moves


def _side_by_side(places: Sequence[Placement]) -> bool:
    """Whether several axes shard one dim, none nested in another."""
    dims = [p.dim for p in places if isinstance(p, S)]
    return len(dims) == len(places) == len(set(places)) > len(set(dims)) == 1


def _undo(mesh: Mesh, here: list[Placement], target: Placements, i: int) -> tuple[str, Placement]:
    """What takes axis i towards its target before anything further out has moved, and what it then holds."""
    now, there = here[i], target[i]
    if now == there and (not isinstance(now, S) or _outer(here, i, now.dim) == _outer(target, i, now.dim)):
        return "", now
    if isinstance(now, S):
        if isinstance(there, S) and there.dim != now.dim and _may_shard(here, target, i, there.dim):
            return "all_to_all", there
        return "all_gather", R
    if isinstance(now, P) and not isinstance(there, S):
        return ("all_reduce", R) if isinstance(there, Replicated) else ("", now)
    return "", now


def _outer(places: list[Placement] | Placements, i: int, dim: int) -> list[tuple[int, Placement]]:
    """The axes further out that shard the same dim."""
    return [(j, p) for j, p in enumerate(places[:i]) if isinstance(p, S) and p.dim == dim]


def _may_shard(here: list[Placement], target: Placements, i: int, dim: int) -> bool:
    """Whether axis i may shard the dim now: all else that shards it in the end does already, and nothing more."""
    cutting = [[(j, p) for j, p in enumerate(places) if j != i and isinstance(p, S) and p.dim == dim] for places in (here, target)]
    return cutting[0] == cutting[1]


def _size(mesh: Mesh, here: list[Placement], i: int, kind: str, size: float) -> float:
    """Bytes of a collective over axis i, from what the other axes leave of the tensor."""
    others = math.prod(mesh.sizes[a] for j, a in enumerate(mesh.axes) if j != i and isinstance(here[j], S))
    full = size / others
    return full / mesh.sizes[mesh.axes[i]] if kind == "all_to_all" else full


class Routes:
    """Prices of routes, each worked out once."""

    def __init__(self, mesh: Mesh, prices: Prices) -> None:
        self.mesh, self.prices = mesh, prices
        self._known: dict[tuple[Placements, Placements, float], float] = {}
        self._tables: dict[object, Floats] = {}
        self._by_ways: dict[object, tuple[object, Floats]] = {}

    def known(self, strategies: object, of: object, make: Callable[[], Floats]) -> Floats:
        """A table of some ways, known by being the same object."""
        key = id(strategies), of
        if key not in self._by_ways:
            self._by_ways[key] = strategies, make()
        return self._by_ways[key][1]

    @cached_property
    def trifle(self) -> float:
        """A price too small to outweigh any other."""
        return 1e-9 * max((self.prices.move(Reshard("all_reduce", axis, 2.0**20)) for axis in self.mesh.axes), default=0.0)

    def between(self, sources: Sequence[Placements], targets: Sequence[Placements], size: float) -> Floats:
        key = tuple(sources), tuple(targets), size
        if key not in self._tables:
            rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
            table = np.array([[self._price(a, b, size) for b in columns] for a in rows])
            row, column = {a: i for i, a in enumerate(rows)}, {b: i for i, b in enumerate(columns)}
            self._tables[key] = table[np.ix_([row[a] for a in sources], [column[b] for b in targets])]
        return self._tables[key]

    def _price(self, source: Placements, target: Placements, size: float) -> float:
        key = source, target, size
        if key not in self._known:
            moves = route(self.mesh, source, target, size)
            self._known[key] = math.inf if moves is None else sum(self.prices.move(m) for m in moves)
        return self._known[key]

    def share(self, layout: Placements) -> float:
        """The part of a tensor each rank holds."""
        return 1 / math.prod(self.mesh.sizes[a] for a, p in zip(self.mesh.axes, layout, strict=True) if isinstance(p, S))


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
