"""What `parallelize` does to a placed training step before it is lowered: updates unfolded, gradients summed together, one kernel."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.codegen.order import order, tails
from weft.core.errors import InvalidTransform
from weft.core.layout import P
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.ops.comm import all_reduce, is_comm, reduce_scatter
from weft.rewrite.communicate import bucket_all
from weft.rewrite.engine import apply_rule
from weft.rewrite.updates import better_by_rows
from weft.schedule import fuse, merge
from weft.schedule.groups import is_scalar, with_inner
from weft.schedule.verbs import BUCKET, FIRST, by_size


def is_update(n: Node) -> bool:
    return n.op.unfold is not None


def updated(n: Node) -> str:
    """The name of the parameter that an update is of."""
    n = n.args[0]
    while is_comm(n):
        n = n.args[0]
    return str(n.attr("name"))


def unfold_updates(p: Program, but: Collection[Node] = ()) -> Program:
    """Optimizers kept in one piece until now, in elementwise ops, so that they can be fused with what surrounds them."""
    swap: dict[Node, Node] = {}
    but = set(but)
    for n in p.nodes:
        if is_update(n) and n not in but:
            new = n.op.unfold(n)
            swap |= {u: new[u.attr("index")] for u in p.users[n]} if len(n.types) > 1 else {n: new[0]}
    return p.rewrite(swap, "unfold updates") if swap else p


def fused_update(p: Program, axis: str) -> Program:
    """The sums of gradients along an axis, the updates they lead to and the gathers after these in one kernel, where that can be had.

    Whatever is summed, scattered or not, is read from the ranks' own memory as the update needs it, and written nowhere. Tables that are
    updated by rows are left to that.
    """
    last, kept = tails(p)[0], set(toposort([n for name, n in p.outputs if name in p.next_of]))
    mine = [n for n in p.nodes if n in last and n in kept and n.attr("axis") == axis and not is_scalar(n) and len(n.args) == 1]
    kinds = [sums for op in (reduce_scatter, all_reduce) if (sums := [n for n in mine if n.op is op])]
    if not kinds:
        return p
    try:
        return _after_sums(unfold_updates(p, better_by_rows(p)), kinds[0])
    except InvalidTransform:  # other collectives of the step stand in between: leave it as it is
        return p


def _after_sums(p: Program, sums: Sequence[Node]) -> Program:
    """Everything that follows the sums, and what only that reads, in one kernel; collectives of one kind are merged first."""
    p = _merged(p, [p.at(n) for n in sums])
    after = _following(p, _calls(p, sums))
    p = _merged(p, [n for n in p.find_all("all_gather") if n in after and not is_scalar(n)])
    firsts = _calls(p, sums)
    after = _following(p, firsts)
    terms = set(toposort(a for n in firsts for a in n.args))
    return fuse(p, with_inner(p, (n for n in p.nodes if n in firsts or n in after), terms))


def _merged(p: Program, nodes: Sequence[Node]) -> Program:
    return merge(p, *nodes) if len(nodes) > 1 else p


def _calls(p: Program, sums: Sequence[Node]) -> set[Node]:
    """The collectives that do the sums, each once, whether merged or not."""
    found = [p.at(n) for n in sums]
    return {n.args[0] if n.op.is_item else n for n in found}


def _following(p: Program, nodes: set[Node]) -> set[Node]:
    """What is computed from the nodes and goes into state: measurements next to the step are no part of it."""
    found = set[Node]()
    for n in p.nodes:
        if any(a in found or a in nodes for a in n.args):
            found.add(n)
    return found & set(toposort([n for name, n in p.outputs if name in p.next_of]))


def bucketed(p: Program, axis: str, max_bytes: int = BUCKET) -> Program:
    """The gradients' all_reduces along an axis, in a few large ones, in the order the backward pass makes them."""
    sums = [n for n in order(p) if n.op is all_reduce and n.attr("axis") == axis and len(n.args) == 1]
    isomorphic: dict[object, list[Node]] = {}
    taken = {n for g in p.groups for n in g.nodes}
    for n in sums:
        if not is_scalar(n) and _alone(p, n) and n not in taken and n.args[0].type.on(axis) == P():
            isomorphic.setdefault((n.dtype, n.layout.partials, n.attrs), []).append(n)  # some may still be partial along another axis
    for group in isomorphic.values():
        waits = p.waits(group)
        free = [p.at(n) for n in group if n not in waits]
        runs = [run for run in by_size(free, max_bytes, FIRST) if len(run) > 1]
        p = apply_rule(p, bucket_all(runs), [n for run in runs for n in run], "bucket") if runs else p
    return p


def _alone(p: Program, n: Node) -> bool:
    """Sharded by no axis: only such values can be laid end to end."""
    return all(n.layout.where_sharded(a) is None for a in p.mesh.axes)
