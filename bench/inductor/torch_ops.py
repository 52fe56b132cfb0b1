"""What the nodes of a graph of torch ops are to a compiler: kernels of their own, sums, values that fuse; and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from bench.inductor.observe import ROUND

ALONE = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward", "scaled_dot_product",
    "index_put", "scatter", "sort", "topk", "_grouped_mm",
)  # fmt: skip
MATH = ("exp", "exp2", "erf", "tanh", "sigmoid", "log", "sin", "cos", "pow", "prepare_softmax_online")


def value_random_ops(gm: GraphModule) -> None:
    """What ops run with a state of the random numbers give: the partitioner that makes them does not say."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and "rng_state" in str(node.target) and not has_value(node):
            target, given = inner(node)
            own = {k: v for k, v in node.kwargs.items() if k != "rng_state"}
            args, kwargs = torch.fx.node.map_arg((given, own), lambda n: n.meta.get("val"))
            fake = next(t.fake_mode for t in torch.utils._pytree.tree_leaves(args) if hasattr(t, "fake_mode"))
            with fake:
                made = torch.utils._pytree.tree_leaves(target(*args, **kwargs))
            node.meta["val"] = tuple(t for t in made if isinstance(t, torch.Tensor) and all(isinstance(n, int) for n in t.shape))


def drop_copies(gm: GraphModule) -> None:
    """Take out copies into the layout a value has already, so that what is computed of the copy is seen to be computed of the value."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        source = node.args[0]
        if source.op == "call_function" and _laid_out(source) == _laid_out(node):
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
    gm.recompile()


def _laid_out(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype


def inner(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """What a node calls; an op run with a state of the random numbers is that op."""
    if "rng_state" in str(node.target):
        at = next(i for i, a in enumerate(node.args) if hasattr(a, "overloadpacket"))
        return node.args[at], node.args[at + 1 :]
    return node.target, node.args


def name_of(node: Node) -> str:
    target, _ = inner(node)
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else str(target)


def alone(node: Node) -> bool:
    if node.op != "call_function":
        return False
    name = name_of(node)
    if name == "scatter" and isinstance(node.args[0], Node) and name_of(node.args[0]) in ("full", "zeros", "full_like"):
        return False  # one place of each row set in a constant: a comparison of indices
    return name in ALONE or "index_put" in name or any(name.startswith((a, f"_{a}")) for a in ALONE[7:]) or over_rows(node)


def over_rows(node: Node) -> bool:
    """A sum over the leading dims, as of bias gradients, walks memory the other way than all around it."""
    if name_of(node) not in ("sum", "mean", "amax") or len(node.args) < 2 or not has_value(node.args[0]):
        return False
    dims, rank = node.args[1], node.args[0].meta["val"].dim()
    return isinstance(dims, (list, tuple)) and rank - 1 not in [d % rank for d in dims] and rank > 1


SUMS = ("sum", "mean", "amax", "var_mean", "max", "prod", "any", "logsumexp")


def summed(node: Node) -> bool:
    return name_of(node) in SUMS


def reduced(node: Node) -> int:
    """Elements each result of a reduction is made of."""
    if not summed(node):
        return 0
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    value = node.meta["val"]
    out = value[0] if isinstance(value, (tuple, list)) else value
    return source.meta["val"].numel() // max(1, out.numel()) if source is not None and has_value(source) else 0


def has_value(node: Any) -> bool:
    return isinstance(node, Node) and any(isinstance(t, torch.Tensor) for t in values_of(node))


def values_of(node: Node) -> Sequence[Any]:
    value = node.meta.get("val")
    return value if isinstance(value, (tuple, list)) else (value,)


def elements_of(node: Node) -> int:
    return max((t.numel() for t in values_of(node) if isinstance(t, torch.Tensor)), default=0)


def puts(node: Node) -> bool:
    """Whether it puts values into a tensor."""
    return "index_put" in name_of(node) or name_of(node).startswith("scatter")


def pads(node: Node) -> bool:
    """Whether its results are more than its inputs, so that it walks otherwise than what makes those."""
    return name_of(node) == "constant_pad_nd"


def turns(node: Node) -> bool:
    """Whether it pads what it reads by columns."""
    strides = node.args[0].meta["val"].stride() if pads(node) else ()  # type: ignore[union-attr]
    return list(strides) != sorted(strides, reverse=True)


def size_of(node: Node) -> int:
    return sum(bytes_of(t) for t in values_of(node) if isinstance(t, torch.Tensor))


def bytes_of(value: torch.Tensor) -> int:
    """As the allocator counts them; a size that is not known, as of the state of random numbers, is taken for nothing."""
    known = all(isinstance(n, int) for n in value.shape)
    return -(-value.numel() * value.element_size() // ROUND) * ROUND if known else 0
