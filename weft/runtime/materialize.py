"""Values that several kernels read are written to memory where making them anew would read more: above all the sums of a residual stream.

Inductor makes a value of few tensors anew in every kernel that reads it. Where it differentiates itself, what the backward pass reads is a result of
the forward pass and so is kept; a graph of both passes has no such border, and its sums would be added up again in every norm, forward and back.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
KEEP = "inductor_realize_to_strides"  # Inductor's own mark of a node that is to be written to memory
LEAST = 1 << 16  # elements; of less it does not matter
LIBRARY = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
LOOKUPS = (aten.index.Tensor, aten.embedding.default, aten.gather.default)  # elementwise to Inductor, which reads as much as comes out


def shared(graph: Graph) -> list[Node]:
    """Mark what is to be kept of a graph in which nothing is written in place; those nodes."""
    depth = _depths(graph)
    kept: set[Node] = set()
    for _ in range(2):  # what is kept is read instead of what it is made of, which may then be read less
        kept = _worth(graph, _read_at(graph, depth, kept))
    for node in kept:
        node.meta[KEEP] = True
    return [n for n in graph.nodes if n in kept]


def _worth(graph: Graph, read_at: dict[Node, frozenset[int]]) -> set[Node]:
    """Elementwise values for which fewer bytes are moved if the first kernel that reads them writes them and the others read that."""
    kept: set[Node] = set()
    made_of: dict[Node, dict[Node, int]] = {}  # tensors in memory that a kernel reads to make a value, and bytes of each
    for node in graph.nodes:
        made_of[node] = _made_of(node, made_of)
        size, kernels = _bytes(node), len(read_at[node])
        if not _inlined(node) or kernels < 2 or size < LEAST * node.meta["val"].element_size():
            continue
        parts = sum(made_of[node].values())
        if parts + kernels * size <= kernels * parts:  # where it makes no difference, one tensor is held instead of several
            kept.add(node)
            made_of[node] = {node: size}
    return kept


def _made_of(node: Node, made_of: dict[Node, dict[Node, int]]) -> dict[Node, int]:
    if not _inlined(node) or _written_anyway(node):
        return {node: _bytes(node)}
    found: dict[Node, int] = {}
    for part in node.all_input_nodes:
        for leaf, size in made_of[part].items():
            most = _bytes(node) // max(node.meta["val"].element_size(), 1) * _itemsize(leaf)
            found[leaf] = max(found.get(leaf, 0), min(size, most))
    return found


def _read_at(graph: Graph, depth: dict[Node, int], kept: set[Node]) -> dict[Node, frozenset[int]]:
    """How deep the kernels lie that read a value, by itself or within what is made of it on the way; at one depth they are taken for one."""
    found: dict[Node, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        by = [found[u] if _inlined(u) and u not in kept and not _written_anyway(u) else frozenset({depth[u]}) for u in node.users]
        found[node] = frozenset().union(*by)
    return found


def _depths(graph: Graph) -> dict[Node, int]:
    """Of every node, how many kernels of libraries must have run before it, one after the other."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        depth[node] = max((depth[a] + _by_library(a) for a in node.all_input_nodes), default=0)
    return depth


def _by_library(node: Node) -> bool:
    """Whether it runs as a kernel with which Inductor fuses nothing."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return node.op == "call_function" and op is not operator.getitem
    name = op._schema.name.partition("::")[2]
    return op.namespace not in ("aten", "prims") or name in LIBRARY or "attention" in name


def _inlined(node: Node) -> bool:
    """Whether Inductor makes it inside the kernels that read it."""
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return not _by_library(node) and (torch.Tag.pointwise in op.tags or op in LOOKUPS or op.is_view)


def _written_anyway(node: Node) -> bool:
    """Whether a library reads it, or it is a result."""
    users: list[Any] = [u for u in node.users if not (isinstance(u.target, torch._ops.OpOverload) and u.target.is_view)]
    views = [u for u in node.users if u not in users]
    return any(u.op == "output" or _by_library(u) for u in users) or any(_written_anyway(v) for v in views)


def _itemsize(node: Node) -> int:
    value = node.meta.get("val")
    return value.element_size() if isinstance(value, torch.Tensor) else 0


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
