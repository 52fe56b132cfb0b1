"""Softmax, norms, losses and dropout, intercepted as torch functions so that each stays one op."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import CaptureError
from weft.core.node import Node, user_line
from weft.frontend.capture.aten.reduce import reduced
from weft.frontend.capture.handlers import aten, function, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.unknown_ops import unknown
from weft.ops import loss as wl
from weft.ops import norm as wn
from weft.ops import pointwise as w
from weft.ops import reduce as wr
from weft.ops.embed import gather, take
from weft.ops.fill import full
from weft.ops.shape import narrow, permute, reshape

# -- softmax -----------------------------------------------------------------------------------------------------------


@aten("_softmax")
def _softmax(r: Recorder, x: Node, dim: int, half_to_float: Any = False, dtype: Any = None) -> Node:
    kind = dtype or (torch.float32 if half_to_float is True else half_to_float or x.dtype)
    return _of_line(to_dtype(x, kind), dim, wn.softmax)


def _of_line(x: Node, dim: int, op: Any) -> Node:
    """A number is a vector of one."""
    return op(x, dim) if x.ndim else reshape(op(reshape(x, (1,)), 0), ())


@aten("_log_softmax")
def _log_softmax(r: Recorder, x: Node, dim: int, half_to_float: bool = False) -> Node:
    return _of_line(to_dtype(x, torch.float32 if half_to_float else x.dtype), dim, wn.log_softmax)


# -- norms over the last dims, over groups of channels, over the batch -----------------------------------------------------


def _over_last(x: Node, shape: Any, weight: Any, bias: Any, run: Any) -> Node:
    """A norm over several last dims is one over all of them at once."""
    if len(shape) == 1:
        return run(x, weight, bias)
    lead = x.shape[: x.ndim - len(shape)]
    flat = [None if v is None else reshape(v, (math.prod(shape),)) for v in (weight, bias)]
    return reshape(run(reshape(x, (*lead, math.prod(shape))), *flat), x.shape)


@function(F.layer_norm, torch.layer_norm)
def _layer_norm(r: Recorder, x: Node, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Node:
    weight, bias = (None if v is None else to_dtype(v, x.dtype) for v in (weight, bias))
    if bias is not None and weight is None:
        return w.add(_layer_norm(r, x, shape, eps=eps), bias)
    return _over_last(x, shape, weight, bias, lambda y, g, b: wn.layer_norm(y, g, b, eps))


@aten("native_layer_norm")
def _native_layer_norm(r: Recorder, x: Node, shape: Any, weight: Any, bias: Any, eps: float) -> list[Node]:
    if not r.joint:
        return NotImplemented  # called by hand, for its statistics
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    var, center = wr.var_mean(x, less=0, dims=dims, keepdim=True)
    spread = w.rsqrt(w.add(var, eps))
    return [_layer_norm(r, x, shape, weight, bias, eps), r.stopped(center), r.stopped(spread)]  # of which torch has no gradient


@function(F.rms_norm, torch.rms_norm)
def _rms_norm(r: Recorder, x: Node, shape: Any, weight: Any = None, eps: float | None = None) -> Node:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    kind = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    x, weight = to_dtype(x, kind), None if weight is None else to_dtype(weight, kind)
    return _over_last(x, shape, weight, None, lambda y, g, _: wn.rms_norm(y, g, eps))


@function(F.group_norm, torch.group_norm)
def _group_norm(r: Recorder, x: Node, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Node:
    """A layer norm without weights over each group, then the channels' own scale and shift."""
    y = wn.layer_norm(reshape(x, (x.shape[0], groups, math.prod(x.shape[1:]) // groups)), eps=eps)
    return _per_channel(reshape(y, x.shape), weight, bias)


@function(F.instance_norm)
def _instance_norm(r: Recorder, x: Node, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
                   use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5) -> Node:  # fmt: skip
    """Each channel of each image alone: a group norm with as many groups as channels."""
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    return _group_norm(r, x, x.shape[1], weight, bias, eps)


def _per_channel(y: Node, weight: Any, bias: Any) -> Node:
    shape = (y.shape[1], *(1,) * (y.ndim - 2))
    y = y if weight is None else w.mul(y, reshape(to_dtype(weight, y.dtype), shape))
    return y if bias is None else w.add(y, reshape(to_dtype(bias, y.dtype), shape))


@function(F.glu)
def _glu(r: Recorder, x: Node, dim: int = -1) -> Node:
    value, gate = (_half(x, dim % x.ndim, i) for i in range(2))
    return w.mul(value, w.sigmoid(gate))


def _half(x: Node, dim: int, i: int) -> Node:
    """One half of a dim, as a part of that dim split in two, so that what is inside can be sharded."""
    shape = (*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :])
    return reshape(narrow(reshape(x, (*shape[:dim], 2, *shape[dim:])), dim, i, i + 1), shape)


@aten("_weight_norm_interface")
def _weight_norm(r: Recorder, v: Node, g: Node, dim: int = 0) -> list[Node]:
    """g v / |v|, the norm over all dims but one."""
    norm = w.sqrt(wr.sum_(w.square(v), dims=tuple(d for d in range(v.ndim) if d != dim % v.ndim), keepdim=True))
    return [w.mul(v, w.div(g, norm)), norm]


# -- losses ----------------------------------------------------------------------------------------------------------------


@function(F.cross_entropy)
def cross_entropy(r: Recorder, x: Node, target: Node, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
                  reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> Node:  # fmt: skip
    """Classes brought to the last dim. Weighted classes, and targets that are chances, go down to ATen."""
    if weight is not None or size_average is not None or reduce is not None or target.dtype.is_floating_point:
        return NotImplemented
    if x.ndim > 2:
        x = permute(x, (0, *range(2, x.ndim), 1))
    return wl.cross_entropy(x, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction)


def _linear_cross_entropy(r: Recorder, *_: Any, options: Any = None, **__: Any) -> Any:
    """Torch's chunks compute gradients in the forward pass, where they are asked for; a trace asks for none."""
    if options is None:
        return NotImplemented
    raise CaptureError(
        "linear_cross_entropy in chunks has no gradient that can be captured",
        needed="options=None: weft chooses how a loss is sharded",
        found=repr(options)[:80],
        try_="F.linear_cross_entropy(input, weight, target), without options",
        where=user_line(),
    )


if hasattr(F, "linear_cross_entropy"):
    function(F.linear_cross_entropy)(_linear_cross_entropy)


@function(F.ctc_loss)
def _ctc_loss(r: Recorder, logp: Node, targets: Node, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
              zero_infinity: bool = False) -> Node:  # fmt: skip
    """Torch's own op, kept in one piece: what it leaves for its gradient has a shape that depends on the lengths."""
    op = torch.ops.aten.ctc_loss.Tensor if isinstance(input_lengths, Node) else torch.ops.aten.ctc_loss.IntList
    shape = (logp.shape[1],) if reduction == "none" and logp.ndim == 3 else ()
    how = blank, {"none": 0, "mean": 1, "sum": 2}[reduction], zero_infinity
    return unknown(r, op, torch.empty(shape, dtype=logp.dtype), (logp, targets, input_lengths, target_lengths, *how), {})


@function(F.gaussian_nll_loss, tensors=True)
def _gaussian_nll(r: Recorder, x: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean") -> Tensor:
    """Torch's formula, without a look at the variances: it refuses negative ones."""
    r.assume("the variances of gaussian_nll_loss are not negative")
    var = torch.full_like(x, var) if isinstance(var, float) else var.clone()
    var = var.unsqueeze(-1) if var.shape != x.shape and x.shape[:-1] == var.shape else var
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (x - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


@aten("nll_loss_forward", "nll_loss2d_forward")
def _nll(r: Recorder, logp: Node, target: Node, weight: Any, reduction: int, ignore_index: int) -> list[Node]:
    """The loss and the weight it was divided by."""
    classes = 1 if logp.ndim > 1 else 0
    keep = w.ne(target, ignore_index)
    at = w.where(keep, target, r.number(0, target.dtype))
    shape = (*at.shape[:classes], 1, *at.shape[classes:])
    picked = reshape(gather(logp, reshape(at, shape), classes), at.shape)
    share = to_dtype(keep, logp.dtype)
    share = share if weight is None else w.mul(share, take(weight, at, 0))
    losses, total = w.neg(w.mul(picked, share)), wr.sum_(share, dims=tuple(range(share.ndim)))
    if reduction == 0:
        return [losses, total]
    full = reduced(losses, "sum")
    return [w.div(full, total) if reduction == 1 else full, total]


# -- dropout: keyed by the step's seed, the site and the global index --------------------------------------------------------


@function(F.dropout, torch.dropout)
def _dropout(r: Recorder, x: Node, p: float = 0.5, training: bool = True, inplace: bool = False) -> Node:
    return drop(r, x, p if training else 0.0)


@function(F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout_channels(r: Recorder, x: Node, p: float = 0.5, training: bool = True, inplace: bool = False) -> Node:
    """Entire channels are dropped: the mask of one element each, stretched."""
    if not training or p == 0:
        return x
    ones = full((*x.shape[:2], *(1,) * (x.ndim - 2)), 1.0, r.mesh, x.dtype)
    return w.mul(x, drop(r, ones, p))


def drop(r: Recorder, x: Node, p: float) -> Node:
    if p in (0, 1):  # nothing is drawn
        return x if p == 0 else w.mul(x, 0.0)
    return w.dropout(x, r.seed, p=p, site=r.next_site())
