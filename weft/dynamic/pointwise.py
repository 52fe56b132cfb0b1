"""What pointwise ATen ops compute, in the few functions that every kernel writer knows.

An expression is a number, the fx node of an operand, or a tuple (function, argument, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from weft.dynamic.lower import aten

Expr = Any  # float | fx.Node | tuple[str, *Expr]

# function -> number of arguments
FUNCTIONS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "max": 2, "min": 2, "pow": 2, "and": 2, "or": 2,
    "gt": 2, "ge": 2, "lt": 2, "le": 2, "eq": 2, "ne": 2, "where": 3,
    "neg": 1, "abs": 1, "exp": 1, "log": 1, "sqrt": 1, "tanh": 1, "sigmoid": 1, "sin": 1, "cos": 1, "erf": 1, "not": 1,
}  # fmt: skip


def expression(node: fx.Node) -> Expr | None:
    """The value of one element of `node`, or None if the op is not pointwise."""
    rule = _RULES.get(node.target)
    return None if rule is None else rule(node)


def _plain(function: str) -> Callable[[fx.Node], Expr]:
    return lambda node: (function, *node.args[: FUNCTIONS[function]])


def _with_alpha(function: str) -> Callable[[fx.Node], Expr]:
    def rule(node: fx.Node) -> Expr:
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        right = node.args[1] if alpha == 1 else ("mul", node.args[1], float(alpha))
        return (function, node.args[0], right)

    return rule


def _power(node: fx.Node) -> Expr:
    x, power = node.args
    known = {2: ("mul", x, x), 0.5: ("sqrt", x), -0.5: ("div", 1.0, ("sqrt", x)), -1: ("div", 1.0, x), 1: x}
    return known.get(power, ("pow", x, float(power)))


def _clamp(node: fx.Node) -> Expr:
    x, low, high = (*node.args, None, None)[:3]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    out = x if low is None else ("max", x, low)
    return out if high is None else ("min", out, high)


def _gelu(node: fx.Node) -> Expr:
    x = node.args[0]
    if node.kwargs.get("approximate", "none") == "tanh":
        inner = ("mul", math.sqrt(2 / math.pi), ("add", x, ("mul", 0.044715, ("mul", x, ("mul", x, x)))))
        return ("mul", ("mul", 0.5, x), ("add", 1.0, ("tanh", inner)))
    return ("mul", ("mul", 0.5, x), ("add", 1.0, ("erf", ("mul", x, math.sqrt(0.5)))))


def _cast(node: fx.Node) -> Expr | None:
    """A change of dtype; anything else `_to_copy` may do is left to torch."""
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if set(node.kwargs) - {"dtype", "memory_format", "device"}:
        return None
    if source is torch.bool and target.is_floating_point:
        return ("where", node.args[0], 1.0, 0.0)
    return node.args[0] if source == target else None


def _fill(position: int) -> Callable[[fx.Node], Expr]:
    return lambda node: float(node.args[position])


_RULES: dict[Any, Callable[[fx.Node], Expr]] = {
    aten.add.Tensor: _with_alpha("add"), aten.add.Scalar: _with_alpha("add"),
    aten.sub.Tensor: _with_alpha("sub"), aten.sub.Scalar: _with_alpha("sub"),
    aten.rsub.Scalar: lambda n: ("sub", n.args[1], n.args[0]),
    aten.pow.Tensor_Scalar: _power, aten.square.default: lambda n: ("mul", n.args[0], n.args[0]),
    aten.rsqrt.default: lambda n: ("div", 1.0, ("sqrt", n.args[0])),
    aten.reciprocal.default: lambda n: ("div", 1.0, n.args[0]),
    aten.relu.default: lambda n: ("max", n.args[0], 0.0),
    aten.clamp.default: _clamp, aten.clamp_min.default: _clamp,
    aten.gelu.default: _gelu, aten._to_copy.default: _cast, aten.clone.default: lambda n: n.args[0],
    aten.zeros.default: lambda n: 0.0, aten.zeros_like.default: lambda n: 0.0, aten.new_zeros.default: lambda n: 0.0,
    aten.ones.default: lambda n: 1.0, aten.ones_like.default: lambda n: 1.0, aten.new_ones.default: lambda n: 1.0,
    aten.full.default: _fill(1), aten.full_like.default: _fill(1),
    aten.where.self: _plain("where"), aten.where.ScalarOther: _plain("where"), aten.where.ScalarSelf: _plain("where"),
    aten.where.Scalar: _plain("where"),
    aten.maximum.default: _plain("max"), aten.minimum.default: _plain("min"),
    aten.logical_and.default: _plain("and"), aten.logical_or.default: _plain("or"),
    aten.logical_not.default: _plain("not"), aten.bitwise_not.default: _plain("not"),
}  # fmt: skip
for _name in ("mul", "div", "gt", "ge", "lt", "le", "eq", "ne"):
    for _overload in ("Tensor", "Scalar"):
        _RULES[getattr(getattr(aten, _name), _overload)] = _plain(_name)
for _name in ("neg", "abs", "exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "erf"):
    _RULES[getattr(aten, _name).default] = _plain(_name)
