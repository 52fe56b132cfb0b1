"""Makes equal values of a compiled step once. Inductor does so for what it differentiates itself, not for a graph it is given.

For graphs in which nothing is written in place: Inductor's own, after it has made them so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten


def once_each(graph: Graph) -> None:
    """The first of several nodes that do the same with the same operands stands for all."""
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if not _pure(node):
            continue
        leaves, shape = tree_flatten((node.args, node.kwargs))
        kept = first.setdefault((node.target, tuple((type(x), x) for x in leaves), str(shape)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def as_pass() -> Any:
    """The same as Inductor takes it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class OnceEach(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            once_each(graph)

        def uuid(self) -> Any:
            """What compiled code is kept under: to be changed with the pass."""
            return "weft once each 2"

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
