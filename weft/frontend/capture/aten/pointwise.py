"""ATen ops that are elementwise."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.node import Node
from weft.frontend.capture.handlers import aten, to_dtype
from weft.frontend.capture.patterns import improved
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.unknown_ops import alone
from weft.ops import pointwise as w
from weft.ops.shape import expand


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
    return improved(r, w.add(x, _times(r, y, alpha)))


@aten("sub.Tensor", "sub.Scalar")
def _sub(r: Recorder, a: Any, b: Any, alpha: float = 1) -> Node:
    x, y = promoted(r, a, b)
    return w.sub(x, _times(r, y, alpha))


@aten("rsub")
def _rsub(r: Recorder, a: Any, b: Any, alpha: float = 1) -> Node:
    return _sub(r, b, a, alpha)


def _times(r: Recorder, x: Node, number: Any) -> Node:
    """By a number, or by one that is computed."""
    return x if not isinstance(number, Node) and number == 1 else w.mul(x, r.number(number, x.dtype))


@aten("div")
def _div(r: Recorder, a: Any, b: Any, rounding_mode: str | None = None) -> Node:
    return w.div(*promoted(r, a, b, float_=True)) if rounding_mode is None else NotImplemented


@aten("pow.Tensor_Scalar")
def _pow(r: Recorder, a: Node, e: float) -> Node:
    x = promoted(r, a, e)[0]
    if isinstance(e, Node):
        return w.pow_(x, as_node(r, e, x.dtype))
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
    **w.UNARY, "silu": w.silu, "floor": w.floor,
    "reciprocal": lambda x: w.div(1.0, x), "ceil": lambda x: w.neg(w.floor(w.neg(x))),
    "isfinite": w.isfinite,
}.items():  # fmt: skip
    _unary(_name, _op)

for _name, _op in {"neg": w.neg, "abs": w.abs_, "sign": w.sign, "relu": w.relu, "square": lambda x: w.mul(x, x)}.items():
    aten(_name)(lambda r, x, _op=_op: _op(x))

aten("gelu")(lambda r, x, approximate="none": w.gelu(x, tanh=True) if approximate == "tanh" else w.gelu(x))
aten("alias", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "detach_copy")(lambda r, x, **_: x)
aten("_to_copy")(lambda r, x, dtype=None, **_: r.number(x, dtype) if isinstance(x, (bool, int, float)) else x if dtype is None else to_dtype(x, dtype))
aten("isnan")(lambda r, x: w.ne(x, x))
aten("logical_not", "bitwise_not")(lambda r, x: w.logical_not(_truth(x)) if _boolean(x) else NotImplemented)


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


@aten("clamp.default", "clamp_min.default")
def _clamp(r: Recorder, x: Node, min: Any = None, max: Any = None) -> Node:
    bounds = [v for v in (min, max) if v is not None]
    if any(isinstance(v, Node) for v in bounds):  # numbers that are computed
        x = x if min is None else w.maximum(x, as_node(r, min, x.dtype))
        return x if max is None else w.minimum(x, as_node(r, max, x.dtype))
    if result_dtype(x, *bounds) != x.dtype or not all(math.isfinite(v) for v in bounds):
        return NotImplemented
    kind = float if x.dtype.is_floating_point else int
    return w.clamp(x, **{k: kind(v) for k, v in (("lo", min), ("hi", max)) if v is not None})


aten("clamp_max.default")(lambda r, x, high: _clamp(r, x, None, high))


@aten("lerp.Scalar", "lerp.Tensor")
def _lerp(r: Recorder, a: Node, b: Node, weight: Any) -> Node:
    """As torch does it: from the nearer end, where the weight is a number."""
    if not isinstance(weight, Node) and abs(weight) >= 0.5:
        return w.sub(b, w.mul(w.sub(b, a), r.number(1.0 - weight, a.dtype)))
    return w.add(a, w.mul(w.sub(b, a), as_node(r, weight, a.dtype)))


@aten("addcmul.default")
def _addcmul(r: Recorder, x: Node, a: Node, b: Node, value: Any = 1) -> Node:
    return _add(r, x, w.mul(*promoted(r, a, b)), alpha=value)


@aten("addcdiv.default")
def _addcdiv(r: Recorder, x: Node, a: Node, b: Node, value: Any = 1) -> Node:
    top, bottom = promoted(r, a, b, float_=True)
    return w.add(*promoted(r, x, w.div(_times(r, top, value), bottom)))



@aten("copy")
def _copy(r: Recorder, x: Node, source: Node, non_blocking: bool = False) -> Node:
    return to_dtype(source, x.dtype)


@aten("fill", "fill.Tensor", "fill.Scalar")
def _fill(r: Recorder, x: Node, value: Any) -> Node:
    return expand(as_node(r, value, x.dtype), x.shape)


aten("zero")(lambda r, x: expand(r.number(0, x.dtype), x.shape))


@aten("log_sigmoid_forward")
def _log_sigmoid(r: Recorder, x: Node) -> list[Node]:
    """The second result is scratch of torch's own backward."""
    return [alone(r, torch.ops.aten.log_sigmoid.default, x, dtype=x.dtype), x]
