"""Ops that only move, drop or repeat elements: reshape, permute, expand, narrow, concat, pad, and the items of a tuple."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Atom, Layout, Replicated, S
from weft.core.node import Attrs, Node, Op, Type, op_named, user_line
from weft.ops.registry import Equation, Kind, Linear, Local, Types, define

FIRST = (frozenset({0}),)


def one_dim(dim: int, rank: int) -> int:
    """The dim counted from 0, if the tensor has it."""
    if not -rank <= dim < rank:
        needed = f"a dim from {-rank} to {rank - 1}"
        raise TypeMismatch(f"no dim {dim} in a tensor of {rank} dims", needed=needed, found=str(dim), where=user_line())
    return dim % rank


item = define(
    "item",
    kind=Kind.VIEW,
    infer=lambda types, attrs: types[attrs["index"]],
    run=lambda xs, index: xs[index],
    vjp=None,  # the cotangents of the items are collected by the gradient of the op that made the tuple
    is_item=True,
)

optimization_barrier = define(
    "optimization_barrier",
    kind=Kind.VIEW,
    infer=lambda types, attrs: types,
    run=lambda *xs: xs,
    field=lambda p, *xs: xs,
    vjp=lambda n, *cts: cts,
    is_tuple=True,
    doc="several values as one tuple",
)


# -- reshape and permute: atoms are regrouped, nothing moves -------------------------------------------------------------------


def _reshape_infer(types: Types, attrs: Attrs) -> Type:
    return types[0].with_layout(types[0].layout.reshape(attrs["shape"]))


def _reshape_normal(attrs: Attrs) -> Attrs:
    return {"shape": tuple(int(n) for n in attrs["shape"])}


reshape_op = define(
    "reshape",
    kind=Kind.VIEW,
    infer=_reshape_infer,
    run=lambda x, shape: x.reshape(shape),
    local=lambda ctx, x, shape: x.reshape(ctx.out_shape()),
    linear=Linear.FIRST,
    monotone=FIRST,
    vjp=lambda n, ct: (reshape(ct, n.args[0].shape),),
    field=lambda p, x, shape: x.reshape(shape),
    normal=_reshape_normal,
)


def reshape(x: Any, *shape: Any) -> Any:
    """The same elements in other dims; one size may be -1."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not all(isinstance(n, int) for n in sizes):
        raise TypeMismatch("reshape to what is no shape", needed="integer sizes, one of them -1 at most", found=str(list(sizes)), where=user_line())
    if -1 in sizes:
        known = 1
        for n in sizes:
            known *= n if n != -1 else 1
        total = 1
        for n in x.shape:
            total *= n
        sizes = tuple(total // max(known, 1) if n == -1 else n for n in sizes)
    return x if tuple(sizes) == tuple(x.shape) else reshape_op(x, shape=tuple(sizes))


def _permute_equation(types: Types, attrs: Attrs) -> Equation:
    order, rank = attrs["order"], len(types[0].shape)
    if sorted(order) != list(range(rank)):
        raise TypeMismatch("not an order of the dims", needed=f"each of 0 to {rank - 1} once", found=str(order), where=user_line())
    labels = tuple(f"d{i}" for i in range(rank))
    return Equation((labels,), (tuple(labels[i] for i in order),))


permute_op: Op = define(
    "permute",
    kind=Kind.VIEW,
    equation=_permute_equation,
    run=lambda x, order: x.permute(order),
    linear=Linear.FIRST,
    monotone=FIRST,
    vjp=lambda n, ct: (permute_op(ct, order=tuple(sorted(range(ct.ndim), key=n.attr("order").__getitem__))),),
    field=lambda p, x, order: x.permute(order),
    normal=lambda attrs: {"order": tuple(attrs["order"])},
)


def permute(x: Any, *order: Any) -> Any:
    """The dims in another order, as torch.permute."""
    dims = tuple(order[0]) if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
    dims = tuple(one_dim(d, x.ndim) for d in dims)
    return x if dims == tuple(range(x.ndim)) else permute_op(x, order=dims)


def transpose(x: Any, a: int = -2, b: int = -1) -> Any:
    """Two dims swapped, as torch.transpose."""
    order = list(range(x.ndim))
    a, b = one_dim(a, x.ndim), one_dim(b, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, *order)


# -- expand: a dim of size 1 repeated; the repeats may be sharded, since a rank makes only its own ----------------------------------


def _expand_infer(types: Types, attrs: Attrs) -> Type:
    (t,), shape = types, attrs["shape"]
    if len(shape) != len(t.shape) or any(n not in (1, m) for n, m in zip(t.shape, shape, strict=True)):
        raise TypeMismatch(
            "expand repeats dims of size 1 only", needed=f"{list(t.shape)} with the 1s enlarged", found=str(list(shape)), where=user_line()
        )
    repeated = [d for d, (n, m) in enumerate(zip(t.shape, shape, strict=True)) if n != m]
    if any(atom.axes for d in repeated for atom in t.layout.dims[d]):
        raise TypeMismatch(
            "expand cannot repeat a dim that some ranks do not hold", needed="dims to repeat unsharded", found=str(t), where=user_line()
        )
    dims = tuple((Atom(shape[d]),) if d in repeated else dim for d, dim in enumerate(t.layout.dims))
    layout = Layout(t.mesh, dims, t.layout.partials)
    for axis, dim, within in attrs["shards"]:
        if t.shape[dim] == shape[dim] or not isinstance(t.on(axis), Replicated):
            raise TypeMismatch(
                f"expand cannot shard dim {dim} along {axis}",
                needed="a dim it repeats, and the operand replicated along the axis",
                found=str(t),
                where=user_line(),
            )
        layout = layout.shard(axis, dim, within)
    return t.with_layout(layout)


def _expand_vjp(n: Node, ct: Node) -> Any:
    x = n.args[0]
    dims = tuple(i for i in range(ct.ndim) if x.shape[i] != n.shape[i])
    return (op_named("sum")(ct, dims=dims, keepdim=True),)


expand_op = define(
    "expand",
    kind=Kind.VIEW,
    infer=_expand_infer,
    run=lambda x, shape, shards: x.expand(shape),
    local=lambda ctx, x, shape, shards: x.expand(ctx.out_shape()),
    linear=Linear.FIRST,
    monotone=FIRST,
    vjp=_expand_vjp,
    field=lambda p, x, shape, shards: x.expand(shape),
)


def expand(x: Any, shape: Any, shards: Any = ()) -> Any:
    """Repeat dims of size 1 to `shape`, as torch.expand; `shards` are (axis, dim, within) of repeated dims."""
    shape = tuple(shape)
    extra = len(shape) - x.ndim
    if extra:
        x = reshape(x, (1,) * extra + tuple(x.shape))
    return x if shape == tuple(x.shape) else expand_op(x, shape=shape, shards=tuple(shards))


def expand_like(x: Any, like: Any) -> Any:
    """Repeated to the shape of `like`, the repeated dims, and those of size 1, sharded as there."""
    here = reshape(x, (1,) * (like.ndim - x.ndim) + tuple(x.shape))
    places = [(axis, like.type.on(axis)) for axis in like.mesh.axes if isinstance(here.type.on(axis), Replicated)]
    shards = [(axis, p.dim, p.within) for axis, p in places if isinstance(p, S) and here.shape[p.dim] == 1]
    out = expand(here, like.shape, [c for c in shards if like.shape[c[1]] != 1])
    for axis, dim, within in shards:
        out = out if like.shape[dim] != 1 else op_named("slice")(out, axis=axis, dim=dim, within=within)
    return out


# -- one dim changed: narrow, concat, pad -------------------------------------------------------------------------------------


def _one_dim(attrs: Attrs, rank: int) -> tuple[tuple[str, ...], int]:
    dim = attrs["dim"]
    if not 0 <= dim < rank:
        raise TypeMismatch(
            f"no dim {dim} in a tensor of {rank} dims", needed=f"a dim from 0 to {rank - 1}", found=str(dim), where=user_line()
        )
    return tuple(f"d{i}" for i in range(rank)), dim


def _narrow_equation(types: Types, attrs: Attrs) -> Equation:
    labels, dim = _one_dim(attrs, len(types[0].shape))
    size = types[0].shape[dim]
    if not (0 <= attrs["start"] <= attrs["stop"] <= size and attrs["step"] >= 1):
        raise TypeMismatch(
            "narrow runs outside the dim",
            needed=f"0 <= start <= stop <= {size} and step >= 1",
            found=f"{attrs['start']}:{attrs['stop']}:{attrs['step']}",
            where=user_line(),
        )
    out = tuple("new" if i == dim else x for i, x in enumerate(labels))
    return Equation(
        (labels,), (out,), unsharded=frozenset({labels[dim]}), sizes={"new": len(range(attrs["start"], attrs["stop"], attrs["step"]))}
    )


def _narrow_run(x: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(start, stop, step),)]


