"""Samples of a dynamic model balanced over ranks: each runs those that are assigned to it by predicted time, whichever rank's rows they are.

Where samples are sharded over an axis, all its ranks gather the graphs, a few numbers each, and take hands instead; the roots' rows, summed,
go back to the ranks they belong to. Along an axis that has every sample on every rank (tp), ranks share the work the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.layout import Layout, Replicated, S
from weft.core.node import Node, with_operands
from weft.core.program import Program
from weft.ops.comm import reshard
from weft.ops.fill import arange
from weft.ops.rounds import HANDS, rounds, rounds_backward
from weft.plan.place import rebuilt


def balance_samples(p: Program) -> Program:
    """The placed program with the samples of dynamic models split over the ranks; one without such models is itself."""
    if not any(n.op is rounds for n in p.nodes):
        return p
    home: dict[Node, list[Layout]] = {}

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op is rounds or n.op is rounds_backward:
            first = 0 if n.op is rounds else len(n.attr("gives"))
            axes = shared(n, first)
            new = with_operands(n, _gathered(n, args, first, axes) if axes else args)
            home[new] = [t.layout for t in n.types]
            return new if len(new.types) > 1 else reshard(new, home[new][0])  # type: ignore[no-any-return]
        new = with_operands(n, args)
        return reshard(new, home[args[0]][n.attr("index")]) if n.op.is_item and args[0] in home else new  # type: ignore[no-any-return]

    return rebuilt(p, node)


def shared(n: Node, first: int) -> list[str]:
    """Axes whose ranks share the samples: those along which graphs are sharded, or full while each of the ranks has two samples or more."""
    graphs, axes, left, ranks = n.args[first], list[str](), n.args[first].type.layout.largest_local[0], 1
    for axis in n.mesh.axes:
        size = n.mesh.size(axis)
        sharded = isinstance(graphs.type.on(axis), S)
        alone = isinstance(graphs.type.on(axis), Replicated) and left >= 2 * size
        if size > 1 and ranks * size <= HANDS and (sharded or alone) and all(isinstance(a.type.on(axis), Replicated) for a in n.args[first + 1 :]):
            left //= 1 if sharded else size
            ranks *= size
            axes.append(axis)
    return axes


def _gathered(n: Node, args: Sequence[Node], first: int, axes: list[str]) -> tuple[Node, ...]:
    """Operands replicated along the axes, but for the hands, which each rank has some of."""
    full = [reshard(a, _without(a.layout, axes)) for a in args[: first + 1]]
    hands = arange(HANDS, n.mesh, shards=tuple((axis, 0, None) for axis in axes))
    return (*full, hands, *args[first + 2 :])


def _without(layout: Layout, axes: list[str]) -> Layout:
    return Layout.of(layout.mesh, layout.shape, {a: p for a, p in layout.placements.items() if a not in axes})
