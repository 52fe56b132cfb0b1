"""ATen reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.node import Node
from weft.frontend.capture.handlers import aten, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.unknown_ops import alone
from weft.ops import pointwise as w
from weft.ops import reduce as wr
from weft.ops.norm import wide_dtype


def _dims(x: Node, dim: Any) -> tuple[int, ...]:
    """Torch's `dim`: none, or an empty list, is all of them."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % max(x.ndim, 1) for d in given) if x.ndim else ()


@aten("sum.default", "sum.dim_IntList")
def sum_(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    kind = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)
    x = to_dtype(x, kind)
    return wr.sum_(x, dims=_dims(x, dim), keepdim=keepdim) if x.ndim else x


@aten("mean.default", "mean.dim")
def mean(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    x = to_dtype(x, dtype or x.dtype)
    return wr.mean(x, _dims(x, dim), keepdim) if x.ndim else x


@aten("amax")
def amax(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return wr.amax(x, dims=_dims(x, dim), keepdim=keepdim)


@aten("amin")
def amin(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return wr.amin(x, dims=_dims(x, dim), keepdim=keepdim)


aten("max.default")(lambda r, x: wr.amax(x, dims=_dims(x, None), numbers=False))
aten("min.default")(lambda r, x: wr.amin(x, dims=_dims(x, None), numbers=False))


@aten("any.default", "any.dim", "any.dims")
def _any(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return w.gt(wr.amax(_bits(x), dims=_dims(x, dim), keepdim=keepdim), 0)


@aten("all.default", "all.dim", "all.dims")
def _all(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return w.gt(wr.amin(_bits(x), dims=_dims(x, dim), keepdim=keepdim), 0)


def _bits(x: Node) -> Node:
    return to_dtype(x if x.dtype == torch.bool else w.ne(x, 0), torch.int64)


@aten("var.correction")
def var(r: Recorder, x: Node, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Node:
    dims, less = _dims(x, dim), _less(x, dim, correction)
    if less is None:
        return NotImplemented
    x = to_dtype(x, wide_dtype(x.dtype))
    count = math.prod(x.shape[d] for d in dims)
    return w.div(wr.squares_about(x, wr.mean(x, dims, True), dims=dims, keepdim=keepdim), float(count - less))


def _less(x: Node, dim: Any, correction: Any) -> float | None:
    """What is taken from the count; none where nothing is left of it, and torch divides by 0 forward and by less than that backward."""
    less = 1 if correction is None else correction
    return less if x.ndim and math.prod(x.shape[d] for d in _dims(x, dim)) > less else None


@aten("std.correction")
def _std(r: Recorder, x: Node, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Node:
    spread = var(r, x, dim, correction=correction, keepdim=keepdim)
    return spread if spread is NotImplemented else _root(spread)


def _root(x: Node) -> Node:
    """A square root through which nothing flows back where it is 0, as torch has it of a norm and a deviation."""
    some = w.ne(x, 0.0)
    return w.keep(w.sqrt(w.where(some, x, w.add(w.mul(x, 0.0), 1.0))), some)


@aten("var_mean.correction")
def _var_mean(r: Recorder, x: Node, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> list[Node]:
    less = _less(x, dim, correction)
    return NotImplemented if less is None else list(wr.var_mean(x, less=less, dims=_dims(x, dim), keepdim=keepdim))


@aten("linalg_vector_norm")
def _norm(r: Recorder, x: Node, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    x = to_dtype(x, dtype or x.dtype)
    dims = _dims(x, dim)
    if ord == 2:  # of short floats torch adds squares in float32 and rounds the root alone
        wide = to_dtype(x, torch.float32) if x.dtype.itemsize < 4 else x
        return to_dtype(_root(wr.sum_(w.square(wide), dims=dims, keepdim=keepdim)), x.dtype)
    if ord == 1:
        return wr.sum_(w.abs_(x), dims=dims, keepdim=keepdim)
    if ord == 0:  # a count, of which torch gives no gradient at all
        return wr.sum_(to_dtype(w.ne(x, 0.0), x.dtype), dims=dims, keepdim=keepdim)
    if abs(ord) == math.inf and x.ndim:
        return (wr.amax if ord > 0 else wr.amin)(w.abs_(x), dims=dims, keepdim=keepdim, numbers=False)
    return NotImplemented


@aten("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar")
def _old_norm(r: Recorder, x: Node, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    return _norm(r, x, 2 if p is None else p, dim, keepdim, dtype)


@aten("logsumexp")
def _logsumexp(r: Recorder, x: Node, dim: Any, keepdim: bool = False) -> Node:
    if not x.dtype.is_floating_point or not x.ndim:
        return NotImplemented
    return wr.logsumexp(x, dims=_dims(x, dim), keepdim=keepdim)


@aten("mse_loss")
def _mse(r: Recorder, a: Node, b: Node, reduction: int = 1) -> Node:
    return reduced(w.square(w.sub(a, b)), reduction)


def _loss(name: str) -> None:
    """A loss of each element by torch's own formula, then reduced."""
    func = getattr(torch.ops.aten, name).default
    before = [a.name for a in func._schema.arguments].index("reduction")

    @aten(f"{name}.default")
    def handler(r: Recorder, *args: Any) -> Node:
        reduction = args[before] if len(args) > before else 1
        given = [to_dtype(a, args[0].dtype) if isinstance(a, Node) else a for a in args]
        return reduced(alone(r, func, *given[:before], *([None] * (before - len(given))), 0, *given[before + 1 :], dtype=args[0].dtype), reduction)


for _name in ("smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"):
    _loss(_name)


def reduced(loss: Node, reduction: Any) -> Node:
    """Torch's three reductions of a loss, by number or by name."""
    if reduction in (0, "none"):
        return loss
    return wr.mean(loss) if reduction in (1, "mean") else wr.sum_(loss, dims=tuple(range(loss.ndim)))