def _narrow_vjp(n: Node, ct: Node) -> Any:
    dim, start, step, size = n.attr("dim"), n.attr("start"), n.attr("step"), n.args[0].shape[n.attr("dim")]
    count = n.shape[dim]
    if step > 1 and count:  # spread: put step - 1 zeros after each, then trim
        shape = (*ct.shape[: dim + 1], 1, *ct.shape[dim + 1 :])
        ct = pad(reshape(ct, shape), dim + 1, 0, step - 1)
        ct = narrow(reshape(ct, (*n.shape[:dim], count * step, *n.shape[dim + 1 :])), dim, 0, min(count * step, size - start))
    return (pad(ct, dim, start, size - start - ct.shape[dim]),)


narrow_op = define(
    "narrow", kind=Kind.VIEW, equation=_narrow_equation, run=_narrow_run, linear=Linear.FIRST, monotone=FIRST, vjp=_narrow_vjp,
    field=lambda p, x, **a: _narrow_run(x, **a),
)  # fmt: skip


def narrow(x: Any, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """Indices start to stop along a dim, as x[..., start:stop:step, ...]."""
    dim = one_dim(dim, x.ndim)
    full = start == 0 and stop == x.shape[dim] and step == 1
    return x if full else narrow_op(x, dim=dim, start=start, stop=stop, step=step)


def split(x: Any, sizes: Any, dim: int) -> list[Any]:
    """Consecutive pieces of the sizes given along a dim."""
    out, at = [], 0
    for n in sizes:
        out.append(narrow(x, dim, at, at + n))
        at += n
    return out


def _concat_equation(types: Types, attrs: Attrs) -> Equation:
    labels, dim = _one_dim(attrs, len(types[0].shape))
    ins = tuple(tuple(f"part{k}" if i == dim else x for i, x in enumerate(labels)) for k in range(len(types)))
    out = tuple("new" if i == dim else x for i, x in enumerate(labels))
    full = frozenset(f"part{k}" for k in range(len(types)))
    return Equation(ins, (out,), unsharded=full, sizes={"new": sum(t.shape[dim] for t in types)})


def _concat_vjp(n: Node, ct: Node) -> Any:
    return tuple(split(ct, [a.shape[n.attr("dim")] for a in n.args], n.attr("dim")))


concat_op = define(
    "concat", kind=Kind.VIEW, equation=_concat_equation, run=lambda *xs, dim: torch.cat(xs, dim), linear=Linear.JOINTLY, vjp=_concat_vjp,
    field=lambda p, *xs, dim: torch.cat(xs, dim),
)  # fmt: skip


def concat(xs: Any, dim: int) -> Any:
    """Tensors laid end to end along a dim; their other dims are equal."""
    if isinstance(xs, Node) or not xs:
        found = "one tensor, not in a list" if isinstance(xs, Node) else "none"
        raise TypeMismatch(
            "concat of nothing", needed="a list of at least one tensor", found=found, try_="concat([x, y], dim=0)", where=user_line()
        )
    ranks = dict.fromkeys(x.ndim for x in xs if isinstance(x, Node))
    if len(ranks) > 1:
        raise TypeMismatch(
            "concat of tensors of several ranks", needed="as many dims in each", found=" and ".join(f"{n} dims" for n in ranks),
            try_="reshape(x, ...) first", where=user_line(),
        )  # fmt: skip
    return concat_op(*xs, dim=one_dim(dim, xs[0].ndim))


def _pad_equation(types: Types, attrs: Attrs) -> Equation:
    labels, dim = _one_dim(attrs, len(types[0].shape))
    if min(attrs["before"], attrs["after"]) < 0:
        found = f"{attrs['before']} and {attrs['after']}"
        raise TypeMismatch(
            "pad adds, it takes nothing away", needed="0 or more before and after", found=found, try_="narrow(x, dim, start, stop)"
        )
    out = tuple("new" if i == dim else x for i, x in enumerate(labels))
    return Equation(
        (labels,), (out,), unsharded=frozenset({labels[dim]}), sizes={"new": types[0].shape[dim] + attrs["before"] + attrs["after"]}
    )


def _pad_run(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


pad_op = define(
    "pad", kind=Kind.VIEW, equation=_pad_equation, run=_pad_run, linear=Linear.FIRST, monotone=FIRST, field=lambda p, x, **a: _pad_run(x, **a),
    vjp=lambda n, ct: (narrow(ct, n.attr("dim"), n.attr("before"), n.attr("before") + n.args[0].shape[n.attr("dim")]),),
)  # fmt: skip


def pad(x: Any, dim: int, before: int, after: int) -> Any:
    """Zeros before and after along a dim."""
    return x if before == after == 0 else pad_op(x, dim=one_dim(dim, x.ndim), before=before, after=after)


__all__ = ["Local", "concat", "expand", "expand_like", "item", "narrow", "pad", "permute", "reshape", "split", "transpose"]
