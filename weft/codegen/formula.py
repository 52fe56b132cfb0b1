"""What pointwise ops compute of one element, in the language of fused groups."""

from __future__ import annotations

import math
from collections.abc import Callable

from weft.codegen import expr
from weft.codegen.expr import Value
from weft.codegen.rows import NotFusable
from weft.core.node import DTYPE_NAMES, Kind, Node


def formula(n: Node, value: Callable[[Node], Value]) -> Value:
    """One element of a pointwise op's result, made of its operands' elements."""
    args = [value(a) for a in n.args]
    name = n.op.name
    if name in COMPOUND:
        return COMPOUND[name](n, *args)
    if name == "cast":
        return _cast(n, args[0])
    if name == "div" and args[1].level < args[0].level:
        return args[0] * (1.0 / args[1])  # one division for the row, none per element
    if n.op.code is not None or (name in expr.ARITY and name != "reciprocal"):
        return expr.apply(name, *args)
    if n.op.written is not None and n.op.kind is Kind.POINTWISE:
        return _written(n, value)
    known = expr.arities().keys() - {"reciprocal"}
    raise NotFusable(f"{name} has no per-element formula", needed=f"one of {', '.join(sorted(known | set(COMPOUND)))}", found=name)


def _written(n: Node, value: Callable[[Node], Value]) -> Value:
    """By the ops that its entry writes it in."""

    def inner(x: Node) -> Value:
        if x in n.args:
            return value(x)
        return expr.const(x.attr("value")) if x.op.is_number else formula(x, inner)

    return inner(n.op.written(*n.args, **dict(n.attrs)))


def _cast(n: Node, x: Value) -> Value:
    dtype = DTYPE_NAMES[n.dtype]
    if dtype == "bool":
        return expr.apply("ne", x, 0.0)
    if dtype not in expr.BYTES:
        raise NotFusable("a cast to integers", needed=f"{', '.join(expr.BYTES)} or bool", found=dtype)
    return expr.cast(x, dtype)


def _clamp(n: Node, x: Value) -> Value:
    for bound, fn in ((n.attr("lo"), "maximum"), (n.attr("hi"), "minimum")):
        x = x if bound is None else expr.apply(fn, x, bound)
    return x


def _power(n: Node, x: Value, e: Value) -> Value:
    """Small integer powers as multiplications, which take negative numbers everywhere."""
    if e.fn == "const" and e.const in (1.0, 2.0, 3.0, 4.0):
        square = x * x
        return {1.0: x, 2.0: square, 3.0: square * x, 4.0: square * square}[e.const]
    known = {0.5: lambda: expr.sqrt(x), -0.5: lambda: 1.0 / expr.sqrt(x), -1.0: lambda: 1.0 / x}
    return known[e.const]() if e.fn == "const" and e.const in known else expr.apply("pow", x, e)


def _gelu(n: Node, x: Value) -> Value:
    if n.attr("tanh"):
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + expr.apply("tanh", inner))
    return 0.5 * x * (1.0 + expr.apply("erf", x * math.sqrt(0.5)))


COMPOUND: dict[str, Callable[..., Value]] = {
    "relu": lambda n, x: expr.apply("maximum", x, 0.0),
    "relu_backward": lambda n, ct, y: expr.apply("where", expr.apply("le", y, 0.0), 0.0, ct),
    "keep_where": lambda n, x, here: expr.apply("where", here, x, 0.0),
    "square": lambda n, x: x * x,
    "pow": _power,
    "silu": lambda n, x: x * expr.apply("sigmoid", x),
    "gelu": _gelu,
    "clamp": _clamp,
    "isfinite": lambda n, x: expr.apply("eq", x - x, 0.0),
    "logical_and": lambda n, a, b: expr.apply("where", a, b, 0.0),
    "logical_or": lambda n, a, b: expr.apply("where", a, 1.0, b),
    "logical_not": lambda n, a: expr.apply("where", a, 0.0, 1.0),
}
