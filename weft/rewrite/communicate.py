"""The rules that split, move, merge and drop communication.

Each constructor looks at a place and gives the one rule meant there, as two expressions. No constructor judges: whether the
right side types, and in the same layout as the left, is what the engine asks, and that is all a rule of this family needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.core.layout import Layout, P, S, Within
from weft.core.node import Node
from weft.ops import comm
from weft.ops.registry import ONE, Equation, equation_of, passing
from weft.ops.shape import concat_op, item, narrow_op, reshape_op
from weft.rewrite.engine import Rule, rule
from weft.rewrite.pattern import Call, Expr, Hole


class Holes:
    """Names for the distinct nodes of a place: x, y, z, then numbered."""

    def __init__(self) -> None:
        self.names: dict[Node, str] = {}

    def __call__(self, node: Node) -> Any:
        if node.op.is_number:
            return Call(node.op, (), node.attrs)
        if node not in self.names:
            self.names[node] = "xyz"[len(self.names)] if len(self.names) < 3 else f"x{len(self.names)}"
        return Hole(self.names[node])


def call(node: Node, *args: Any) -> Call:
    """The node's op and attributes on other operands."""
    return Call(node.op, args, node.attrs)


# -- split ---------------------------------------------------------------------------------------------------------------------


def split_scatter(node: Node, dim: int, within: Within = None) -> Rule:
    """all_reduce(x)  ->  all_gather(reduce_scatter(x))"""
    x, axis = Hole("x"), node.attr("axis")
    return rule(
        "split_scatter",
        comm.all_reduce(x, axis=axis),
        comm.all_gather(comm.reduce_scatter(x, axis=axis, dim=dim, within=within), axis=axis),
    )


def split_root(node: Node, root: int) -> Rule:
    """all_reduce(x)  ->  broadcast(reduce(x))"""
    x, axis = Hole("x"), node.attr("axis")
    return rule("split_root", comm.all_reduce(x, axis=axis), comm.broadcast(comm.reduce_(x, axis=axis, root=root), axis=axis))


def unsplit(node: Node) -> Rule:
    """all_gather(reduce_scatter(x))  ->  all_reduce(x)"""
    x, axis, inner = Hole("x"), node.attr("axis"), node.args[0]
    return rule("unsplit", comm.all_gather(call(inner, x), axis=axis), comm.all_reduce(x, axis=axis))


# -- where a sharding goes when it passes an op -----------------------------------------------------------------------------------------


def label_of(eq: Equation, arg: int, shard: S) -> str:
    return eq.label(arg, shard.dim)


def shard_of(layout: Layout, axis: str) -> S | None:
    place = layout.placement(axis)
    return place if isinstance(place, S) else None


def sliced(x: Any, node: Node, axis: str, shard: S) -> Any:
    """`slice` of an operand, or what was gathered to make it when that is laid out the same."""
    if node.op is comm.all_gather and node.attr("axis") == axis and len(node.args) == 1:
        source = node.args[0]
        if source.layout == node.layout.shard(axis, shard.dim, shard.within):
            return x.args[0]
    return comm.slice_(x, axis=axis, dim=shard.dim, within=shard.within)


def _arg_dims(eq: Equation, label: str) -> dict[int, int]:
    return dict(eq.dims_of(label))


# -- sink and hoist ------------------------------------------------------------------------------------------------------------


def sink_gather(node: Node, gathered: Sequence[int], axis: str, items: Sequence[Node] = ()) -> Rule:
    """f(all_gather(x), y)  ->  all_gather(f(x, slice(y)));  where f reduces the sharded dim, the result is all_reduced instead.

    Of an op with several results, `items` are those that are read, each with a gather or a sum of its own.
    """
    holes = Holes()
    left, inner, label = _gather_sides(node, gathered, axis, holes)
    eq = equation_of(node)
    lost = [eq is not None and label not in out for out in (eq.outs if eq is not None else ((),))]
    after = [comm.all_reduce if gone else comm.all_gather for gone in lost]
    if not items:
        return rule("sink_gather", left, after[0](inner, axis=axis))
    at = [n.attr("index") for n in items]
    return rule("sink_gather", tuple(item(left, index=k) for k in at), tuple(after[k](item(inner, index=k), axis=axis) for k in at))


