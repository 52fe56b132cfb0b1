"""ATen ops that treat each element alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.node import Node
from weft.frontend.capture.modes import aten, to_dtype
from weft.frontend.capture.patterns import improved
from weft.frontend.capture.recorder import Recorder
from weft.ops import pointwise as w


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype == torch.bool else 1


def _number_kind(x: Any) -> torch.dtype:
    return torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.get_default_dtype()


def result_dtype(*operands: Any) -> torch.dtype:
    """Torch's promotion: the highest category wins; within it, tensors of some dims before 0-d ones before numbers."""
    groups: list[list[torch.dtype]] = [[], [], []]
    for x in operands:
        if isinstance(x, Node):
            groups[0 if x.ndim else 1].append(x.dtype)
        else:
            groups[2].append(_number_kind(x))
    top = max(_category(d) for g in groups for d in g)
    chosen = next(g for g in groups if any(_category(d) == top for d in g))
    best = [d for d in chosen if _category(d) == top]
    for d in best[1:]:
        best[0] = torch.promote_types(best[0], d)
    return best[0]


def as_node(recorder: Recorder, x: Any, dtype: torch.dtype) -> Node:
    return to_dtype(x, dtype) if isinstance(x, Node) else recorder.number(x, dtype)


def promoted(recorder: Recorder, *operands: Any, float_: bool = False) -> list[Node]:
    """Operands brought to their common dtype; with `float_`, to a float one."""
    dtype = result_dtype(*operands)
    if float_ and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return [as_node(recorder, x, dtype) for x in operands]


def _binary(names: tuple[str, ...], op: Any, float_: bool = False) -> None:
    aten(*names)(lambda r, a, b: op(*promoted(r, a, b, float_=float_)))


_binary(("maximum",), w.maximum)
_binary(("minimum",), w.minimum)
_binary(("gt",), w.gt)
_binary(("ge",), w.ge)
_binary(("lt",), w.lt)
_binary(("le",), w.le)
_binary(("eq.Tensor", "eq.Scalar"), w.eq)
_binary(("ne.Tensor", "ne.Scalar"), w.ne)
_binary(("pow.Tensor_Tensor", "pow.Scalar"), w.pow_)


@aten("mul.Tensor", "mul.Scalar")
def _mul(r: Recorder, a: Any, b: Any) -> Node:
    x, y = promoted(r, a, b)
    return w.logical_and(x, y) if x.dtype == torch.bool else improved(r, w.mul(x, y))


@aten("add.Tensor", "add.Scalar")
def _add(r: Recorder, a: Any, b: Any, alpha: float = 1) -> Node:
    x, y = promoted(r, a, b)
    if x.dtype == torch.bool:
        return w.logical_or(x, y)
    return improved(r, w.add(x, y if alpha == 1 else _times(r, y, alpha)))


@aten("sub.Tensor", "sub.Scalar")
def _sub(r: Recorder, a: Any, b: Any, alpha: float = 1) -> Node:
    x, y = promoted(r, a, b)
    return w.sub(x, y if alpha == 1 else _times(r, y, alpha))


@aten("rsub")
def _rsub(r: Recorder, a: Any, b: Any, alpha: float = 1) -> Node:
    return _sub(r, b, a, alpha)


def _times(r: Recorder, x: Node, number: float) -> Node:
    return w.mul(x, r.number(number, x.dtype))


@aten("div")
def _div(r: Recorder, a: Any, b: Any, rounding_mode: str | None = None) -> Node:
    if rounding_mode is None:
        return w.div(*promoted(r, a, b, float_=True))
    kept = result_dtype(a, b)
    x, y = (as_node(r, v, kept if kept.is_floating_point else torch.float64) for v in (a, b))
    whole = w.floor(w.div(x, y))
    if rounding_mode == "trunc":
        whole = w.mul(w.sign(w.div(x, y)), w.floor(w.abs_(w.div(x, y))))
    return to_dtype(whole, kept)


@aten("floor_divide")
def _floor_divide(r: Recorder, a: Any, b: Any) -> Node:
    return _div(r, a, b, "floor")


@aten("remainder")
def _remainder(r: Recorder, a: Any, b: Any) -> Node:
    """a - b * floor(a / b), with the sign of b."""
    x, y = promoted(r, a, b)
    return w.sub(x, w.mul(y, _div(r, x, y, "floor")))


