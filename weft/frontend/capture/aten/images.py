"""Convolution, pooling and batch norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from weft.core.errors import CaptureError
from weft.core.node import Node, op_named, user_line
from weft.frontend.capture.handlers import aten, function, to_dtype
from weft.frontend.capture.modes import fake_result
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.unknown_ops import unknown
from weft.ops import batchnorm, conv, pool
from weft.ops import pointwise as w
from weft.ops.fill import full
from weft.ops.norm import wide_dtype
from weft.ops.shape import reshape


@aten("convolution")
def _convolution(r: Recorder, x: Node, weight: Node, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
                 output_padding: Any, groups: int) -> Node:  # fmt: skip
    """Two window dims, or one as a row of pixels; three-dimensional ones are left opaque."""
    if x.ndim not in (3, 4) or (transposed and (x.ndim == 3 or groups > 1)):
        return NotImplemented
    stride, padding, dilation = (_each(v, x.ndim - 2, plain) for v, plain in ((stride, 1), (padding, 0), (dilation, 1)))
    if transposed:
        return _transposed(x, weight, bias, stride, padding, dilation, output_padding)
    if x.ndim == 4:
        return conv.conv2d(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)
    row, kernel = (reshape(v, (*v.shape[:2], 1, v.shape[2])) for v in (x, weight))
    y = conv.conv2d(row, kernel, bias, stride=(1, *stride), padding=(0, *padding), dilation=(1, *dilation), groups=groups)
    return reshape(y, (*y.shape[:2], y.shape[3]))


def _each(given: Any, dims: int, plain: int) -> tuple[int, ...]:
    """A number for every window dim: torch may leave them out, or give one for all."""
    return (plain,) * dims if not given else tuple(given) if len(given) == dims else tuple(given) * dims


def _transposed(x: Node, weight: Node, bias: Any, stride: Any, padding: Any, dilation: Any, extra: Any) -> Node:
    """The transpose of a convolution is its gradient by the input."""
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, extra, strict=True)
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, k, s, p, d, e in sizes)
    how = {"stride": tuple(stride), "padding": tuple(padding), "dilation": tuple(dilation)}
    y = op_named("conv2d_input_grad")(x, weight, size=size, **how)
    return y if bias is None else w.add(y, reshape(bias, (1, bias.shape[0], 1, 1)))


@function(F.max_pool1d, torch.max_pool1d)
def _max_pool1d(r: Recorder, x: Node, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False, return_indices: bool = False) -> Node:  # fmt: skip
    """A row of pixels."""
    one = [v if v is None or isinstance(v, int) else v[0] for v in (kernel_size, stride, padding, dilation)]
    row = reshape(x, (*(1,) * (3 - x.ndim), *x.shape[:-1], 1, x.shape[-1]))
    pairs = [None if v is None else (plain, v) for plain, v in zip((1, 1, 0, 1), one, strict=True)]
    y = _max_pool(r, row, pairs[0], pairs[1], pairs[2], pairs[3], ceil_mode, return_indices)
    return y if y is NotImplemented else reshape(y, (*x.shape[:-1], y.shape[-1]))


@function(F.max_pool2d, torch.max_pool2d)
def _max_pool(r: Recorder, x: Node, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
              ceil_mode: bool = False, return_indices: bool = False) -> Node:  # fmt: skip
    if x.ndim != 4 or conv.pair(dilation) != (1, 1) or ceil_mode or return_indices:
        return NotImplemented
    return pool.max_pool2d(x, kernel_size, stride or None, padding)


@aten("avg_pool2d")
def _avg_pool(r: Recorder, x: Node, kernel: Any, stride: Any = (), padding: Any = (0, 0), ceil_mode: bool = False,
              count_include_pad: bool = True, divisor_override: Any = None) -> Node:  # fmt: skip
    if x.ndim != 4 or ceil_mode or divisor_override is not None:
        return NotImplemented
    pairs = [tuple(v) * 2 if len(v) == 1 else v for v in (kernel, stride or kernel, padding)]
    return pool.avg_pool2d(x, *pairs, count_pad=count_include_pad)


@aten("_adaptive_avg_pool2d")
def _adaptive_avg_pool(r: Recorder, x: Node, size: Any) -> Node:
    return pool.adaptive_avg_pool2d(x, size) if x.ndim == 4 else NotImplemented


@function(F.batch_norm, torch.batch_norm, tensors=True)
def _batch_norm(r: Recorder, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
                bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
                *_: Any) -> Tensor:  # fmt: skip
    """The new running statistics are values like any other, written into the buffers they belong to."""
    if x.ndim < 2:
        raise CaptureError("batch norm needs channels", needed="2 dims or more", found=str(tuple(x.shape)), where=user_line())
    if r.joint:
        return _batch_norm_by_parts(x, running_mean, running_var, weight, bias, training, momentum, eps)
    (like,) = fake_result(torch.empty_like, (x,), {"memory_format": suggest_memory_format(x)})  # what torch's own batch norm writes into
    kind = wide_dtype(x.dtype)
    xs = to_dtype(r.node(x), kind)
    channels = xs.shape[1]

    def vector(tensor: Tensor | None, default: float) -> Node:
        return full((channels,), default, r.mesh, kind) if tensor is None else to_dtype(r.node(tensor), kind)

    scale, shift, mean, var = (vector(t, d) for t, d in ((weight, 1.0), (bias, 0.0), (running_mean, 0.0), (running_var, 1.0)))
    if not training:
        return r.wrap(to_dtype(batchnorm.batch_norm_eval(xs, scale, shift, mean, var, eps=eps), x.dtype), like)
    y, new_mean, new_var = batchnorm.batch_norm(xs, scale, shift, mean, var, momentum=momentum, eps=eps)
    for buffer, new in ((running_mean, new_mean), (running_var, new_var)):
        if buffer is not None:
            r.ref(buffer).write(r.stopped(to_dtype(new, buffer.dtype)))
    return r.wrap(to_dtype(y, x.dtype), like)


@aten("native_batch_norm.default", "_native_batch_norm_legit.default", tensors=True)
def _native_batch_norm(r: Recorder, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
                       eps: float) -> list[Node]:  # fmt: skip
    """Called by hand, or by an instance norm with running statistics: torch's own op, which writes none, and then the statistics."""
    kind = wide_dtype(x.dtype)
    seen, known = r.node(x), (running_mean, running_var)
    kept = (None, None) if training else known
    given = [None if t is None else r.node(t) for t in (x, weight, bias, *kept)]
    out = [x, *(torch.empty(x.shape[1] if training else 0, dtype=kind) for _ in range(2))]
    made = unknown(r, torch.ops.aten.native_batch_norm.default, out, (*given, training, momentum, eps), {})
    new = batchnorm.statistics(to_dtype(seen, kind)) if training else ()
    for buffer, value in zip(known, new, strict=False):
        if buffer is not None:
            old = to_dtype(r.node(buffer), kind)
            r.ref(buffer).write(r.stopped(to_dtype(w.add(w.mul(old, 1.0 - momentum), w.mul(value, momentum)), buffer.dtype)))
    return made if r.joint else [made[0], *map(r.stopped, made[1:])]  # of statistics torch has no gradient


