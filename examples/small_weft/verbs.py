"""5. Verbs: each rebuilds a program from the inputs up. It needs no conditions of its own: where its idea does not hold, the types refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .layouts import R, Refused, S
from .meaning import same_meaning
from .nodes import INPUT, Node, Op, Program, make
from .ops import all_gather, all_reduce, bring, reduce_scatter, slice_


def rebuild(p: Program, change: Callable[[Node, tuple[Node, ...]], Node]) -> Program:
    """The program with every node replaced by `change(node, its new operands)`; checked to mean the same."""
    new: dict[Node, Node] = {}
    for node in p.nodes:
        new[node] = change(node, tuple(new[a] for a in node.args))
    q = Program({name: new[node] for name, node in p.outputs.items()})
    assert same_meaning(p, q)
    return q


def again(node: Node, args: tuple[Node, ...]) -> Node:
    return make(node.op, args, node.attrs)


def split(p: Program, dim: int) -> Program:
    """all_reduce -> reduce_scatter ; all_gather"""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is not all_reduce:
            return again(node, args)
        (axis,) = node.attrs
        return all_gather(reduce_scatter(args[0], axis, dim), axis, dim)

    return rebuild(p, change)


def sink(p: Program) -> Program:
    """all_gather ; f -> f ; all_gather, as far down as types allow"""

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        for k, arg in enumerate(args):
            if arg.op is all_gather and node.op.labels:
                axis, dim = arg.attrs
                label = node.op.labels([a.type for a in args])[0][k][dim]
                try:
                    return bring(on_slices(node.op, args, node.attrs, axis, label), axis, R)
                except Refused:
                    pass
        return again(node, args)

    return rebuild(p, change)


def on_slices(op: Op, args: tuple[Node, ...], attrs: tuple[Any, ...], axis: str, label: str) -> Node:
    """The op with every operand that has the label in slices of it."""
    ins, _ = op.labels([a.type for a in args])  # type: ignore[misc]
    return make(op, tuple(taken(a, axis, n.index(label)) if label in n else a for a, n in zip(args, ins, strict=True)), attrs)


def taken(x: Node, axis: str, dim: int) -> Node:
    """The slice of a full value, taken as early as can be: before its gather, before the op that made it, or here."""
    if x.op is all_gather and x.attrs == (axis, dim):
        return x.args[0]
    if x.op.labels:
        label = x.op.labels([a.type for a in x.args])[1][dim]
        return on_slices(x.op, x.args, x.attrs, axis, label)
    return slice_(x, axis, dim)


def shard_state(p: Program, *names: str) -> Program:
    """Inputs that are only ever read in slices are stored in slices, and what they become stays in slices."""
    readers = {name: {(r.op, r.attrs) for r in p.readers(p.inputs[name])} for name in names}
    for name, found in readers.items():
        if len(found) != 1 or next(iter(found))[0] is not slice_:
            raise Refused(f"{name} must be read in equal slices only, found {', '.join(op.name for op, _ in found)}")

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op is INPUT and node.attrs[0] in names:
            ((_, (axis, dim)),) = readers[node.attrs[0]]
            return INPUT(node.attrs[0], node.type.place(axis, S(dim)))
        stored = node.op is slice_ and args[0].op is INPUT and args[0].attrs[0] in names
        return args[0] if stored else again(node, args)

    q = rebuild(p, change)
    return Program({k: n.args[0] if k in names and n.op is all_gather else n for k, n in q.outputs.items()})
