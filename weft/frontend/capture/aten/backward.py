"""ATen's backward ops as a joint trace meets them; called by hand elsewhere, they are kept as torch has them, second gradient and all."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.node import Node
from weft.frontend.capture.aten.shape import _select, _slice
from weft.frontend.capture.handlers import aten as heard
from weft.frontend.capture.handlers import to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.ops import conv, embed
from weft.ops import pointwise as w
from weft.ops import reduce as wr
from weft.ops.fill import arange, full
from weft.ops.shape import narrow, pad, reshape


def aten(*names: str) -> Any:
    """Register a handler that declines where no autograd runs under the trace."""
    return lambda handler: heard(*names)(lambda r, *args, **kwargs: handler(r, *args, **kwargs) if r.joint else NotImplemented)


aten("threshold_backward")(lambda r, ct, x, least: w.where(w.gt(x, float(least)), ct, r.number(0, ct.dtype)))
aten("tanh_backward")(lambda r, ct, y: w.mul(ct, w.sub(r.number(1.0, y.dtype), w.square(y))))
aten("sigmoid_backward")(lambda r, ct, y: w.mul(ct, w.mul(y, w.sub(r.number(1.0, y.dtype), y))))
aten("leaky_relu_backward")(lambda r, ct, x, slope, is_result: w.where(w.gt(x, 0.0), ct, w.mul(ct, float(slope))))


def _slope(name: str, node: Any) -> Any:
    """The op's own vjp, applied."""
    aten(name)(lambda r, ct, x, **more: node(x, **more).op.vjp(node(x, **more), ct)[0])


_slope("silu_backward", w.silu)
_slope("gelu_backward", lambda x, approximate="none": w.gelu(x, tanh=True) if approximate == "tanh" else w.gelu(x))


@aten("_softmax_backward_data")
def _softmax_backward(r: Recorder, ct: Node, y: Node, dim: int, dtype: torch.dtype) -> Node:
    return to_dtype(w.mul(y, w.sub(ct, wr.sum_(w.mul(ct, y), dims=(dim % y.ndim,), keepdim=True))), dtype)


@aten("_log_softmax_backward_data")
def _log_softmax_backward(r: Recorder, ct: Node, y: Node, dim: int, dtype: torch.dtype) -> Node:
    return to_dtype(w.sub(ct, w.mul(w.exp(y), wr.sum_(ct, dims=(dim % y.ndim,), keepdim=True))), dtype)


@aten("mse_loss_backward")
def _mse_backward(r: Recorder, ct: Node, x: Node, y: Node, reduction: int) -> Node:
    return w.mul(w.mul(w.sub(x, y), 2.0 / (math.prod(x.shape) if reduction == 1 else 1)), ct)


@aten("slice_backward")
def _slice_backward(r: Recorder, ct: Node, shape: Any, dim: int, start: int, end: int, step: int) -> Node:
    (_, (dim, lo, hi, by)) = _slice(tuple(shape), dim, start, end, step)[0]
    if by == 1:
        return pad(ct, dim, lo, shape[dim] - hi)
    narrowed = narrow(full(shape, 0.0, r.mesh, ct.dtype), dim, lo, hi, by)
    return narrowed.op.vjp(narrowed, ct)[0]


@aten("select_backward")
def _select_backward(r: Recorder, ct: Node, shape: Any, dim: int, index: int) -> Node:
    (_, (dim, lo, hi, _)), (_, _) = _select(tuple(shape), dim, index)
    return pad(reshape(ct, (*shape[:dim], 1, *shape[dim + 1 :])), dim, lo, shape[dim] - hi)


@aten("embedding_dense_backward")
def _embedding_backward(r: Recorder, ct: Node, index: Node, rows: int, padding_idx: int, by_frequency: bool) -> Node:
    if by_frequency:
        return NotImplemented
    if padding_idx >= 0:
        ct = w.where(reshape(w.eq(index, padding_idx), (*index.shape, 1)), r.number(0, ct.dtype), ct)
    return embed.put(ct, index, arange(rows, r.mesh), 0)


@aten("convolution_backward")
def _convolution_backward(r: Recorder, ct: Node, x: Node, weight: Node, bias: Any, stride: Any, padding: Any, dilation: Any,
                          transposed: bool, output_padding: Any, groups: int, wanted: Any) -> Any:  # fmt: skip
    """The vjp of the convolution itself."""
    if transposed or x.ndim != 4 or groups != 1:
        return NotImplemented
    y = conv.conv2d(x, weight, stride=stride, padding=padding, dilation=dilation)
    dx, dw = y.op.vjp(y, ct)
    grads = dx, dw, wr.sum_(ct, dims=(0, 2, 3))
    return [g for g, want in zip(grads, wanted, strict=True) if want]
