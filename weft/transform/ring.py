"""Context parallelism by ring: keys and values are gathered chunk by chunk overlapped with the attention that reads them."""

from __future__ import annotations

from weft.core.errors import InvalidTransform
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.comm import all_gather
from weft.ops.registry import Kind
from weft.schedule import merge, overlap


def ring(p: Program, axis: str) -> Program:
    """Gathers under the op that reads them, in as many chunks as the axis has ranks, where that is possible."""
    for node in gathering(p, axis):
        try:
            p = _chunked(p, p.at(node), axis)
        except InvalidTransform:  # the op cannot be done in chunks of what is gathered
            continue
    return p


def _chunked(p: Program, node: Node, axis: str) -> Program:
    gathers = [a for a in dict.fromkeys(node.args) if _is_gather(a, axis)]
    dims = {_gathered_dim(g, axis) for g in gathers}
    if len(dims) != 1:
        raise InvalidTransform("ring", needed="operands gathered along one dim", found=str(sorted(dims)))
    if len(gathers) > 1:
        p = merge(p, *gathers)
        node = p.at(node)
    moved = [n for a in node.args for n in (*a.args, a) if _is_gather(n, axis) or n.op.is_item and _is_gather(n.args[0], axis)]
    return overlap(p, *dict.fromkeys(moved), node, dim=dims.pop(), chunks=p.mesh.size(axis))


def gathering(p: Program, axis: str) -> list[Node]:
    """Ops kept in one piece that read what is gathered along the axis."""
    return [n for n in p.nodes if n.op.kind is Kind.COMPOSITE and any(_is_gather(a, axis) for a in n.args)]


def _is_gather(node: Node, axis: str) -> bool:
    return node.op is all_gather and node.attr("axis") == axis


def _gathered_dim(gather: Node, axis: str) -> int:
    shard = gather.args[0].layout.where_sharded(axis)
    assert shard is not None
    return shard[0]
