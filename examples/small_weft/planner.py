"""6. A planner: choose the layout of each input. For each op try every label on every axis, bring the operands there by explicit
communication, and keep what costs least. It knows equations and prices; it does not know the name of any kind of parallelism.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .layouts import P, R, Refused, S, Type, tensor
from .nodes import INPUT, Node, Program, make, needed
from .ops import all_gather, all_reduce, bring, reduce_scatter, slice_
from .verbs import rebuild


@dataclass(frozen=True)
class Machine:
    """One rank: flop/s, bytes/s to its peers, seconds to start a transfer, bytes."""

    flops: float = 1e11
    bandwidth: float = 1e10
    latency: float = 1e-6
    memory: float = 1e10


def seconds(node: Node, machine: Machine) -> float:
    """Time of one node: work over rate, or bytes over links."""
    if node.op.moves:
        n = node.type.mesh.size(node.attrs[0])
        size = 4 * max(math.prod(node.type.local), math.prod(node.args[0].type.local))
        rounds = {all_reduce: 2.0, reduce_scatter: 1.0, all_gather: 1.0, slice_: 0.0}[node.op]
        return rounds * ((n - 1) / n * size / machine.bandwidth + machine.latency)
    if not node.op.labels:
        return 0.0
    ins, _ = node.op.labels([a.type for a in node.args])
    sizes = {x: n for names, a in zip(ins, node.args, strict=True) for x, n in zip(names, a.type.local, strict=True)}
    return 2 * math.prod(sizes.values()) / machine.flops


def cost(p: Program, machine: Machine) -> float:
    return sum(seconds(n, machine) for n in p.nodes)


def stored(p: Program) -> int:
    """Bytes of the inputs on each rank."""
    return 4 * sum(math.prod(n.type.local) for n in p.inputs.values())


def place(p: Program, layouts: Mapping[str, Type], machine: Machine) -> Program:
    """A program for one device, with the given layouts of its inputs; what goes back into an input has the layout of that input."""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is INPUT:
            return INPUT(node.attrs[0], layouts[node.attrs[0]])
        known = set(needed(args))
        return min(ways(node, args), key=lambda new: price(new, known, machine))

    q = rebuild(p, change)
    return Program({k: settle(n, layouts[k] if k in layouts else tensor(n.type.mesh, *n.type.shape)) for k, n in q.outputs.items()})


def settle(x: Node, want: Type) -> Node:
    for axis, placement in want.placements:
        x = bring(x, axis, placement)
    return x


def ways(node: Node, args: tuple[Node, ...]) -> Iterator[Node]:
    """Every way to run the op: along each axis the operands as they are, or replicated, or sharded along one label."""
    ins, _ = node.op.labels([a.type for a in args])  # type: ignore[misc]
    axes = [a for a, _ in node.type.mesh.axes]
    options = [None, R, *dict.fromkeys(itertools.chain.from_iterable(ins))]
    for choice in itertools.product(options, repeat=len(axes)):
        try:
            yield make(node.op, tuple(moved(a, ins[k], axes, choice) for k, a in enumerate(args)), node.attrs)
        except Refused:
            continue


def moved(x: Node, names: list[str], axes: list[str], choice: Iterable[Any]) -> Node:
    for axis, option in zip(axes, choice, strict=True):
        if option is not None:
            x = bring(x, axis, S(names.index(option)) if option in names else R)
    return x


def price(node: Node, known: set[Node], machine: Machine) -> float:
    """Of the op and all that was done to its operands; a partial sum will have to be paid by somebody."""
    owed = sum(seconds(all_reduce(node, axis), machine) for axis, p in node.type.placements if p == P)
    return sum(seconds(n, machine) for n in needed([node]) if n not in known) + owed


def plan(p: Program, machine: Machine) -> Program:
    """The cheapest placement of the inputs whose stored parts fit, at equal cost the smallest; to leave the program alone is always a candidate."""
    options = {name: list(placements(node.type)) for name, node in p.inputs.items()}
    placed = (place(p, dict(zip(options, choice, strict=True)), machine) for choice in itertools.product(*options.values()))
    fitting = [q for q in itertools.chain([p], placed) if stored(q) <= machine.memory]
    if not fitting:
        raise Refused(f"no placement fits {machine.memory:g} bytes")
    return min(fitting, key=lambda q: (round(cost(q, machine), 9), stored(q)))


def placements(t: Type) -> Iterator[Type]:
    """Every layout of an input: along each axis replicated, or sharded along a dim that divides."""
    for choice in itertools.product([R, *map(S, range(len(t.shape)))], repeat=len(t.mesh.axes)):
        try:
            yield Type(t.mesh, t.shape, tuple((a, c) for (a, _), c in zip(t.mesh.axes, choice, strict=True)))
        except Refused:
            continue