@aten("fmod")
def _fmod(r: Recorder, a: Any, b: Any) -> Node:
    x, y = promoted(r, a, b)
    return w.sub(x, w.mul(y, _div(r, x, y, "trunc")))


@aten("pow.Tensor_Scalar")
def _pow(r: Recorder, a: Node, e: float) -> Node:
    x = promoted(r, a, e)[0]
    if e == 1:
        return x
    if e == 2:
        return w.mul(x, x) if not x.dtype.is_floating_point else w.square(x)
    if e == 0.5:
        return w.sqrt(x)
    if e == -0.5:
        return w.rsqrt(x)
    return w.div(r.number(1.0, x.dtype), x) if e == -1 else w.pow_(x, r.number(e, x.dtype))


def _float(r: Recorder, x: Node) -> Node:
    return x if x.dtype.is_floating_point else to_dtype(x, torch.get_default_dtype())


def _unary(name: str, op: Any) -> None:
    aten(name)(lambda r, x: op(_float(r, x)))


for _name, _op in {
    "exp": w.exp, "log": w.log, "sqrt": w.sqrt, "rsqrt": w.rsqrt, "tanh": w.tanh, "sigmoid": w.sigmoid, "erf": w.erf,
    "sin": w.sin, "cos": w.cos, "silu": w.silu, "floor": w.floor,
    "reciprocal": lambda x: w.div(1.0, x), "ceil": lambda x: w.neg(w.floor(w.neg(x))),
    "log1p": lambda x: w.log(w.add(x, 1.0)), "expm1": lambda x: w.sub(w.exp(x), 1.0),
    "log2": lambda x: w.mul(w.log(x), 1 / math.log(2)), "log10": lambda x: w.mul(w.log(x), 1 / math.log(10)),
    "exp2": lambda x: w.exp(w.mul(x, math.log(2))), "isfinite": w.isfinite,
    "mish": lambda x: w.mul(x, w.tanh(_soften(x))),
    "hardswish": lambda x: w.mul(x, w.mul(w.clamp(w.add(x, 3.0), lo=0.0, hi=6.0), 1 / 6)),
    "hardsigmoid": lambda x: w.mul(w.clamp(w.add(x, 3.0), lo=0.0, hi=6.0), 1 / 6),
    "log_sigmoid_forward": lambda x: [w.neg(_soften(w.neg(x))), x],
}.items():  # fmt: skip
    _unary(_name, _op)

for _name, _op in {"neg": w.neg, "abs": w.abs_, "sign": w.sign, "relu": w.relu, "square": lambda x: w.mul(x, x)}.items():
    aten(_name)(lambda r, x, _op=_op: _op(x))

