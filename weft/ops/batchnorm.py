"""Batch norm from sums over the global batch, so that a sharded batch means what a full one means (SyncBN)."""

from __future__ import annotations

import math
from typing import Any

from weft.core.errors import TypeMismatch
from weft.core.node import user_line
from weft.ops.comm import all_reduce_partials
from weft.ops.fill import stop_gradient
from weft.ops.pointwise import rsqrt
from weft.ops.reduce import mean
from weft.ops.shape import reshape


def batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *, momentum: float = 0.1, eps: float = 1e-5
) -> tuple[Any, Any, Any]:
    """Normalised by its own statistics; also the new running mean and variance. What is sharded of the batch is reduced."""
    dims = (0, *range(2, x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    if count < 2:
        raise TypeMismatch("batch_norm has one value per channel", needed="two or more in training", found=str(x.type), where=user_line())
    center = all_reduce_partials(mean(x, dims))
    off = x - per_channel(stop_gradient(center), x)  # the variance is least at the mean: no gradient goes through it
    var = all_reduce_partials(mean(off * off, dims))
    scale = rsqrt(var + eps) * weight
    shift = bias - (center - stop_gradient(center)) * stop_gradient(scale)  # the bias, and the mean's gradient from the same sum
    y = off * per_channel(scale, x) + per_channel(shift, x)
    unbiased = var * (count / (count - 1))
    return y, _toward(running_mean, center, momentum), _toward(running_var, unbiased, momentum)


def statistics(x: Any) -> tuple[Any, Any]:
    """Mean and unbiased variance of every channel."""
    dims = (0, *range(2, x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    center = all_reduce_partials(mean(x, dims))
    off = x - per_channel(center, x)
    return center, all_reduce_partials(mean(off * off, dims)) * (count / (count - 1))


def batch_norm_eval(x: Any, weight: Any, bias: Any, mean: Any, var: Any, *, eps: float = 1e-5) -> Any:
    """Normalised by given statistics."""
    scale = weight * rsqrt(var + eps)
    return (x - per_channel(mean, x)) * per_channel(scale, x) + per_channel(bias, x)


def per_channel(v: Any, x: Any) -> Any:
    """One value per channel, ready to be stretched over the images."""
    return reshape(v, (1, v.shape[0], *(1,) * (x.ndim - 2)))


def _toward(old: Any, new: Any, momentum: float) -> Any:
    return (1.0 - momentum) * old + momentum * new


__all__ = ["batch_norm", "batch_norm_eval", "per_channel", "statistics"]
