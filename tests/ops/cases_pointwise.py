"""Ops that treat each element alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.harness import case, distinct, flags, index, normal, positive
from weft.ops import host
from weft.ops import pointwise as pw

_BINARY = [
    case("to the host and back", lambda x: host.landed(host.from_host(host.to_host(x))), lambda x: x.clone(), normal(5, 4)),
    case("add", pw.add, torch.add, normal(5, 4), normal(5, 4)),
    case("add stretched", pw.add, torch.add, normal(5, 1), normal(3, 1, 4), inner=False),
    case("add missing dim", pw.add, torch.add, normal(3, 4), normal(4)),
    case("add a number", lambda x: x + 1.5, lambda x: x + 1.5, normal(5, 4)),
    case("a number minus", lambda x: 1.0 - x, lambda x: 1.0 - x, normal(5, 4)),
    case("sub", pw.sub, torch.sub, normal(5, 4), normal(5, 4)),
    case("sub stretched", pw.sub, torch.sub, normal(4), normal(3, 4)),
    case("mul", pw.mul, torch.mul, normal(5, 4), normal(5, 4)),
    case("mul stretched", pw.mul, torch.mul, normal(5, 1), normal(1, 4)),
    case("mul by itself", lambda x: x * x, lambda x: x * x, normal(5)),
    case("mul by a number", lambda x: -2.0 * x, lambda x: -2.0 * x, normal(5, 4)),
    case("mul by a positive number", lambda x: 2.0 * x, lambda x: 2.0 * x, normal(5, 4)),
    case("div", pw.div, torch.div, normal(5, 4), positive(5, 4)),
    case("div a number", lambda x: 2.0 / x, lambda x: 2.0 / x, positive(5)),
    case("pow by a number", lambda x: x**3.0, lambda x: x**3.0, positive(5, 4)),
    case("pow", pw.pow_, torch.pow, positive(5, 4), normal(4)),
    case("maximum", pw.maximum, torch.maximum, normal(5, 4), normal(5, 4)),
    case("maximum of ties", pw.maximum, torch.maximum, index(2, 5), index(2, 5), smooth=False),
    case("minimum", pw.minimum, torch.minimum, normal(5, 4), normal(4)),
]

_COMPARE = [
    case(name, getattr(pw, name), getattr(torch, name), index(3, 5, 4), index(3, 4), smooth=False)
    for name in ("gt", "ge", "lt", "le", "eq", "ne")
] + [
    case(name, getattr(pw, name), getattr(torch, name), flags(5, 4), flags(4), smooth=False)
    for name in ("logical_and", "logical_or")
] + [
    case("logical_not", pw.logical_not, torch.logical_not, flags(5, 4), smooth=False),
    case("isfinite", pw.isfinite, torch.isfinite, normal(5, 4), smooth=False, refused="pending infinities may cancel"),
    case("where", pw.where, torch.where, flags(5, 4), normal(5, 4), normal(4), inner=False),
    case("keep_where", pw.keep_where, lambda x, here: torch.where(here, x, 0.0), normal(5, 4), flags(4), inner=False),
]  # fmt: skip

_UNARY = [
    case(name, getattr(pw, name), getattr(torch, name), normal(5, 4))
    for name in ("neg", "exp", "tanh", "sigmoid", "relu", "erf", "sin", "cos", "square")
] + [
    case(name, getattr(pw, name), getattr(torch, name), positive(5, 4)) for name in ("log", "sqrt", "rsqrt")
] + [
    case("abs", pw.abs_, torch.abs, distinct(5, 4)),
    case("sign", pw.sign, torch.sign, distinct(5, 4)),
    case("floor", pw.floor, torch.floor, normal(5, 4)),
    case("silu", pw.silu, F.silu, normal(5, 4)),
    case("gelu", pw.gelu, F.gelu, normal(5, 4)),
    case("gelu_backward", pw.gelu_backward, torch.ops.aten.gelu_backward, normal(5, 4), normal(5, 4), smooth=False),
    case("silu_backward", pw.silu_backward, torch.ops.aten.silu_backward, normal(5, 4), normal(5, 4), smooth=False),
    case("relu_backward", pw.relu_backward, lambda ct, y: ct * (y > 0), normal(5, 4), normal(5, 4), smooth=False),
    case("gelu by tanh", lambda x: pw.gelu(x, tanh=True), lambda x: F.gelu(x, approximate="tanh"), normal(5, 4)),
    case("clamp", lambda x: pw.clamp(x, lo=-0.5, hi=1.0), lambda x: torch.clamp(x, -0.5, 1.0), normal(5, 4)),
    case("clamp below", lambda x: pw.clamp(x, lo=0.1), lambda x: torch.clamp(x, 0.1), normal(5, 4)),
]  # fmt: skip

_CASTS = [
    case("cast down", lambda x: pw.cast(x, dtype="f32"), lambda x: x.float(), normal(5, 4), rtol=1e-5),
    case("cast to whole numbers", lambda x: pw.cast(x, dtype="i64"), lambda x: x.long(), normal(5, 4), smooth=False),
    case("cast to bool", lambda x: pw.cast(x, dtype="bool"), lambda x: x.bool(), index(2, 5, 4), smooth=False),
    case("cast from whole numbers", lambda x: pw.cast(x, dtype="f64"), lambda x: x.double(), index(9, 5, 4), smooth=False),
    case("cast from bool", lambda x: pw.cast(x, dtype="f64"), lambda x: x.double(), flags(5, 4), smooth=False),
]



def _drop(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    return pw._dropout(x, seed, p=0.4, site=1)


_DROPOUT = [
    case("dropout", lambda x: pw.dropout(x, 3, p=0.4, site=1), lambda x: _drop(x, torch.tensor(3)), normal(5, 4), local=True),
    case("dropout by a seed", lambda x, s: pw.dropout(x, s, p=0.4, site=1), _drop, normal(6), index(9), local=True),
]

CASES = [*_BINARY, *_COMPARE, *_UNARY, *_CASTS, *_DROPOUT]
