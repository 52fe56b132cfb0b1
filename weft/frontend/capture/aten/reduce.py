"""ATen reductions."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.node import Node
from weft.frontend.capture.modes import aten, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w
from weft.ops import reduce as wr
from weft.ops.shape import reshape


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


@aten("amax", "max.default")
def amax(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return wr.amax(x, dims=_dims(x, dim), keepdim=keepdim) if x.ndim else x


@aten("amin", "min.default")
def amin(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return wr.amin(x, dims=_dims(x, dim), keepdim=keepdim) if x.ndim else x


@aten("any.default", "any.dim", "any.dims")
def _any(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return w.gt(wr.amax(_bits(x), dims=_dims(x, dim), keepdim=keepdim), 0)


@aten("all.default", "all.dim", "all.dims")
def _all(r: Recorder, x: Node, dim: Any = None, keepdim: bool = False) -> Node:
    return w.gt(wr.amin(_bits(x), dims=_dims(x, dim), keepdim=keepdim), 0)


def _bits(x: Node) -> Node:
    return to_dtype(x if x.dtype == torch.bool else w.ne(x, 0), torch.int64)


@aten("var.correction", "var.dim", "var.default")
def var(r: Recorder, x: Node, dim: Any = None, *_: Any, correction: Any = 1, unbiased: bool | None = None, keepdim: bool = False) -> Node:
    if _:
        return NotImplemented
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    less = (1 if unbiased else 0) if unbiased is not None else 1 if correction is None else correction
    apart = w.sub(x, wr.mean(x, dims, True))
    return w.mul(wr.sum_(w.square(apart), dims=dims, keepdim=keepdim), 1.0 / max(count - less, 1e-30))


@aten("std.correction")
def _std(r: Recorder, x: Node, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Node:
    return w.sqrt(var(r, x, dim, correction=correction, keepdim=keepdim))


@aten("var_mean.correction")
def _var_mean(r: Recorder, x: Node, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> list[Node]:
    return [var(r, x, dim, correction=correction, keepdim=keepdim), wr.mean(x, _dims(x, dim), keepdim)]


@aten("linalg_vector_norm")
def _norm(r: Recorder, x: Node, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    x = to_dtype(x, dtype or x.dtype)
    dims = _dims(x, dim)
    if ord == 2:
        return w.sqrt(wr.sum_(w.square(x), dims=dims, keepdim=keepdim))
    if ord == 1:
        return wr.sum_(w.abs_(x), dims=dims, keepdim=keepdim)
    return wr.amax(w.abs_(x), dims=dims, keepdim=keepdim) if ord == math.inf else NotImplemented


@aten("norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.Scalar")
def _old_norm(r: Recorder, x: Node, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Node:
    return _norm(r, x, 2 if p is None else p, dim, keepdim, dtype)


@aten("logsumexp")
def _logsumexp(r: Recorder, x: Node, dim: Any, keepdim: bool = False) -> Node:
    dims = _dims(x, dim)
    top = wr.amax(x, dims=dims, keepdim=True)
    out = w.add(top, w.log(wr.sum_(w.exp(w.sub(x, top)), dims=dims, keepdim=True)))
    return out if keepdim else reshape(out, tuple(n for i, n in enumerate(x.shape) if i not in dims))


@aten("mse_loss")
def _mse(r: Recorder, a: Node, b: Node, reduction: int = 1) -> Node:
    return reduced(w.square(w.sub(a, b)), reduction)


@aten("smooth_l1_loss")
def _smooth_l1(r: Recorder, a: Node, b: Node, reduction: int = 1, beta: float = 1.0) -> Node:
    apart = w.abs_(w.sub(a, b))
    near = w.mul(w.square(apart), 0.5 / beta)
    return reduced(w.where(w.lt(apart, float(beta)), near, w.sub(apart, 0.5 * beta)), reduction)


@aten("huber_loss")
def _huber(r: Recorder, a: Node, b: Node, reduction: int = 1, delta: float = 1.0) -> Node:
    apart = w.abs_(w.sub(a, b))
    near, far = w.mul(w.square(apart), 0.5), w.mul(w.sub(apart, 0.5 * delta), float(delta))
    return reduced(w.where(w.lt(apart, float(delta)), near, far), reduction)


@aten("binary_cross_entropy")
def _bce_of_chances(r: Recorder, x: Node, y: Node, weight: Any = None, reduction: int = 1) -> Node:
    """Logarithms are held at -100, as torch holds them."""
    one = r.number(1.0, x.dtype)
    yes, no = (w.clamp(w.log(p), lo=-100.0) for p in (x, w.sub(one, x)))
    loss = w.neg(w.add(w.mul(y, yes), w.mul(w.sub(one, y), no)))
    return reduced(loss if weight is None else w.mul(loss, weight), reduction)


@aten("binary_cross_entropy_with_logits")
def _bce(r: Recorder, x: Node, y: Node, weight: Any = None, pos_weight: Any = None, reduction: int = 1) -> Node:
    """max(x, 0) - x y + log(1 + exp(-|x|)), with the positive part weighed where asked."""
    tail = w.log(w.add(w.exp(w.neg(w.abs_(x))), 1.0))
    if pos_weight is None:
        loss = w.add(w.sub(w.relu(x), w.mul(x, y)), tail)
    else:
        scale = w.add(w.mul(w.sub(pos_weight, 1.0), y), 1.0)
        loss = w.add(w.mul(w.sub(r.number(1.0, x.dtype), y), x), w.mul(scale, w.add(tail, w.relu(w.neg(x)))))
    return reduced(loss if weight is None else w.mul(loss, weight), reduction)


def reduced(loss: Node, reduction: Any) -> Node:
    """Torch's three reductions of a loss, by number or by name."""
    if reduction in (0, "none"):
        return loss
    return wr.mean(loss) if reduction in (1, "mean") else wr.sum_(loss, dims=tuple(range(loss.ndim)))
