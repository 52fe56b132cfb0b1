"""Reductions over dims of one operand. Of a sharded dim the result is Partial, never wrong."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Atom, Layout
from weft.core.node import DTYPE_NAMES, Attrs, Node, constant, op_named
from weft.ops.comm import all_reduce_partials, reshard
from weft.ops.registry import ONE, Equation, Kind, Linear, Types, define
from weft.ops.shape import expand_like


def norm_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims as a sorted tuple of integers from 0; None is all of them."""
    given = range(rank) if dims is None else (dims,) if isinstance(dims, int) else dims
    for d in given:
        if not isinstance(d, int) or not -rank <= d < rank:
            raise TypeMismatch(f"no dim {d} in a tensor of {rank} dims", needed=f"a dim from {-rank} to {rank - 1}", found=repr(d))
    return tuple(sorted({d % rank for d in given}))


def _reducing(reduce: str) -> Any:
    def equation(types: Types, attrs: Attrs) -> Equation:
        labels = tuple(f"d{i}" for i in range(len(types[0].shape)))
        dims = norm_dims(attrs.get("dims"), len(labels))
        keep = tuple(x if i not in dims else f"one{i}" for i, x in enumerate(labels) if attrs.get("keepdim") or i not in dims)
        return Equation((labels,), (keep,), reduce=reduce)

    return equation


def _normal(attrs: Attrs) -> Attrs:
    dims = attrs.get("dims")
    out: Attrs = {} if dims is None else {"dims": (dims,) if isinstance(dims, int) else tuple(dims)}
    out = {**out, "keepdim": True} if attrs.get("keepdim") else out
    return {**out, "numbers": False} if not attrs.get("numbers", True) else out


def stretch(x: Node, like: Node, dims: Any, keepdim: bool) -> Node:
    """A reduced value put back over the dims it was reduced along, ready to be stretched; the others are sharded as in `like`."""
    if keepdim:
        return x
    gone = norm_dims(dims, like.ndim)
    y = op_named("reshape")(x, shape=tuple(1 if i in gone else n for i, n in enumerate(like.shape)))
    kept = Layout(like.mesh, tuple((Atom(1),) if i in gone else dim for i, dim in enumerate(like.layout.dims)), y.layout.partials)
    return reshard(y, kept)  # type: ignore[no-any-return]


def _sum(x: torch.Tensor, dims: Any = None, keepdim: bool = False) -> torch.Tensor:
    return torch.sum(x, norm_dims(dims, x.ndim), keepdim=keepdim) if x.ndim else torch.sum(x)


def _sum_vjp(n: Node, ct: Node) -> Any:
    x = n.args[0]
    return (expand_like(stretch(ct, x, n.attr("dims"), n.attr("keepdim", False)), x),)


def _sum_field(p: int, x: torch.Tensor, dims: Any = None, keepdim: bool = False) -> torch.Tensor:
    return _sum(x, dims, keepdim) % p


def _sum_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    """Integers and bools are counted in i64, as torch does."""
    return types[0].dtype if types[0].dtype.is_floating_point else torch.int64


sum_ = define(
    "sum",
    kind=Kind.REDUCE,
    equation=_reducing("sum"),
    run=_sum,
    dtype=_sum_dtype,
    linear=Linear.FIRST,
    vjp=_sum_vjp,
    field=_sum_field,
    normal=_normal,
)


# -- squares about the mean: what variances are made of --------------------------------------------------------------------------


def _about_equation(types: Types, attrs: Attrs) -> Equation:
    """x, and its mean with the reduced dims kept as 1."""
    eq = _reducing("sum")(types[:1], attrs)
    dims = norm_dims(attrs.get("dims"), len(types[0].shape))
    return Equation((eq.ins[0], tuple(ONE if i in dims else x for i, x in enumerate(eq.ins[0]))), eq.outs)


def _about(x: torch.Tensor, center: torch.Tensor, dims: Any = None, keepdim: bool = False) -> torch.Tensor:
    return _sum((x - center).square(), dims, keepdim)


def _about_vjp(n: Node, ct: Node) -> Any:
    """Nothing flows to the mean, since what is left of x without it adds up to 0; torch's formula leaves it out too."""
    x, center = n.args
    back = expand_like(stretch(ct, x, n.attr("dims"), n.attr("keepdim", False)), x)
    alone = any(x.shape[d] == 1 for d in norm_dims(n.attr("dims"), x.ndim))  # a dim of one index may be sharded, and is not stretched
    return back * ((x - (expand_like(center, x) if alone else center)) * 2.0), None


squares_about = define(
    "squares_about",
    kind=Kind.COMPOSITE,
    equation=_about_equation,
    run=_about,
    vjp=_about_vjp,
    normal=_normal,
    doc="(x, its mean along dims) -> the sum of (x - mean)^2 along them",
)


def _along_replicated(outs: int) -> Any:
    """The reduced dims may not be sharded; so many results the same."""

    def equation(types: Types, attrs: Attrs) -> Equation:
        eq = _reducing("sum")(types, attrs)
        dims = norm_dims(attrs.get("dims"), len(types[0].shape))
        return Equation(eq.ins, eq.outs * outs, unsharded=frozenset(eq.ins[0][d] for d in dims))

    return equation