aten("gelu")(lambda r, x, approximate="none": w.gelu(x, tanh=True) if approximate == "tanh" else w.gelu(x))
aten("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "detach_copy")(lambda r, x, **_: x)
aten("_to_copy")(lambda r, x, dtype=None, **_: x if dtype is None else to_dtype(x, dtype))
aten("isnan")(lambda r, x: w.ne(x, x))
aten("logical_not", "bitwise_not")(lambda r, x: w.logical_not(_truth(x)) if _boolean(x) else NotImplemented)


def _soften(x: Node) -> Node:
    """log(1 + exp(x)) without overflow."""
    return w.add(w.relu(x), w.log(w.add(w.exp(w.neg(w.abs_(x))), 1.0)))


def _boolean(*xs: Any) -> bool:
    return all(x.dtype == torch.bool if isinstance(x, Node) else isinstance(x, bool) for x in xs)


def _truth(x: Node) -> Node:
    return x if x.dtype == torch.bool else w.ne(x, 0)


@aten("logical_and", "bitwise_and", "__and__")
def _and(r: Recorder, a: Any, b: Any) -> Node:
    return w.logical_and(*promoted(r, a, b)) if _boolean(a, b) else NotImplemented


@aten("logical_or", "bitwise_or", "__or__")
def _or(r: Recorder, a: Any, b: Any) -> Node:
    return w.logical_or(*promoted(r, a, b)) if _boolean(a, b) else NotImplemented


@aten("logical_xor", "bitwise_xor", "__xor__")
def _xor(r: Recorder, a: Any, b: Any) -> Node:
    return w.ne(*promoted(r, a, b)) if _boolean(a, b) else NotImplemented


@aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(r: Recorder, condition: Node, a: Any, b: Any) -> Node:
    return w.where(_truth(condition), *promoted(r, a, b))


@aten("masked_fill")
def _masked_fill(r: Recorder, x: Node, mask: Node, value: Any) -> Node:
    return w.where(mask, as_node(r, value, x.dtype), x)


@aten("clamp.default", "clamp.Tensor", "hardtanh")
def _clamp(r: Recorder, x: Node, min: Any = None, max: Any = None) -> Node:
    if isinstance(min, Node) or isinstance(max, Node):
        x = x if min is None else w.maximum(*promoted(r, x, min))
        return x if max is None else w.minimum(*promoted(r, x, max))
    kind = float if x.dtype.is_floating_point else int
    bounds = {k: kind(v) for k, v in (("lo", min), ("hi", max)) if v is not None}
    return w.clamp(x, **bounds)


aten("clamp_min")(lambda r, x, low: _clamp(r, x, low))
aten("clamp_max")(lambda r, x, high: _clamp(r, x, None, high))


@aten("leaky_relu")
def _leaky_relu(r: Recorder, x: Node, slope: float = 0.01) -> Node:
    return w.where(w.gt(x, 0.0), x, w.mul(x, slope))


@aten("elu")
def _elu(r: Recorder, x: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node:
    low = w.mul(w.sub(w.exp(w.mul(w.minimum(x, w.mul(x, 0.0)), float(input_scale))), 1.0), float(alpha))
    return w.mul(w.where(w.gt(x, 0.0), x, low), float(scale))


@aten("celu")
def _celu(r: Recorder, x: Node, alpha: float = 1) -> Node:
    return _elu(r, x, alpha, 1, 1 / alpha)


@aten("xlogy")
def _xlogy(r: Recorder, a: Any, b: Any) -> Node:
    """a log(b), and 0 where a is 0."""
    x, y = promoted(r, a, b, float_=True)
    zero = w.eq(x, r.number(0.0, x.dtype))
    return w.where(zero, r.number(0.0, x.dtype), w.mul(x, w.log(w.where(zero, r.number(1.0, x.dtype), y))))


@aten("softplus")
def _softplus(r: Recorder, x: Node, beta: float = 1, threshold: float = 20) -> Node:
    y = w.mul(x, float(beta))
    return w.where(w.gt(y, float(threshold)), x, w.mul(_soften(y), 1 / beta))


@aten("threshold")
def _threshold(r: Recorder, x: Node, least: float, value: float) -> Node:
    return w.where(w.gt(x, float(least)), x, r.number(value, x.dtype))


@aten("hardshrink")
def _hardshrink(r: Recorder, x: Node, limit: float = 0.5) -> Node:
    return w.where(w.gt(w.abs_(x), float(limit)), x, r.number(0.0, x.dtype))


@aten("softshrink")
def _softshrink(r: Recorder, x: Node, limit: float = 0.5) -> Node:
    return w.mul(w.sign(x), w.relu(w.sub(w.abs_(x), float(limit))))


@aten("_prelu_kernel")
def _prelu(r: Recorder, x: Node, slope: Node) -> Node:
    return w.where(w.gt(x, 0.0), x, w.mul(x, slope))


@aten("addcmul")
def _addcmul(r: Recorder, x: Node, a: Node, b: Node, value: float = 1) -> Node:
    return _add(r, x, w.mul(*promoted(r, a, b)), value)


@aten("addcdiv")
def _addcdiv(r: Recorder, x: Node, a: Node, b: Node, value: float = 1) -> Node:
    return _add(r, x, w.div(*promoted(r, a, b)), value)


@aten("lerp")
def _lerp(r: Recorder, a: Node, b: Node, weight: Any) -> Node:
    return w.add(a, w.mul(w.sub(b, a), as_node(r, weight, a.dtype)))


@aten("copy")
def _copy(r: Recorder, x: Node, source: Node, non_blocking: bool = False) -> Node:
    return to_dtype(source, x.dtype)


@aten("fill", "fill.Tensor", "fill.Scalar")
def _fill(r: Recorder, x: Node, value: Any) -> Node:
    return as_node(r, value, x.dtype)


aten("zero")(lambda r, x: r.number(0, x.dtype))
