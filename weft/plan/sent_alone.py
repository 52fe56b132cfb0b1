"""Experts marked so that tokens are sent to the ranks they picked, by an all_to_all whose sizes the moment decides, where they would be gathered."""

from __future__ import annotations

from weft.core.node import Node, make, with_operands
from weft.core.program import Program
from weft.ops.experts import experts, experts_backward, sending
from weft.plan.place import rebuilt


def sent_alone(p: Program, axis: str, made: dict[Node, Node] | None = None) -> Program:
    """The placed program with the same values, its experts reached along an axis marked so, where each rank has as many tokens and as many experts;
    `made` is filled with what became of each node."""

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        way = sending(p, n, axis)
        even = way is not None and all(a.layout.is_even for a in (way.gathers[0].args[0], n.args[-1]))
        return make(n.op, args, {**dict(n.attrs), "sent": axis}) if even else with_operands(n, args)

    return rebuilt(p, node, made)


def imbalanced(p: Program, imbalance: float, made: dict[Node, Node] | None = None) -> Program:
    """The program with the same values, its experts priced as if the busiest rank had so many times the picks of an average one."""

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        return make(n.op, args, {**dict(n.attrs), "imbalance": imbalance}) if n.op in (experts, experts_backward) else with_operands(n, args)

    return rebuilt(p, node, made)
