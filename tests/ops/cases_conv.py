"""Convolution, pooling, batch norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.harness import Case, case, distinct, normal, positive
from weft.core.node import op_named
from weft.ops import batchnorm, conv, pool

HOW = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 2)}
PLAIN = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
WINDOW = {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 0)}


def _conv(name: str, x: tuple[int, ...], w: tuple[int, ...], **how: Any) -> Case:
    return case(
        name, lambda a, b: conv.conv2d(a, b, **how), lambda a, b: F.conv2d(a, b, **how), normal(*x), normal(*w),
        inner=False, local="groups" in how,
    )  # fmt: skip


def _halo(name: str, x: tuple[int, ...], w: tuple[int, ...], **how: Any) -> Case:
    return case(
        name, lambda a, b, c: conv.conv2d_halo(a, b, c, axis="a", **how), lambda a, b, c: F.conv2d(a, b, c, **how),
        normal(*x), normal(*w), normal(w[0]), inner=False, roots=False, local=True, partial=False,
    )  # fmt: skip


def _by_input(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.grad.conv2d_input((y.shape[0], w.shape[1], 6, 7), w, y, **HOW)


def _by_weight(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.grad.conv2d_weight(x, (y.shape[1], x.shape[1], 3, 2), y, **HOW)


def _by_weight_in_groups(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.grad.conv2d_weight(x.flatten(1, 2), (6, 2, 2, 2), y.flatten(1, 2), groups=3).reshape(3, 2, 2, 2, 2)


def _max_transposed(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    return _transposed(lambda a: F.max_pool2d(a, (2, 2), 1), x, ct)


def _transposed(pool_: Any, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    """The torch function's own vjp at x."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(pool_(x), x, ct, create_graph=True)[0]


def _avg_transposed(ct: torch.Tensor) -> torch.Tensor:
    return _transposed(lambda a: F.avg_pool2d(a, (2, 2), 1), ct.new_zeros(*ct.shape[:2], 4, 4), ct)


def _adaptive_transposed(ct: torch.Tensor) -> torch.Tensor:
    return _transposed(lambda a: F.adaptive_avg_pool2d(a, (3, 2)), ct.new_zeros(*ct.shape[:2], 5, 5), ct)


_CONV = [
    _conv("conv2d", (3, 4, 5, 4), (5, 4, 3, 2)),
    _conv("conv2d in steps", (3, 4, 6, 7), (2, 4, 3, 2), **HOW),
    _conv("conv2d in groups", (3, 4, 5, 4), (6, 2, 3, 2), groups=2, padding=1),
    _conv("conv2d per channel", (2, 3, 4, 4), (3, 1, 2, 2), groups=3),
    case(
        "conv2d with bias", lambda x, w, b: conv.conv2d(x, w, b, padding=1), lambda x, w, b: F.conv2d(x, w, b, padding=1),
        normal(2, 3, 4, 3), normal(4, 3, 2, 2), normal(4), inner=False,
    ),
    case(
        "conv2d_input_grad", lambda y, w: conv.conv2d_input_grad(y, w, size=(6, 7), **HOW), _by_input,
        normal(2, 5, 3, 7), normal(5, 4, 3, 2), inner=False,
    ),
    case(
        "conv2d_weight_grad", lambda x, y: conv.conv2d_weight_grad(x, y, kernel=(3, 2), **HOW), _by_weight,
        normal(2, 4, 6, 7), normal(2, 5, 3, 7), inner=False,
    ),
    case(
        "conv2d_weight_grad in groups", lambda x, y: conv.conv2d_weight_grad(x, y, kernel=(2, 2), **PLAIN), _by_weight_in_groups,
        normal(2, 3, 2, 4, 3), normal(2, 3, 2, 3, 2), inner=False, local=True,
    ),
    _halo("conv2d_halo", (2, 3, 12, 4), (4, 3, 3, 3), padding=1),
    _halo("conv2d_halo in steps", (2, 3, 12, 3), (4, 3, 3, 3), padding=(1, 1), stride=(2, 1)),
    _halo("conv2d_halo far", (2, 2, 12, 12), (2, 2, 3, 3), padding=2, dilation=2),
    _halo("conv2d_halo of points", (2, 2, 12, 3), (2, 2, 1, 1), stride=2),
]  # fmt: skip

_POOL = [
    case("max_pool2d", lambda x: pool.max_pool2d(x, 3, 2, 1), lambda x: F.max_pool2d(x, 3, 2, 1), distinct(3, 4, 5, 4)),
    case(
        "max_pool2d_backward", lambda x, y: pool._max_pool2d_backward(x, y, **WINDOW), _max_transposed,
        distinct(3, 4, 4, 3), normal(3, 4, 3, 2), smooth=False, inner=False,
    ),
    case("avg_pool2d", lambda x: pool.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 2, 1), normal(3, 4, 5, 4)),
    case(
        "avg_pool2d of the image", lambda x: pool.avg_pool2d(x, (2, 3), 1, 1, count_pad=False),
        lambda x: F.avg_pool2d(x, (2, 3), 1, 1, count_include_pad=False), normal(2, 3, 4, 4),
    ),
    case(
        "avg_pool2d_backward", lambda y: op_named("avg_pool2d_backward")(y, size=(4, 4), count_pad=True, **WINDOW), _avg_transposed,
        normal(3, 2, 3, 3),
    ),
    case(
        "adaptive_avg_pool2d", lambda x: pool.adaptive_avg_pool2d(x, (3, 2)), lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
        normal(3, 4, 5, 5),
    ),
    case(
        "adaptive_avg_pool2d of equal parts", lambda x: pool.adaptive_avg_pool2d(x, (2, 1)),
        lambda x: F.adaptive_avg_pool2d(x, (2, 1)), normal(3, 2, 4, 3), local=True,
    ),
    case(
        "adaptive_avg_pool2d_backward", lambda y: op_named("adaptive_avg_pool2d_backward")(y, size=(5, 5), places=(3, 2)),
        _adaptive_transposed, normal(3, 4, 3, 2),
    ),
]  # fmt: skip


def _trained(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    m, v = m.detach().clone(), v.detach().clone()
    y = F.batch_norm(x, m, v, w, b, training=True, momentum=0.3)
    return y, m, v


def _evaluated(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    m, v, w, b = (t.reshape(1, -1, 1, 1) for t in (m, v, w, b))
    return (x - m) / torch.sqrt(v + 1e-5) * w + b


def _normalised(x: Any, w: Any, b: Any, m: Any, v: Any) -> Any:
    return batchnorm.batch_norm(x, w, b, m, v, momentum=0.3)[0]


def _norm(name: str, fn: Any, ref: Any, **more: Any) -> Case:
    stats = normal(3), normal(3), normal(3), positive(3)
    return case(name, fn, ref, normal(4, 3, 2, 2), *stats, inner=False, partial=False, roots=False, local=True, **more)


_NORM = [
    _norm("batch_norm", lambda *xs: batchnorm.batch_norm(*xs, momentum=0.3), _trained, smooth=False),
    _norm("batch_norm and its gradient", _normalised, lambda *xs: _trained(*xs)[0]),
    _norm("batch_norm_eval", batchnorm.batch_norm_eval, _evaluated),
]

CASES = [*_CONV, *_POOL, *_NORM]
