"""From an equal pair to rules that say more: inputs, axes, dims and ops become holes, ops under the weakest condition."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from weft.core.node import OPS
from weft.ops.registry import Kind, arg_sets
from weft.rewrite.pattern import AttrHole, Call, Hole, calls_of, holes_of
from weft.rewrite.schema import Condition, Form, OpHole, Schema, erased

NAMES = "xyzwuv"
LETTERS = "fgh"


def candidates(left: Any, right: Any) -> Iterator[Schema]:
    """Schemas the pair is an instance of, the most general first; the last is the pair with its inputs as holes."""
    left, right = _in_order(left, right)
    for distinct in _distinguish_inputs(left, right):
        yield from _over_ops(*_in_order(*distinct))
    yield from _over_ops(left, right)


def _over_ops(left: Any, right: Any) -> Iterator[Schema]:
    if erased(left) == erased(right):
        left, right = _any_place(left, right)
        yield _schema(*_any_op(left, right))
        yield _schema(left, right)
        return
    left, right = _any_axis(left, right)
    for form in _shared(left, right):
        for condition in _conditions(form):
            yield _schema(_abstract(left, form, "f"), _abstract(right, form, "f"), condition)
    yield _schema(left, right)


def _distinguish_inputs(left: Any, right: Any) -> Iterator[tuple[Any, Any]]:
    """An input used as often on both sides may be several: every way to say which use is which."""
    for hole in holes_of(left):
        uses = [_uses(e, hole) for e in (left, right)]
        if 1 < uses[0] == uses[1] < 4:
            names = [f"{hole}{i}" for i in range(uses[0])]
            for order in itertools.permutations(names):
                yield _replaced(left, hole, iter(names)), _replaced(right, hole, iter(order))


def _uses(expr: Any, hole: str) -> int:
    return int(expr.name == hole) if isinstance(expr, Hole) else sum(_uses(a, hole) for a in expr.args) if isinstance(expr, Call) else 0


def _replaced(expr: Any, hole: str, names: Iterator[str]) -> Any:
    if isinstance(expr, Hole):
        return Hole(next(names)) if expr.name == hole else expr
    return Call(expr.op, tuple(_replaced(a, hole, names) for a in expr.args), expr.attrs) if isinstance(expr, Call) else expr


def _schema(left: Any, right: Any, conditions: tuple[Condition, ...] = ()) -> Schema:
    if any(c.kind == "linear" for c in conditions):
        conditions = (*conditions, *_of_one_shape(left, right))
    return Schema("found", (left,), (right,), {}, conditions)


def _of_one_shape(*exprs: Any) -> dict[Condition, None]:
    """Values that are added, or the like, before or after an op that is linear: a stretched one would count too often."""
    calls = (c for e in exprs for c in calls_of(e) if not isinstance(c.op, OpHole) and c.op.kind is Kind.POINTWISE and len(c.args) == 2)
    pairs = ((a, b) for c in calls for a, b in _same_sides(*c.args))
    return dict.fromkeys(Condition("like", (a.name, b.name)) for a, b in pairs if a != b)


def _same_sides(a: Any, b: Any) -> list[tuple[Hole, Hole]]:
    return [(a, b)] if isinstance(a, Hole) and isinstance(b, Hole) else []


def _in_order(left: Any, right: Any) -> tuple[Any, Any]:
    """Holes named in order of appearance."""
    names = dict(zip(dict.fromkeys([*holes_of(left), *holes_of(right)]), NAMES, strict=False))
    return renamed(left, names), renamed(right, names)


def renamed(expr: Any, names: dict[str, str]) -> Any:
    if isinstance(expr, Hole):
        return Hole(names[expr.name])
    return Call(expr.op, tuple(renamed(a, names) for a in expr.args), expr.attrs) if isinstance(expr, Call) else expr


def _any_axis(left: Any, right: Any) -> tuple[Any, Any]:
    axes = dict.fromkeys(v for e in (left, right) for c in calls_of(e) for k, v in c.attrs if k == "axis")
    names = dict(zip(axes, "ab", strict=False))
    return _attrs(left, lambda k, v: AttrHole(names[v]) if k == "axis" else v), _attrs(
        right, lambda k, v: AttrHole(names[v]) if k == "axis" else v
    )


def _any_place(left: Any, right: Any) -> tuple[Any, Any]:
    """Axes as holes; every dim and root of a collective a hole of its own, since types say which fit."""
    fresh = (AttrHole(f"d{i}") for i in itertools.count(1))
    left, right = _any_axis(left, right)
    return tuple(_attrs(e, lambda k, v: next(fresh) if k in ("dim", "root", "to") else v, comm_only=True) for e in (left, right))


def _attrs(expr: Any, change: Any, comm_only: bool = False) -> Any:
    if not isinstance(expr, Call):
        return expr
    args = tuple(_attrs(a, change, comm_only) for a in expr.args)
    mine = not comm_only or expr.op.kind is Kind.COMM
    return Call(expr.op, args, tuple((k, change(k, v)) for k, v in expr.attrs) if mine else expr.attrs)


def _any_op(left: Any, right: Any) -> tuple[Any, Any]:
    """Every op that computes as an op hole: what it may be is a matter of types."""
    for form, letter in zip(_shared(left, right), LETTERS, strict=False):
        left, right = _abstract(left, form, letter), _abstract(right, form, letter)
    return left, right


def _shared(left: Any, right: Any) -> list[Form]:
    """Ops that compute and stand on both sides."""
    found = [[_form(c) for c in calls_of(e) if c.op.name in OPS and c.op.kind is not Kind.COMM] for e in (left, right)]
    return [f for f in dict.fromkeys(found[0]) if f in found[1]]


def _form(call: Call) -> Form:
    operands = [a for a in call.args if isinstance(a, Hole | Call)]
    return Form(call.op, call.attrs, len(operands), tuple(call.args[len(operands) :]))


def _abstract(expr: Any, form: Form, letter: str) -> Any:
    if not isinstance(expr, Call):
        return expr
    args = tuple(_abstract(a, form, letter) for a in expr.args)
    if not isinstance(expr.op, OpHole) and _form(expr) == form:
        return Call(OpHole(letter), args[: form.arity])  # type: ignore[arg-type]
    return Call(expr.op, args, expr.attrs)


def _conditions(form: Form) -> Iterator[tuple[Condition, ...]]:
    """What may be asked of an op that takes this one's place, the least first."""
    yield ()
    for s in arg_sets(form.op.linear, form.arity + len(form.fixed)):
        if max(s) < form.arity:
            yield (Condition("linear", ("f",), tuple(sorted(s))),)
    if form.op.kind is Kind.POINTWISE:
        yield (Condition("pointwise", ("f",)),)
    if form.arity == 1:
        yield from ((Condition("keeps", ("f",), (d, 0, e)),) for d in range(2) for e in range(2))
