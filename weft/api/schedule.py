"""What `parallelize` does to a placed training step before it is lowered: updates unfolded, gradients summed together, one kernel."""

from __future__ import annotations

from itertools import pairwise

from weft.core.errors import InvalidTransform
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.registry import nbytes
from weft.schedule import bucket
from weft.schedule.groups import is_scalar
from weft.schedule.recipes import one_kernel

BUCKET = 8 << 20


def unfold_updates(p: Program) -> Program:
    """Optimizers kept whole until now, in elementwise ops, so that they can be fused with what surrounds them."""
    swap: dict[Node, Node] = {}
    for n in p.nodes:
        if n.op.facets.get("unfold") is not None:
            new = n.op.unfold(n)
            swap |= {u: new[u.attr("index")] for u in p.users[n]} if len(n.types) > 1 else {n: new[0]}
    return p.rewrite(swap, "unfold updates") if swap else p


def fused_update(p: Program, axis: str) -> Program:
    """Sum, update and gather of all sharded state in one kernel, where there is any."""
    if not any(n.attr("axis") == axis and not is_scalar(n) for n in p.find_all("reduce_scatter")):
        return p
    try:
        return one_kernel(unfold_updates(p))
    except InvalidTransform:  # other collectives of the step stand in between: leave it as it is
        return p


def bucketed(p: Program, axis: str, max_bytes: int = BUCKET) -> Program:
    """The gradients' all_reduces along an axis, in a few large ones, in the order the backward pass makes them."""
    sums = [n for n in p.find_all("all_reduce") if n.attr("axis") == axis and not is_scalar(n) and len(n.args) == 1 and _alone(p, n)]
    alike: dict[object, list[Node]] = {}
    for n in sums:
        alike.setdefault((n.dtype, n.layout.held), []).append(n)  # some may still be pending along another axis
    for group in alike.values():
        free = [n for n, waits in p.waits(group).items() if not waits]
        if any(nbytes(a.type) + nbytes(b.type) <= max_bytes for a, b in pairwise(free)):
            p = bucket(p, *free, max_bytes=max_bytes)
    return p


def _alone(p: Program, n: Node) -> bool:
    """Cut by no axis: only such values can be laid end to end."""
    return all(n.layout.where_cut(a) is None for a in p.mesh.axes)