@aten("_native_batch_norm_legit.no_stats", tensors=True)
def _native_batch_norm_alone(r: Recorder, x: Tensor, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> list[Node]:
    return _native_batch_norm(r, x, weight, bias, None, None, training, momentum, eps)


@aten("_batch_norm_with_update.default", tensors=True)
def _batch_norm_with_update(r: Recorder, x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float,
                            eps: float) -> list[Node]:  # fmt: skip
    given = _native_batch_norm(r, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return [*given, full((0,), 0, r.mesh, torch.uint8)]  # what cuDNN keeps


def _batch_norm_by_parts(x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: bool, momentum: float,
                         eps: float) -> Tensor:  # fmt: skip
    """The same in torch's own ops, for autograd to go through; its statistics too are written where they can be seen."""
    dims, shape = [0, *range(2, x.ndim)], (1, -1, *(1,) * (x.ndim - 2))
    mean, var = (x.mean(dims), None) if training else (running_mean, running_var)
    off = x - mean.view(shape)
    var = off.square().mean(dims) if var is None else var
    if training and running_mean is not None:
        count = x.numel() // x.shape[1]
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(momentum * mean)
            running_var.mul_(1 - momentum).add_(momentum * count / (count - 1) * var)
    y = off * torch.rsqrt(var + eps).view(shape)
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)
