"""Makes equal values of a compiled step once, but for those that shall be made again. Inductor does so for what it differentiates itself, not for
a graph it is given.

For graphs in which nothing is written in place: Inductor's own, after it has made them so. What a step recomputes reads its inputs through
`barrier`; that op is taken out of the trace, and leaves a mark on all that follows from it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten

from weft.runtime import materialize
from weft.runtime.custom_ops import define

aten = torch.ops.aten
MARK = "weft: made of values recomputed"

define("barrier(Tensor x) -> Tensor", lambda x: x.clone(), torch.empty_like)


def barrier(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values; what a trace makes of them is not what it has made of them before."""
    return tuple(torch.ops.weft.barrier(x) if isinstance(x, FakeTensor) else x for x in values)


def mark_recomputed(graph: Graph) -> None:
    """Take the marks of a trace out of it, and note on every node from which of them it follows."""
    follows: dict[Node, frozenset[int]] = {}
    numbers: dict[frozenset[int], int] = {}
    for k, node in enumerate(list(graph.nodes)):
        mine = frozenset().union(*(follows[a] for a in node.all_input_nodes if a in follows))
        if node.target is torch.ops.weft.barrier.default:
            for user in list(node.users):
                follows[user] = follows.get(user, frozenset()) | mine | {k}
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        mine |= follows.get(node, frozenset())
        if mine:
            follows[node] = mine
            node.meta["custom"] = {**node.meta.get("custom", {}), MARK: numbers.setdefault(mine, len(numbers))}


def once_each(graph: Graph) -> None:
    """The first of several nodes that do the same with the same operands, both again or both not, stands for all."""
    _transpose_pads(graph)
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if not _pure(node):
            continue
        leaves, shape = tree_flatten((node.args, node.kwargs))
        mark = node.meta.get("custom", {}).get(MARK)
        kept = first.setdefault((node.target, tuple((type(x), x) for x in leaves), str(shape), mark), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _transpose_pads(graph: Graph) -> None:
    """A turned matrix with more rows as the matrix with more columns, turned: Inductor pads what matmuls read, turned or not, and so finds that one
    padded tensor does for both."""
    for node in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        rotated, pads, *value = node.args
        if rotated.target is not aten.permute.default or list(rotated.args[1]) != [1, 0] or len(pads) != 4 or any(pads[:2]):
            continue
        with graph.inserting_before(node):
            wide = graph.call_function(aten.constant_pad_nd.default, (rotated.args[0], [*pads[2:], 0, 0], *value))
            new = graph.call_function(aten.permute.default, (wide, [1, 0]))
        with node.meta["val"].fake_mode:
            wide.meta = {**node.meta, "val": aten.constant_pad_nd.default(rotated.args[0].meta["val"], [*pads[2:], 0, 0], *value)}
        new.meta = {**node.meta, "val": wide.meta["val"].permute(1, 0)}
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def as_pass(traced: Graph) -> Any:
    """The same as Inductor takes it, for what it makes of a trace."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    marks = [n.meta.get("custom", {}).get(MARK) for n in traced.nodes]

    class OnceEach(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            once_each(graph)
            materialize.shared(graph)

        def uuid(self) -> Any:
            """What compiled code is kept under, next to the graph's own: to be changed with the pass."""
            return f"weft once each 5 {marks}"

    return OnceEach()


def _pure(node: Node) -> bool:
    """Whether it makes the same value from the same operands, whatever else has run; of none, a constant."""
    if node.op != "call_function":
        return False
    op = node.target
    if op is operator.getitem:
        return True
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(op, torch._ops.OpOverload) and op.namespace in ("aten", "prims") and not op._schema.is_mutable and seeded not in op.tags
