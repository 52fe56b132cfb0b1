"""`deterministic="any plan"`: every sum of a placed step in the order of global indices, so that all plans give equal bits.

Matmuls and other ops that sum are computed on leaves whose sizes the plan has no say in (`ops.leaves`), sums over dims and over ranks go by one
fixed tree, updates are elementwise, and functions that are approximated see operands of the same layout. The step is placed so that no partial
sum passes through other ops. What cannot be had so is refused in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import P
from weft.core.node import Node, make, op_named
from weft.core.program import Program
from weft.ops.comm import all_gather, all_reduce, reduce_scatter, reshard, slice_
from weft.ops.leaves import by_leaves, in_leaves, multiplies, tree_sum
from weft.ops.reduce import norm_dims, sum_
from weft.ops.registry import ONE, Equation, Kind, equation_of
from weft.plan.place import rebuilt
from weft.plan.spec import Spec
from weft.transform.updates import unfold_updates

LEAVES = 8  # parts of a dim, where its size allows: so many ranks may share it


def require_any_plan(spec: Spec) -> None:
    """Plans whose sums are no subtrees of the one tree are refused."""
    for word, wrong in (
        ("cp", spec.cp > 1), ("ep", spec.ep > 1), ("sp", spec.sp), ("shards", bool(spec.shards)), ("async-tp", spec.async_tp),
        ("pp", spec.pp > 1), ("micro", spec.micro_batches > 1),
    ):  # fmt: skip
        if wrong:
            raise _refused(f"{word} in {spec}, which sums in another order than one process", "a plan of dp, tp and zero", f"leave out {word}")
    for axis, n in spec.mesh.sizes.items():
        if axis != "pp" and (n & (n - 1) or n > LEAVES):
            raise _refused(f"{axis}{n} splits the tree of sums unevenly", f"degrees of 1, 2, 4 or {LEAVES}", f"{axis}{min(LEAVES, 1 << n.bit_length() - 1)}")


def _refused(found: str, needed: str, try_: str) -> PlanError:
    return PlanError('deterministic="any plan"', needed=needed, found=found, try_=(try_, "deterministic=True gives the same bits on every run of one plan"))


def any_plan(p: Program) -> Program:
    """The placed program with its sums by one tree over global indices."""
    p = unfold_updates(p)

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        try:
            return _as_placed(_ordered(n, args), n)
        except (TypeMismatch, LayoutError) as e:
            found = f"{n.op.name} with operands {', '.join(str(a.types[0]) for a in args)}"
            raise _refused(found, f"sums in a fixed order ({e.needed})", "a plan of dp alone") from e

    return rebuilt(p, node)


def _ordered(n: Node, args: tuple[Node, ...]) -> Node:
    attrs, kind = dict(n.attrs), n.op.kind
    if kind is Kind.COMM:
        return _reduced(n, args, attrs)
    if kind in (Kind.VIEW, Kind.SOURCE) or n.op.adds_nothing or not any(t.dtype.is_floating_point for t in n.types):
        return make(n.op, args, attrs)
    if any(isinstance(p, P) and p.op == "sum" for a in args if len(a.types) == 1 for _, p in a.layout.partials):
        raise TypeMismatch("a partial sum is read", needed="sums that are done before they are read", found=n.op.name)
    if kind is Kind.POINTWISE:
        return by_leaves(*args, inner=n.op.name, leaves=(), **attrs) if n.op.approximated else make(n.op, args, attrs)  # type: ignore[no-any-return]
    if n.op is sum_:
        return _summed(args[0], attrs)
    if kind is Kind.REDUCE:
        return make(n.op, args, attrs)  # a maximum is the same in any order
    eq = equation_of(n)
    if eq is None:
        raise TypeMismatch(f"{n.op.name} has no tree form", needed="an op with an index equation", found=n.op.name)
    try:
        return _outermost_due(by_leaves(*args, inner=n.op.name, leaves=_leaves(n, eq), **attrs))
    except TypeMismatch:  # shards that are no entire leaves, as of a vocabulary of odd size, are gathered
        full = [_gathered(a, fits=lambda d, a=a, labels=labels: _fits(n, eq, a, labels[d], d)) for a, labels in zip(args, eq.ins, strict=True)]  # type: ignore[misc]
        return _outermost_due(by_leaves(*full, inner=n.op.name, leaves=_leaves(n, eq), **attrs))


def _leaves(n: Node, eq: Equation) -> tuple[tuple[str, int], ...]:
    """The dims that plans shard, and the size of a leaf of each, which is the same under all of them."""
    size = {x: s for labels, a in zip(eq.ins, n.args, strict=True) for x, s in zip(labels, a.shape, strict=True)}
    kept = {x for x in size if all(x in out for out in eq.outs)}
    return tuple((x, _leaf(size[x], x in kept)) for x in _labels(n, eq) if x != ONE and x not in eq.unsharded and size[x] > 1)


def _leaf(size: int, kept: bool) -> int:
    """A dim that is kept may be a few matrices side by side, as queries, keys and values, each sharded: a leaf lies in one of them."""
    parts = size & -size
    few = size // parts if kept and size // parts < LEAVES else 1
    return size // (few * min(LEAVES, parts))


def _fits(n: Node, eq: Equation, a: Node, label: str, d: int) -> bool:
    kept = all(label in out for out in eq.outs)
    free = kept and not multiplies(n.op) and label not in dict(_leaves(n, eq))
    return free or in_leaves(a.layout.dims[d], dict(_leaves(n, eq)).get(label, 0), kept, a.mesh)


def _gathered(x: Node, fits: Callable[[int], bool]) -> Node:
    """The value with those dims in full whose shards do not fit."""
    for axis in reversed(x.mesh.axes):
        at = x.layout.where_sharded(axis)
        if at is not None and not fits(at[0]):
            x = all_gather(x, axis=axis)
    return x


def _as_placed(new: Node, n: Node) -> Node:
    """Laid out as the node was, but for sums that are done already."""
    if len(n.types) > 1 or len(new.types) > 1 or new.types == n.types:
        return new
    here, there = new.layout, n.layout
    for axis in _due(n):
        there = there.release(axis) if here.placement(axis) != P() else there
    return reshard(new, there)  # type: ignore[no-any-return]


def _labels(n: Node, eq: Equation) -> list[str]:
    """Of a matmul or convolution the first dim of its rows, of its columns and of what it sums, or the dims of its batch alone; of attention batch and
    heads; of other ops the first."""
    if not multiplies(n.op) or len(eq.ins) != 2:
        return list(eq.ins[0][: 1 if n.op.attends is None else 2])
    (x, y), out = eq.ins, eq.outs[0]
    batch = [c for c in x if c in y and c in out]
    groups = ([c for c in x if c not in y], [c for c in y if c not in x], [c for c in x if c in y and c not in out])
    return batch or [group[0] for group in groups if group]


def _summed(x: Node, attrs: dict[str, Any]) -> Node:
    """The last dim first; where it is sharded, its sum is done before the next."""
    left, keep = list(norm_dims(attrs.get("dims"), x.ndim)), bool(attrs.get("keepdim"))
    gone = set(left)
    x = _gathered(x, lambda d: d not in gone or in_leaves(x.layout.dims[d], 1, False, x.mesh))
    while inner := [d for d in left[1:] if any(a.axes for a in x.layout.dims[d])]:
        now = [d for d in left if d >= inner[-1]]
        x, left = _all_done(tree_sum(x, dims=tuple(now), keepdim=True)), left[: -len(now)]
    x = _outermost_due(tree_sum(x, dims=tuple(left), keepdim=keep or len(left) < len(gone)))
    shape = tuple(size for d, size in enumerate(x.shape) if keep or d not in gone)
    return x if keep or len(left) == len(gone) else op_named("reshape")(x, shape=shape)  # type: ignore[no-any-return]


def _due(x: Node) -> list[str]:
    return [axis for axis in x.mesh.axes if x.type.on(axis) == P()]


def _outermost_due(x: Node) -> Node:
    """Of a dim sharded along several axes, the sums over the inner ones are done first."""
    for axis in reversed(_due(x)[1:] if len(x.types) == 1 else []):
        x = all_reduce(x, axis=axis, tree=True)
    return x


def _all_done(x: Node) -> Node:
    for axis in reversed(_due(x)):
        x = all_reduce(x, axis=axis, tree=True)
    return x


def _reduced(n: Node, args: tuple[Node, ...], attrs: dict[str, Any]) -> Node:
    """A collective, by the tree where it sums; one whose sum is done already only changes the layout."""
    x, axis = args[0], attrs["axis"]
    if n.args[0].type.on(axis) != P() or not x.dtype.is_floating_point:
        return make(n.op, args, attrs)
    if len(args) > 1 or n.op not in (all_reduce, reduce_scatter):
        raise TypeMismatch(f"{n.op.name} has no tree form", needed="all_reduce or reduce_scatter of one tensor", found=n.op.name)
    if x.type.on(axis) != P():
        return x if n.op is all_reduce else slice_(x, **attrs)  # type: ignore[no-any-return]
    return make(n.op, args, {**attrs, "tree": True})
