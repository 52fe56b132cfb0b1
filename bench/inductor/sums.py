"""A product and what is added to it as one call of the library, as Inductor has it: at the place of the sum, so its operands wait for that.

    add(mm(a, b), c)  ->  addmm(c, a, b)

Not on an accelerator where all who read the sum are pointwise: there the addition is done inside their kernel.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from bench.inductor.observe import VIEWS

_aten = torch.ops.aten


def join(gm: GraphModule, accelerator: bool) -> None:
    """Join every product of a graph with its sum where it has one."""
    for node in list(gm.graph.nodes):
        pair = _pair(node)
        if pair is not None and _fits(*pair) and not (accelerator and all(_pointwise(u) for u in node.users)):
            product, other = pair
            with gm.graph.inserting_before(node):
                joined = gm.graph.call_function(_aten.addmm.default, (other, *product.args))
            joined.meta = dict(node.meta)
            node.replace_all_uses_with(joined)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _pair(node: Node) -> tuple[Node, Node] | None:
    """A product that nothing else reads, and what is added to it."""
    if node.op != "call_function" or node.target is not _aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        if isinstance(one, Node) and isinstance(other, Node):
            product = _turned_back(one)
            if product.target is _aten.mm.default and len(product.users) == 1:
                return product, other
    return None


def _turned_back(node: Node) -> Node:
    """What is turned twice, as gradients of weights are, is as it was."""
    inner = node.args[0] if _turns(node) else None
    if isinstance(inner, Node) and _turns(inner) and len(node.users) == len(inner.users) == 1 and isinstance(inner.args[0], Node):
        return inner.args[0]
    return node


def _turns(node: Node) -> bool:
    swapped = node.target is _aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return swapped or node.target is _aten.t.default


def _fits(product: Node, other: Node) -> bool:
    """Whether the library can add it: of one type, and of the product's shape or repeated to it."""
    made, given = product.meta["val"], other.meta["val"]
    if given.dtype != made.dtype or given.dim() > 2:
        return False
    return all(n in (1, m) for n, m in zip(reversed(given.shape), reversed(made.shape), strict=False))


def _pointwise(user: Node) -> bool:
    """Whether all that read a value, itself or through views, are pointwise."""
    packet = getattr(user.target, "overloadpacket", None)
    if user.op != "call_function" or packet is None:
        return False
    if packet.__name__ in VIEWS:
        return all(_pointwise(u) for u in user.users)
    return torch.Tag.pointwise in user.target.tags  # type: ignore[union-attr]
