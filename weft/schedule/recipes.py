"""Well-known ways to run a program, each a few public verbs. Nothing here can do what a user could not write."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.errors import InvalidTransform
from weft.core.layout import S
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.attention import attention_op
from weft.ops.comm import all_gather, slice_
from weft.ops.registry import Kind
from weft.schedule.groups import FUSIBLE, fuse, is_scalar, overlap, with_inner
from weft.schedule.moves import hoist, sink
from weft.schedule.parallel import redistribute, shard
from weft.schedule.state import drop_dead, shard_state
from weft.schedule.verbs import merge, split, undo


def gradient_sums(p: Program, axis: str) -> list[Node]:
    """The all_reduces along the axis of full tensors: scalars, such as norms and losses, are left alone."""
    return [n for n in p.find_all("all_reduce") if n.attr("axis") == axis and not is_scalar(n) and len(n.args) == 1]


def scatter_compute_gather(p: Program, axis: str, dim: int = 0) -> Program:
    """all_reduce ; compute  ->  reduce_scatter ; compute on slices ; all_gather"""
    for node in gradient_sums(p, axis):
        p = split(p, node, dim=dim)
        gather = p.moved[p.parent.at(node)] if p.parent is not None else node
        p = sink(p, gather)
    return slice_early(p)


def slice_early(p: Program) -> Program:
    """Slices moved before the ops that only they read, so that nothing is computed in full and then sharded."""
    while True:
        moved = next((q for s in p.find_all("slice") if _only_sliced(p, s.args[0]) and (q := _hoisted(p, s)) is not None), None)
        if moved is None:
            return p
        p = moved


def _only_sliced(p: Program, node: Node) -> bool:
    return (
        node.op.kind in (Kind.POINTWISE, Kind.VIEW, Kind.CONTRACT)
        and all(u.op is slice_ for u in p.users[node])
        and not p.outputs_of(node)
    )


def _hoisted(p: Program, node: Node) -> Program | None:
    try:
        return hoist(p, node)
    except InvalidTransform:
        return None


def states_of(p: Program, but: Sequence[str] = ()) -> list[str]:
    """Tensors kept from step to step, less those named."""
    return [i for _, i in p.state if i.split(".")[0] not in but and p.input_names[i].shape != ()]


def zero1(p: Program, axis: str = "dp", params: str = "x", dim: int = 0) -> Program:
    """Optimizer state in slices: each rank updates its slice, and the parameters are gathered."""
    p = scatter_compute_gather(p, axis, dim)
    names = states_of(p, but=(params,))
    return shard_state(p, *names) if names else p


def zero2(p: Program, axis: str = "dp", params: str = "x", dim: int = 0) -> Program:
    """ZeRO-1 with gradients in slices too: none is ever replicated after its sum. Accumulated gradients are state like any other."""
    p = zero1(p, axis, params, dim)
    left = gradient_sums(p, axis)
    if left:
        raise InvalidTransform(
            "zero2 leaves a full gradient", needed="every gradient sum to be scattered", found=f"{len(left)} all_reduces"
        )
    return p


def zero3(p: Program, axis: str = "dp", params: str = "x", dim: int = 0) -> Program:
    """ZeRO-2 with the parameters in slices too, gathered where they are read in full."""
    p = zero2(p, axis, params, dim)
    return shard_state(p, *[i for _, i in p.state if i.split(".")[0] == params], gather=True)


def megatron(p: Program, *weights: str, axis: str = "tp") -> Program:
    """Column then row: the first weight is sharded by columns, the ones next to and after it follow, and one sum is left at the end.

    gelu(x @ w1) @ w2   ->   all_reduce(gelu(x @ w1) @ w2)        w1: S(1), w2: S(0)
    """
    for name in weights:
        if not any(u.op is slice_ for u in p.users[p.input_names[name]]):
            p = shard(p, name, axis=axis, dim=p.input_names[name].ndim - 1)
            p = slice_early(sink(p, _gather_of(p, name), summing=True))
    return shard_state(p, *weights)


def _gather_of(p: Program, name: str) -> Node:
    """The gather that `shard` has put behind an input."""
    slices = [s for s in p.users[p.input_names[name]] if s.op is slice_]
    return next(g for s in slices for g in p.users[s] if g.op is all_gather)


def sequence_parallel(p: Program, axis: str = "tp", dim: int = 1) -> Program:
    """Between the sums and the next matmuls, everything on slices of the sequence.

    all_reduce ; dropout, residual, norm   ->   reduce_scatter ; dropout, residual, norm ; all_gather
    """
    return scatter_compute_gather(p, axis, dim)


def ring_attention(p: Program, x: str, axis: str = "cp", dim: int = 1) -> Program:
    """Context parallelism by ring: queries stay sharded along the sequence; keys and values are gathered chunk by chunk under the attention."""
    p = shard(p, x, axis=axis, dim=dim)
    p = sink(p, _gather_of(p, x))
    for k in range(len(p.find_all("attention"))):
        gathers = _gathered(p, p.find_all("attention")[k], axis)
        seq = gathered_dim(gathers[0], axis)
        p = merge(p, *gathers) if len(gathers) > 1 else p
        att = p.find_all("attention")[k]
        keys = dict.fromkeys(n for a in att.args[1:] for n in (*a.args, a) if n in p.needs(att) and _comes_from_gather(n, axis))
        p = overlap(p, *keys, att, dim=seq, chunks=p.mesh.size(axis))
    return shard_state(p, x)


def _gathered(p: Program, node: Node, axis: str) -> list[Node]:
    return [a for a in node.args if a.op is all_gather and a.attr("axis") == axis]


def _comes_from_gather(node: Node, axis: str) -> bool:
    return node.op is all_gather and node.attr("axis") == axis or node.op.is_item and _comes_from_gather(node.args[0], axis)


def gathered_dim(gather: Node, axis: str) -> int:
    """The dim a gather puts together."""
    place = gather.args[0].type.on(axis)
    assert isinstance(place, S)
    return place.dim


def all_to_all_attention(p: Program, x: str, axis: str = "cp", dim: int = 1, head_dim: int = 1) -> Program:
    """Context parallelism by all_to_all: from slices of the sequence to slices of the heads, and back after the attention."""
    p = shard(p, x, axis=axis, dim=dim)
    p = sink(p, _gather_of(p, x), past=[n for n in p.nodes if n.op is not attention_op])
    for k in range(len(p.find_all("attention"))):
        gathers = _gathered(p, p.find_all("attention")[k], axis)
        seq = gathered_dim(gathers[0], axis)
        for gather in gathers:
            p = redistribute(p, gather, dim=head_dim)
        att = p.find_all("attention")[k]
        p = sink(p, _gathered(p, att, axis)[0], past=att)
        result = next(g for i in p.users[p.find_all("attention")[k]] for g in p.users[i] if g.op is all_gather)
        p = redistribute(p, result, dim=seq)
        p = sink(p, p.moved[result])
    return tidy(shard_state(slice_early(p), x))


def tidy(p: Program) -> Program:
    """Without inverse pairs, where there are any."""
    try:
        return drop_dead(p)
    except InvalidTransform:
        return p


def sliced_send(p: Program, axis: str = "tp", dim: int = 1) -> Program:
    """The pipeline boundary in slices: each rank sends its part of the value, which is gathered on the far side.

    all_reduce ; compute ; send   ->   reduce_scatter ; compute ; send ; all_gather
    """
    return scatter_compute_gather(p, axis, dim)


def fuse_compute(p: Program) -> Program:
    """The elementwise ops and reductions that follow the last tensor-wide sum, in one kernel."""
    sums = [n for n in p.find_all("all_reduce") if not is_scalar(n)]
    after = [n for n in p.nodes if n.op.kind in (Kind.POINTWISE, Kind.REDUCE) and any(s in p.needs(n) for s in sums)]
    scalars = [n for n in p.find_all("all_reduce") if is_scalar(n) and any(a in after for a in n.args)]
    return fuse(p, [*after, *scalars])


def _update_nodes(p: Program, terms: set[Node], last: str) -> list[Node]:
    """What the next values of state are computed by from the sums, from state or from both, without the gathers."""
    next_values, after = [p.output_names[out] for out, _ in p.state], set(p.find_all(last))
    found = [n for end in next_values if not is_scalar(end) and not after & p.needs(end) for n in p.needs(end)]
    return [n for n in dict.fromkeys(found) if n not in terms and n.args and not is_scalar(n) and n.op.kind in FUSIBLE]


def one_kernel(p: Program, first: str = "reduce_scatter", last: str = "all_gather") -> Program:
    """Everything from the scatter to the gathers in one kernel, and the state that is updated along with them; several scatters, or gathers,
    are merged first."""
    for op in (first, last):
        nodes = [n for n in p.find_all(op) if not is_scalar(n)]
        if len(nodes) > 1:
            p = merge(p, *nodes)
    terms = set().union(*(p.needs(n) for n in p.find_all(first)))
    return fuse(p, with_inner(p, [*p.between(first, last), *_update_nodes(p, terms, last)], terms))


__all__ = [
    "all_to_all_attention", "gathered_dim", "gradient_sums", "megatron", "merge", "one_kernel", "overlap", "ring_attention",
    "scatter_compute_gather",
    "sequence_parallel", "sliced_send", "states_of", "undo", "zero1", "zero2", "zero3",
]  # fmt: skip
