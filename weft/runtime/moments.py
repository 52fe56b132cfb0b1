"""A mean, and the mean of the squares about it, read from memory once: `var_mean`, for which a compiler has a one-pass form.

    s = sum(x); m = s / n; off = x - m; v = sum(off * off) / n     ->     v, m = var_mean(x)

For graphs in which nothing is written in place between the two.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
SAME = (aten.detach.default, aten.clone.default, aten.view.default, aten.alias.default)  # the same numbers, whatever their shape


def in_one_pass(graph: Graph) -> int:
    """Replace the pairs of sums there are in a graph by one op each; how many there were."""
    pairs = list(_pairs(graph))
    for center, var, x, dims in pairs:
        with graph.inserting_before(center.args[0]):  # type: ignore[arg-type]
            both = graph.call_function(aten.var_mean.correction, (x, dims), {"correction": 0})
            found = [graph.call_function(operator.getitem, (both, k)) for k in (0, 1)]
        with _fake_mode(x):
            both.meta["val"] = aten.var_mean.correction(x.meta["val"], dims, correction=0)
        for node, new, k in ((var, found[0], 0), (center, found[1], 1)):
            new.meta["val"] = both.meta["val"][k]
            node.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    return len(pairs)


def _fake_mode(x: Node) -> Any:
    return x.meta["val"].fake_mode


def _pairs(graph: Graph) -> Iterator[tuple[Node, Node, Node, list[int]]]:
    """A mean, the variance about it, what they are of, and over which dims."""
    for var in graph.nodes:
        squares, dims = _mean(var)
        if squares is None or squares.target is not aten.mul.Tensor or squares.args[0] is not squares.args[1]:
            continue
        off = squares.args[0]
        if not isinstance(off, Node) or off.target is not aten.sub.Tensor or not all(isinstance(a, Node) for a in off.args):
            continue
        x, center = off.args[0], _origin(off.args[1])  # type: ignore[arg-type]
        if _mean(center) == (x, dims) and _is_centered(off.args[1], x, dims):  # type: ignore[arg-type]
            yield center, var, x, dims  # type: ignore[misc]


def _mean(node: Node) -> tuple[Node | None, list[int]]:
    """What a node is the mean of, and over which dims."""
    if node.op != "call_function" or node.target is not aten.mul.Tensor or not isinstance(node.args[1], float):
        return None, []
    total = node.args[0]
    if not isinstance(total, Node) or total.target is not aten.sum.dim_IntList or len(total.args) != 2 or total.kwargs:
        return None, []
    x, dims = total.args
    count = math.prod(x.meta["val"].shape[d] for d in dims)  # type: ignore[union-attr]
    return (x, list(dims)) if math.isclose(node.args[1], 1 / count, rel_tol=1e-12) else (None, [])  # type: ignore[return-value, arg-type]


def _origin(node: Node) -> Node:
    while node.op == "call_function" and node.target in SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_centered(center: Node, x: Node, dims: list[int]) -> bool:
    """Whether a mean is stretched over just the dims it was taken over."""
    shape = list(x.meta["val"].shape)
    kept = [1 if d in dims else size for d, size in enumerate(shape)]
    return [1] * (len(shape) - center.meta["val"].ndim) + list(center.meta["val"].shape) == kept