def _var_mean_vjp(n: Node, ct: Node, ct_mean: Node) -> Any:
    x, dims, keepdim = n.args[0], n.attr("dims"), n.attr("keepdim", False)
    count = math.prod(x.shape[d] for d in norm_dims(dims, x.ndim))
    back, back_mean = (expand_like(stretch(c, x, dims, keepdim), x) for c in (ct, ct_mean))
    centred = x - mean(x, dims, True)
    return (back * (centred * (2.0 / (count - n.attr("less")))) + back_mean * (1.0 / count),)


var_mean = define(
    "var_mean",
    kind=Kind.COMPOSITE,
    equation=_along_replicated(2),
    run=lambda x, less, dims=None, keepdim=False: torch.var_mean(x, norm_dims(dims, x.ndim), correction=less, keepdim=keepdim),
    vjp=_var_mean_vjp,
    normal=lambda attrs: {**_normal(attrs), "less": attrs["less"]},
    doc="the variance and the mean along dims that are not sharded, in one pass; `less` is taken from the count",
)


def _logsumexp_vjp(n: Node, ct: Node) -> Any:
    x, dims, keepdim = n.args[0], n.attr("dims"), n.attr("keepdim", False)
    back, total = (expand_like(stretch(c, x, dims, keepdim), x) for c in (ct, n))
    return (back * op_named("exp")(x - total),)


def _logsumexp_across(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    """By the maximum, or 0 where it is infinite, and the sum."""
    peak = all_reduce_partials(amax(op_named("stop_gradient")(x), dims=dims, keepdim=True))
    peak = op_named("where")(op_named("isfinite")(peak), peak, constant(0.0, x.dtype, x.mesh))
    total = op_named("log")(all_reduce_partials(sum_(op_named("exp")(x - peak), dims=dims, keepdim=True))) + peak
    gone = norm_dims(dims, x.ndim)
    return total if keepdim else op_named("reshape")(total, shape=tuple(n for i, n in enumerate(x.shape) if i not in gone))


logsumexp = define(
    "logsumexp",
    kind=Kind.COMPOSITE,
    equation=_along_replicated(1),
    run=lambda x, dims=None, keepdim=False: torch.logsumexp(x, norm_dims(dims, x.ndim), keepdim=keepdim),
    vjp=_logsumexp_vjp,
    across=_logsumexp_across,
    normal=_normal,
    doc="the logarithm of the sum of exp(x) along dims that are not sharded",
    transcendental=True,
)


def _lowest(dtype: torch.dtype, sign: int) -> float | int:
    if dtype.is_floating_point:
        return -sign * math.inf
    info = torch.iinfo(dtype)
    return int(info.min if sign > 0 else info.max)


def _extreme(sign: int) -> Any:
    """max (sign 1) or min (sign -1); of an empty slice the neutral value, as a rank of an uneven shard needs it."""

    def run(x: torch.Tensor, dims: Any = None, keepdim: bool = False, numbers: bool = True) -> torch.Tensor:
        axes = norm_dims(dims, x.ndim)
        if any(x.shape[d] == 0 for d in axes):
            shape = [1 if i in axes else n for i, n in enumerate(x.shape) if keepdim or i not in axes]
            return torch.full(shape, _lowest(x.dtype, sign), dtype=x.dtype, device=x.device)
        return (torch.amax if sign > 0 else torch.amin)(x, axes, keepdim=keepdim) if axes else x.clone()

    return run


def _extreme_vjp(n: Node, ct: Node) -> Any:
    """Ties share the cotangent evenly, as torch.amax has it; without `numbers` NaN shares it too, as torch.max has it."""
    x, dims, keep = n.args[0], n.attr("dims"), n.attr("keepdim", False)
    best = expand_like(stretch(all_reduce_partials(n), x, dims, keep), x)
    same = op_named("eq")(x, best)
    if not n.attr("numbers", True):
        same = op_named("logical_or")(same, op_named("ne")(x, x))
    hit = op_named("cast")(same, dtype=DTYPE_NAMES[x.dtype])
    count = all_reduce_partials(sum_(hit, dims=dims, keepdim=True))
    return (expand_like(stretch(ct, x, dims, keep), x) * (hit / expand_like(count, x)),)


amax = define(
    "amax", kind=Kind.REDUCE, equation=_reducing("max"), run=_extreme(1), vjp=_extreme_vjp, monotone=(frozenset({0}),), normal=_normal
)
amin = define(
    "amin", kind=Kind.REDUCE, equation=_reducing("min"), run=_extreme(-1), vjp=_extreme_vjp, monotone=(frozenset({0}),), normal=_normal
)


def mean(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    """The sum over the global count, so it is right on a sharded dim too."""
    axes = norm_dims(dims, x.ndim)
    return sum_(x, dims=axes, keepdim=keepdim) * (1.0 / max(1, math.prod(x.shape[d] for d in axes)))