def _gather_sides(node: Node, gathered: Sequence[int], axis: str, holes: Holes) -> tuple[Call, Call, str]:
    """The op on gathered operands, the op on sharded ones, and the label that is sharded."""
    outer = {k: call(a, *(holes(x) for x in a.args)) for k, a in enumerate(node.args) if a.op is comm.all_gather and a.attr("axis") == axis}
    left = [outer[k] if k in outer else holes(a) for k, a in enumerate(node.args)]
    eq = equation_of(node)
    first = gathered[0]
    shard = shard_of(node.args[first].args[0].layout, axis)
    assert shard is not None
    if eq is None:
        return call(node, *left), call(node, *(outer[k].args[0] if k in gathered else left[k] for k in range(len(left)))), ""
    label = label_of(eq, first, shard)
    dims = _arg_dims(eq, label)
    inner = [_inner(left[k], a, k, gathered, dims, axis, shard) for k, a in enumerate(node.args)]
    return call(node, *left), call(node, *inner), label


def _inner(x: Any, node: Node, k: int, gathered: Sequence[int], dims: dict[int, int], axis: str, shard: S) -> Any:
    if k in gathered:
        return x.args[0]
    return sliced(x, node, axis, S(dims[k], shard.within)) if k in dims else x


def hoist_gather(node: Node) -> Rule:
    """all_gather(f(x, y))  ->  f(all_gather(x), all_gather(y)), for the operands that are sharded"""
    holes, axis, f = Holes(), node.attr("axis"), node.args[0]
    args = [holes(a) for a in f.args]
    gathered = [comm.all_gather(x, axis=axis) if shard_of(a.layout, axis) is not None else x for x, a in zip(args, f.args, strict=True)]
    return rule("hoist_gather", call(node, call(f, *args)), call(f, *gathered))


def hoist_slice(node: Node) -> Rule:
    """slice(f(x, y))  ->  f(slice(x), slice(y)), for the operands that have the sharded dim"""
    holes, axis, f = Holes(), node.attr("axis"), node.args[0]
    args = [holes(a) if a.op is not comm.all_gather else call(a, *(holes(x) for x in a.args)) for a in f.args]
    shards = _operand_shards(f, S(node.attr("dim"), node.attr("within")), axis, node.layout)
    inner = [sliced(x, a, axis, shards[k]) if k in shards else x for k, (x, a) in enumerate(zip(args, f.args, strict=True))]
    return rule("hoist_slice", call(node, call(f, *args)), call(f, *inner))


def _operand_shards(f: Node, shard: S, axis: str, want: Layout) -> dict[int, S]:
    """Where each operand must be sharded for the result to be sharded so."""
    eq = equation_of(f)
    if eq is not None:
        label = eq.outs[0][shard.dim]
        return {} if label == ONE else {a: S(d, shard.within) for a, d in eq.dims_of(label)}
    if f.op is reshape_op:
        back = shard_of(want.reshape(f.args[0].shape), axis)
        return {0: back} if back is not None else {}
    return {0: shard} if f.args and f.args[0].shape[shard.dim : shard.dim + 1] == f.shape[shard.dim : shard.dim + 1] else {}


def sink_slice(node: Node, axis: str) -> Rule:
    """f(slice(x), slice(y))  ->  slice(f(x, y))"""
    holes = Holes()
    cut_args = [k for k, a in enumerate(node.args) if a.op is comm.slice_ and a.attr("axis") == axis]
    left = [call(a, holes(a.args[0])) if k in cut_args else holes(a) for k, a in enumerate(node.args)]
    inner = [x.args[0] if k in cut_args else x for k, x in enumerate(left)]
    shard = shard_of(node.layout, axis)
    dim, within = (shard.dim, shard.within) if shard is not None else (0, None)
    return rule("sink_slice", call(node, *left), comm.slice_(call(node, *inner), axis=axis, dim=dim, within=within))


# -- delay ---------------------------------------------------------------------------------------------------------------------


def delay_sum(node: Node, reduced: Sequence[int]) -> Rule:
    """f(all_reduce(x), w)  ->  all_reduce(f(x, w)), f linear in x"""
    holes = Holes()
    left = [
        call(a, *(holes(x) for x in a.args)) if a.op is node.args[reduced[0]].op and k in reduced else holes(a)
        for k, a in enumerate(node.args)
    ]
    inner = [x.args[0] if k in reduced else x for k, x in enumerate(left)]
    how = node.args[reduced[0]]
    return rule("delay_sum", call(node, *left), call(how, call(node, *inner)))


