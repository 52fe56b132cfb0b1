"""Slices that ranks hold when a step begins, as ZeRO-3's of parameters, are laid out for all to read once, instead of at every gather.

    intra_host_gather(f(p)) ... intra_host_gather(f(p))  ->  placed = intra_host_place([f(p), ...]);  intra_host_take(placed, where) ...

For a traced step in which nothing is written in place: what is made of inputs alone is the same from its beginning to its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

ALIGNED = 64  # bytes


def gather_once(graph: Graph) -> None:
    """Gathers of what inputs alone make, of each group of ranks, by one op at the beginning and one for each that takes."""
    found: dict[int, list[Node]] = {}
    for n in graph.nodes:
        if n.op == "call_function" and n.target is torch.ops.weft.intra_host_gather.default and _source(n.args[0]) is not None:
            found.setdefault(n.args[1], []).append(n)
    for group, gathers in found.items():
        _gather_group(graph, group, gathers)


def _source(n: Any) -> Node | None:
    """The input that a node is made of, by ops of one operand."""
    while n.op == "call_function" and len(n.all_input_nodes) == 1 and _pure(n.target):
        n = n.all_input_nodes[0]
    return n if n.op == "placeholder" else None


def _pure(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and op.namespace in ("aten", "prims") and not op._schema.is_mutable and _deterministic(op)


def _deterministic(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded not in op.tags


def _gather_group(graph: Graph, group: int, gathers: list[Node]) -> None:
    first = next(n for n in graph.nodes if n.op != "placeholder")
    slices: dict[Any, Node] = {}  # by how they are made
    for n in gathers:
        key = _made(n.args[0])
        if key not in slices:
            slices[key] = _copied(graph, n.args[0], first)
    places, size = dict[Any, int](), 0
    for key, x in slices.items():
        places[key] = size
        size += -(-x.meta["val"].nbytes // ALIGNED) * ALIGNED
    mode = gathers[0].meta["val"].fake_mode
    with graph.inserting_before(first):
        placed = graph.call_function(torch.ops.weft.intra_host_place.default, (list(slices.values()), list(places.values()), size, group))
    with mode:
        placed.meta["val"] = slices[_made(gathers[0].args[0])].meta["val"].new_empty(1)
    for n in gathers:
        x = n.args[0].meta["val"]
        with graph.inserting_before(n):
            args = (placed, size, places[_made(n.args[0])], list(x.shape), x.dtype, *n.args[1:])
            taken = graph.call_function(torch.ops.weft.intra_host_take.default, args)
        taken.meta["val"] = n.meta["val"]
        n.replace_all_uses_with(taken)
        graph.erase_node(n)


def _made(n: Node) -> Any:
    """How a node is made of an input, to be compared."""
    if n.op == "placeholder":
        return n
    return n.target, str([a for a in n.args if not isinstance(a, Node)]), str(n.kwargs), _made(n.all_input_nodes[0])


def _copied(graph: Graph, n: Node, before: Node) -> Node:
    """The same made of the same input, at the beginning."""
    if n.op == "placeholder":
        return n
    made = {n.all_input_nodes[0]: _copied(graph, n.all_input_nodes[0], before)}
    with graph.inserting_before(before):
        return graph.node_copy(n, made.__getitem__)
