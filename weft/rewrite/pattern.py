"""Expressions with holes, and matching them on nodes.

A hole stands for any value of its type; the same hole twice must be the same node. An attribute may be a hole too.
Writing ordinary op calls on holes gives an expression, so a rule reads as two lines of weft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import RuleError
from weft.core.node import Attrs, Node, Op, Symbol, Type, apply

Bindings = dict[str, Any]


class Expr(Symbol):
    """A hole or an op applied to expressions and numbers."""

    def symbol_apply(self, op: Op, args: tuple[Any, ...], attrs: Attrs) -> Call:
        normal = op.facets.get("normal", dict)
        return Call(op, args, tuple(sorted((attrs if _has_holes(attrs) else normal(attrs)).items())))

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


def _has_holes(attrs: Mapping[str, Any]) -> bool:
    return any(isinstance(v, AttrHole) for v in attrs.values())


def match(expr: Any, node: Node, bound: Bindings) -> Bindings | None:
    """The bindings under which the expression is the node, or None."""
    if isinstance(expr, Hole):
        if expr.type is not None and (len(node.types) != 1 or node.type != expr.type):
            return None
        return _bind(bound, expr.name, node)
    if isinstance(expr, Call):
        return _match_call(expr, node, bound)
    literal = node.op.name == "const" and node.attr("value") == expr
    return bound if literal else None


def _match_call(expr: Call, node: Node, bound: Bindings) -> Bindings | None:
    if node.op is not expr.op or len(node.args) != len(expr.args):
        return None
    got = dict(node.attrs)
    for key, want in expr.attrs:
        if isinstance(want, AttrHole):
            after = _bind(bound, want.name, got.pop(key, None))
            if after is None:
                return None
            bound = after
        elif got.pop(key, None) != want:
            return None
    if got:
        return None
    for sub, arg in zip(expr.args, node.args, strict=True):
        after = match(sub, arg, bound)
        if after is None:
            return None
        bound = after
    return bound


def _bind(bound: Bindings, name: str, value: Any) -> Bindings | None:
    if name in bound:
        same = bound[name] is value if isinstance(value, Node) else bound[name] == value
        return bound if same else None
    return {**bound, name: value}


def build(expr: Any, bound: Mapping[str, Any]) -> Any:
    """The node an expression is under bindings; making it checks its types."""
    if isinstance(expr, Hole):
        if expr.name not in bound:
            raise RuleError(f"hole {expr.name} is not bound", needed="every hole of the right side to stand on the left", found=expr.name)
        return bound[expr.name]
    if isinstance(expr, Call):
        attrs = {k: bound[v.name] if isinstance(v, AttrHole) else v for k, v in expr.attrs}
        return apply(expr.op, tuple(build(a, bound) for a in expr.args), {k: v for k, v in attrs.items() if v is not None})
    return expr


def holes_of(expr: Any) -> dict[str, Hole]:
    """Every hole of an expression, in order of appearance."""
    if isinstance(expr, Hole):
        return {expr.name: expr}
    out: dict[str, Hole] = {}
    for a in expr.args if isinstance(expr, Call) else ():
        out |= {k: h for k, h in holes_of(a).items() if k not in out}
    return out


def calls_of(expr: Any) -> Iterator[Call]:
    if isinstance(expr, Call):
        yield expr
        for a in expr.args:
            yield from calls_of(a)