def delay_scatter(node: Node, reduced: Sequence[int]) -> Rule:
    """f(reduce_scatter(x), slice(y))  ->  reduce_scatter(f(x, y)), f linear in x and slice-wise"""
    holes, how = Holes(), node.args[reduced[0]]
    axis = how.attr("axis")
    peel = [k in reduced or (a.op is comm.slice_ and a.attr("axis") == axis) for k, a in enumerate(node.args)]
    left = [call(a, *(holes(x) for x in a.args)) if peel[k] else holes(a) for k, a in enumerate(node.args)]
    inner = [x.args[0] if peel[k] else x for k, x in enumerate(left)]
    shard = shard_of(node.layout, axis)
    dim, within = (shard.dim, shard.within) if shard is not None else (how.attr("dim"), how.attr("within"))
    return rule("delay_scatter", call(node, *left), comm.reduce_scatter(call(node, *inner), axis=axis, dim=dim, within=within))


def reducible_sets(node: Node, axis: str, op: Any) -> list[tuple[int, ...]]:
    """The sets of operands whose reduction may wait together, largest first."""
    here = {k for k, a in enumerate(node.args) if a.op is op and a.attr("axis") == axis and len(a.args) == 1}
    kinds = {place.op for k in here if isinstance(place := node.args[k].args[0].type.on(axis), P)}
    sets = (frozenset({0}),) if node.op.kind.name == "COMM" else [s for kind in kinds for s in passing(node.op, kind, len(node.args))]
    return sorted((tuple(sorted(s)) for s in sets if s <= here), key=len, reverse=True)


# -- inverse pairs ---------------------------------------------------------------------------------------------------------------


def cancel_slice_gather(node: Node) -> Rule:
    """slice(all_gather(x))  ->  x"""
    return rule("cancel_slice_gather", call(node, call(node.args[0], Hole("x"))), Hole("x"))


def cancel_gather_slice(node: Node) -> Rule:
    """all_gather(slice(x))  ->  x"""
    return rule("cancel_gather_slice", call(node, call(node.args[0], Hole("x"))), Hole("x"))


# -- several collectives at once -----------------------------------------------------------------------------------------------------


def merge_all(nodes: Sequence[Node]) -> Rule:
    """all_reduce(x), all_reduce(y)  ->  the items of all_reduce(x, y)"""
    holes = Holes()
    xs = [holes(n.args[0]) for n in nodes]
    merged = call(nodes[0], *xs)
    return rule(
        "merge", tuple(call(n, x) for n, x in zip(nodes, xs, strict=True)), tuple(item(merged, index=k) for k in range(len(nodes)))
    )


def bucket_all(buckets: Sequence[Sequence[Node]]) -> Rule:
    """all_reduce(x), all_reduce(y)  ->  pieces of all_reduce(concat(x, y)), each flattened; of each bucket"""
    holes = Holes()
    pieces: list[Expr] = []
    for nodes in buckets:
        sizes = [math.prod(n.shape) for n in nodes]
        pairs = [(holes(n.args[0]), n, size) for n, size in zip(nodes, sizes, strict=True)]
        full = call(nodes[0], concat_op(*(reshape_op(x, shape=(size,)) if n.shape != (size,) else x for x, n, size in pairs), dim=0))
        at = 0
        for n, size in zip(nodes, sizes, strict=True):
            piece = narrow_op(full, dim=0, start=at, stop=at + size, step=1)
            pieces.append(reshape_op(piece, shape=n.shape) if n.shape != (size,) else piece)
            at += size
    return rule("bucket", tuple(call(n, holes(n.args[0])) for nodes in buckets for n in nodes), tuple(pieces))


def hierarchy(node: Node, inside: str, dim: int) -> Rule:
    """all_reduce(all_reduce(x, a), b)  ->  reduce_scatter inside, all_reduce across, all_gather inside"""
    x, inner = Hole("x"), node.args[0]
    across = next(a for a in (node.attr("axis"), inner.attr("axis")) if a != inside)
    part = comm.all_reduce(comm.reduce_scatter(x, axis=inside, dim=dim), axis=across)
    return rule("by_hierarchy", call(node, call(inner, x)), comm.all_gather(part, axis=inside))


# -- shards made from nothing -------------------------------------------------------------------------------------------------------------


def shard_replicated(node: Node, axis: str, dim: int, within: Within = None) -> Rule:
    """x  ->  all_gather(slice(x))"""
    x = Hole("x", node.type)
    return rule("cut", x, comm.all_gather(comm.slice_(x, axis=axis, dim=dim, within=within), axis=axis))


def redistribute_gather(node: Node, dim: int, within: Within = None) -> Rule:
    """all_gather(x)  ->  all_gather(all_to_all(x)), which leaves it sharded along another dim"""
    x, axis = Hole("x"), node.attr("axis")
    return rule("turn", call(node, x), call(node, comm.all_to_all(x, axis=axis, dim=dim, within=within)))
