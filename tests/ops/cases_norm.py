"""softmax, log_softmax, layer_norm, rms_norm and their backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.harness import case, normal
from weft.core.node import op_named
from weft.ops import norm


def gradient_of(f: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """What torch.autograd gives back through f: (ct, *xs) -> one cotangent per x."""

    def back(ct: torch.Tensor, *xs: torch.Tensor) -> Any:
        leaves = [x.detach().clone().requires_grad_() for x in xs]
        return torch.autograd.grad(f(*leaves), leaves, ct)

    return back


def _layer_norm(x: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], *vectors)


def _rms_norm(x: torch.Tensor, *vectors: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], *vectors, eps=1e-6)


def _softmax_back(dim: int) -> Any:
    return lambda ct, x: op_named("softmax_backward")(ct, op_named("softmax")(x, dim=dim), dim=dim)


def _log_softmax_back(ct: Any, x: Any) -> Any:
    return op_named("log_softmax_backward")(ct, op_named("log_softmax")(x, dim=1), dim=1)


def _norm_back(name: str, eps: float, vectors: int) -> Any:
    return lambda *xs: op_named(f"{name}_backward")(*xs[: 2 + min(vectors, 1)], eps=eps, vectors=vectors)


_SETS = "linear in weight and bias together; the entry cannot say: in the weight alone where there is no bias"
_WEIGHT = "dx is linear in the weight, dw does not depend on it: one would be pending and the other not"

_SOFTMAX = [
    case("softmax", norm.softmax, lambda x: torch.softmax(x, -1), normal(3, 4)),
    case("softmax of an uneven dim", lambda x: norm.softmax(x, 0), lambda x: torch.softmax(x, 0), normal(5, 2, 3)),
    case("softmax of few", lambda x: norm.softmax(x, 1), lambda x: torch.softmax(x, 1), normal(2, 2)),
    case("log_softmax", norm.log_softmax, lambda x: torch.log_softmax(x, -1), normal(3, 4)),
    case("log_softmax of an uneven dim", lambda x: norm.log_softmax(x, 0), lambda x: torch.log_softmax(x, 0), normal(5, 2)),
    case("softmax backward", _softmax_back(1), gradient_of(lambda x: torch.softmax(x, 1)), normal(5, 4), normal(5, 4), smooth=False),
    case(
        "log_softmax backward", _log_softmax_back, gradient_of(lambda x: torch.log_softmax(x, 1)), normal(5, 4), normal(5, 4), smooth=False
    ),
]

_NORMS = [
    case("layer_norm", norm.layer_norm, _layer_norm, normal(5, 4), normal(4), normal(4)),
    case("layer_norm without bias", norm.layer_norm, _layer_norm, normal(3, 2, 5), normal(5), refused=_SETS),
    case("layer_norm bare", norm.layer_norm, _layer_norm, normal(5, 3)),
    case("rms_norm", norm.rms_norm, _rms_norm, normal(5, 4), normal(4)),
    case("rms_norm of an uneven dim", norm.rms_norm, _rms_norm, normal(2, 3, 5), normal(5)),
    case("rms_norm bare", norm.rms_norm, _rms_norm, normal(5, 3)),
    case("rms_norm of one row", norm.rms_norm, _rms_norm, normal(4), normal(4)),
    case(
        "layer_norm backward",
        _norm_back("layer_norm", 1e-5, 2),
        gradient_of(_layer_norm),
        normal(5, 4),
        normal(5, 4),
        normal(4),
        normal(4),
        smooth=False,
        inner=False,
        refused=_WEIGHT,
    ),
    case(
        "rms_norm backward",
        _norm_back("rms_norm", 1e-6, 1),
        gradient_of(_rms_norm),
        normal(5, 4),
        normal(5, 4),
        normal(4),
        smooth=False,
        refused=_WEIGHT,
    ),
]

CASES = [*_SOFTMAX, *_NORMS]
