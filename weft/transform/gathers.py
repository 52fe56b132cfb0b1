"""ZeRO-3 gathers a parameter again for the backward pass, so that none stays gathered between the passes.

A second gather is another node of the same value: it reads the parameter as an item of `optimization_barrier(parameter, value)`, there once the value
is. That is one of the backward pass, a message's worth of gathers before the first reader, so that the gather is under way while others are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.codegen.order import MESSAGE, is_wire
from weft.core.node import Node, make, op_named, with_operands
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.comm import all_gather
from weft.ops.registry import nbytes
from weft.plan.roles import Roles


@dataclass(frozen=True)
class _GatheredParameter:
    """A gathered parameter: what is made of it alone from the gather on, and who reads that in the backward pass, the first first."""

    nodes: tuple[Node, ...]
    readers: tuple[Node, ...]
    size: int


def gather_for_backward(p: Program, axes: Collection[str]) -> Program:
    """The program with parameters that both passes read in full gathered along some axes for each of them. What the backward pass begins with is
    kept: it would be gathered again at once."""
    roles, number = Roles(p), {n: i for i, n in enumerate(p.nodes)}
    every = (_gathered_parameter(p, roles, axes, source, number) for source in p.inputs_for(Role.PARAMETER).values())
    found = sorted((w for w in every if w is not None), key=lambda w: number[w.readers[0]])
    starts = _starts(found, number, roles.forward)
    return _remade(p, [(found[k], start) for k, start in starts.items()]) if starts else p


def _gathered_parameter(p: Program, roles: Roles, axes: Collection[str], source: Node, number: Mapping[Node, int]) -> _GatheredParameter | None:
    """What is gathered of a parameter, where both passes read it."""
    alone, full = [source], dict[Node, None]()
    for n in alone:
        more = [u for u in p.users[n] if len(u.args) == len(u.types) == 1 and u not in roles.after]
        full |= dict.fromkeys(u for u in more if n in full or u.op is all_gather and u.attr("axis") in axes and is_wire(u))
        alone += more
    readers = {u for n in full for u in p.users[n] if u not in full and u not in roles.after}
    back = sorted(readers - roles.forward, key=number.__getitem__)
    size = sum(nbytes(n.type) for n in full if n.op is all_gather)
    return _GatheredParameter(tuple(full), tuple(back), size) if 0 < len(back) < len(readers) else None


def _starts(found: Sequence[_GatheredParameter], number: Mapping[Node, int], forward: set[Node]) -> dict[int, Node]:
    """The value that each gather waits for: what the reader of an earlier one computes with. None for those before which nothing is read."""
    starts: dict[int, Node] = {}
    for k, full in enumerate(found):
        ahead = 0
        for earlier in reversed(found[:k]):
            ahead += earlier.size
            before = [a for a in earlier.readers[0].args if a not in forward and len(a.types) == 1]
            if before and earlier.readers[0] is not full.readers[0]:
                starts[k] = max(before, key=number.__getitem__)
                if ahead >= MESSAGE:
                    break
    return starts


def _remade(p: Program, some: Sequence[tuple[_GatheredParameter, Node]]) -> Program:
    start = {n: start for w, start in some for n in w.nodes}
    readers = {n for w, _ in some for n in w.readers}
    made, second = dict[Node, Node](), dict[tuple[Node, Node], Node]()

    def again(a: Node, after: Node) -> Node:
        """The same made of the parameter anew, once what it waits for is there."""
        if (a, after) not in second:
            if a.args:
                second[a, after] = with_operands(a, (again(a.args[0], after),))
            else:
                second[a, after] = make(op_named("item"), (make(op_named("optimization_barrier"), (a, made.get(after, after)), {}),), {"index": 0})
        return second[a, after]

    for n in p.nodes:
        args = tuple(again(a, start[a]) if n in readers and a in start else made.get(a, a) for a in n.args)
        made[n] = with_operands(n, args)
    new = p.with_outputs([(name, made[n]) for name, n in p.outputs], "gather again")
    return replace(new, lines={made.get(n, n): line for n, line in p.lines.items()})
