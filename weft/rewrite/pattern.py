"""Expressions with holes, and matching them on nodes.

A hole stands for any value of its type; the same hole twice must be the same node. An attribute may be a hole too.
Writing ordinary op calls on holes gives an expression, so a rule reads as two lines of weft.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import RuleError
from weft.core.node import Attrs, Node, Op, Symbol, Type, apply

Bindings = dict[str, Any]


class Expr(Symbol):
    """A hole or an op applied to expressions and numbers."""

    def symbol_apply(self, op: Op, args: tuple[Any, ...], attrs: Attrs) -> Call:
        return Call(op, args, tuple(sorted((attrs if _has_holes(attrs) else op.normal(attrs)).items())))

    def _binary(self, name: str, a: Any, b: Any) -> Call:
        from weft.core.node import op_named

        return self.symbol_apply(op_named(name), (a, b), {})

    def __add__(self, other: Any) -> Call:
        return self._binary("add", self, other)

    def __radd__(self, other: Any) -> Call:
        return self._binary("add", other, self)

    def __sub__(self, other: Any) -> Call:
        return self._binary("sub", self, other)

    def __rsub__(self, other: Any) -> Call:
        return self._binary("sub", other, self)

    def __mul__(self, other: Any) -> Call:
        return self._binary("mul", self, other)

    def __rmul__(self, other: Any) -> Call:
        return self._binary("mul", other, self)

    def __truediv__(self, other: Any) -> Call:
        return self._binary("div", self, other)

    def __matmul__(self, other: Any) -> Call:
        return self._binary("matmul", self, other)

    def __neg__(self) -> Call:
        from weft.core.node import op_named

        return self.symbol_apply(op_named("neg"), (self,), {})

    def __iter__(self) -> Iterator[Call]:
        raise RuleError("an expression of several values is not unpacked in a rule", needed="item(x, index=k)", found=str(self))


@dataclass(frozen=True)
class Hole(Expr):
    """Any value, or any value of one type."""

    name: str
    type: Type | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class AttrHole:
    """Any value of an attribute."""

    name: str

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__


@dataclass(frozen=True)
class Call(Expr):
    """An op applied to expressions."""

    op: Op
    args: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        parts = [str(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.attrs if k not in ("mesh", "layout")]
        return f"{self.op.name}({', '.join(parts)})"


@dataclass(frozen=True)
class Star:
    """An operand that stands for as many as a list has members."""

    expr: Any

    def __str__(self) -> str:
        return f"*{self.expr}"


def _has_holes(attrs: Mapping[str, Any]) -> bool:
    return any(isinstance(v, AttrHole) for v in attrs.values())


def match(expr: Any, node: Node, bound: Bindings) -> Bindings | None:
    """The bindings, written into `bound`, under which the expression is the node; None, and `bound` is spoilt, where it is not."""
    if isinstance(expr, Hole):
        if expr.type is not None and (len(node.types) != 1 or node.type != expr.type):
            return None
        return _bind(bound, expr.name, node)
    if isinstance(expr, Call):
        return _match_call(expr, node, bound)
    literal = node.op.is_number and node.attr("value") == expr
    return bound if literal else None


def _match_call(expr: Call, node: Node, bound: Bindings) -> Bindings | None:
    if node.op is not expr.op or len(node.args) != len(expr.args):
        return None
    got = dict(node.attrs)
    for key, want in expr.attrs:
        if isinstance(want, AttrHole):
            if _bind(bound, want.name, got.pop(key, None)) is None:
                return None
        elif got.pop(key, None) != want:
            return None
    if got or any(match(sub, arg, bound) is None for sub, arg in zip(expr.args, node.args, strict=True)):
        return None
    return bound


def _bind(bound: Bindings, name: str, value: Any) -> Bindings | None:
    if name in bound:
        same = bound[name] is value if isinstance(value, Node) else bound[name] == value
        return bound if same else None
    bound[name] = value
    return bound


def build(expr: Any, bound: Mapping[str, Any], made: dict[int, Any] | None = None) -> Any:
    """The node an expression is under bindings; making it checks its types. `made` are calls that several expressions share, by identity."""
    made = {} if made is None else made
    if isinstance(expr, Hole):
        if expr.name not in bound:
            raise RuleError(f"hole {expr.name} is not bound", needed="every hole of the right side to stand on the left", found=expr.name)
        return bound[expr.name]
    if isinstance(expr, Call) and id(expr) not in made:
        attrs = {k: bound[v.name] if isinstance(v, AttrHole) else v for k, v in expr.attrs}
        args = tuple(build(a, bound, made) for a in expr.args)
        made[id(expr)] = apply(expr.op, args, with_rest({k: v for k, v in attrs.items() if v is not None}, args))
    return made[id(expr)] if isinstance(expr, Call) else expr


def with_rest(attrs: dict[str, Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Attributes with a -1 in a shape made the size that is left."""
    shape = attrs.get("shape")
    if not isinstance(shape, tuple) or -1 not in shape:
        return attrs
    left = math.prod(args[0].shape) // max(1, math.prod(n for n in shape if n != -1))
    return {**attrs, "shape": tuple(left if n == -1 else n for n in shape)}


def holes_of(*exprs: Any) -> dict[str, Hole]:
    """Every hole of some expressions, in order of appearance."""
    out: dict[str, Hole] = {}
    seen: set[int] = set()
    stack = list(reversed(exprs))
    while stack:
        expr = stack.pop()
        if isinstance(expr, Hole):
            out.setdefault(expr.name, expr)
        elif isinstance(expr, Call) and id(expr) not in seen:
            seen.add(id(expr))
            stack += reversed(expr.args)
        elif isinstance(expr, Star):
            stack.append(expr.expr)
    return out


def calls_of(expr: Any) -> Iterator[Call]:
    if isinstance(expr, Star):
        yield from calls_of(expr.expr)
    if isinstance(expr, Call):
        yield expr
        for a in expr.args:
            yield from calls_of(a)
