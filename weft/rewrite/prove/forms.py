"""Ops that fill op holes, and unknown ops of which only a condition is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.core.node import OPS, Attrs, Node, Op, op_named
from weft.ops.registry import Equation, Kind, Types, define
from weft.rewrite.schema import Condition, Form

_GIVEN: tuple[tuple[str, int, dict[str, Any], tuple[float, ...]], ...] = (
    ("neg", 1, {}, ()), ("mul", 1, {}, (2.0,)), ("relu", 1, {}, ()), ("exp", 1, {}, ()), ("permute", 1, {"order": (1, 0)}, ()),
    ("sum", 1, {"dims": (0,)}, ()), ("sum", 1, {"dims": (1,)}, ()), ("softmax", 1, {"dim": 1}, ()), ("add", 1, {}, (1.0,)),
    ("add", 2, {}, ()), ("sub", 2, {}, ()), ("mul", 2, {}, ()), ("div", 2, {}, ()), ("matmul", 2, {}, ()), ("concat", 2, {"dim": 0}, ()),
    ("concat", 2, {"dim": 1}, ()), ("take", 2, {"dim": 0}, ()), ("maximum", 2, {}, ()),
)  # fmt: skip


def usual_forms() -> list[Form]:
    """Ops of every kind: elementwise, linear or not, views, reductions, matmuls, lookups, and one that needs a full dim."""
    return [form(name, arity, attrs, fixed) for name, arity, attrs, fixed in _GIVEN]


def form(name: str, arity: int = 1, attrs: Attrs | None = None, fixed: tuple[float, ...] = ()) -> Form:
    op = op_named(name)
    return Form(op, tuple(sorted(op.normal(dict(attrs or {})).items())), arity, fixed)


def mixed(given: Form) -> Form:
    """An op of the same shapes that mixes all its elements and is not linear: what a condition keeps out, where no usual op does."""

    def equation(types: Types, attrs: Attrs) -> Equation:
        eq: Equation = given.op.equation(types, attrs)
        return replace(eq, unsharded=frozenset(x for labels in (*eq.ins, *eq.outs) for x in labels))

    def run(*xs: torch.Tensor, **attrs: Any) -> torch.Tensor:
        y = given.op.run(*xs, **attrs)
        return torch.cumsum(y.reshape(-1) ** 2, 0).reshape(y.shape)

    op = define(f"mixed_{given.op.name}", kind=Kind.COMPOSITE, equation=equation, run=run)
    return Form(OPS.pop(op.name), given.attrs, given.arity, given.fixed)


_numbers = itertools.count()


def unknown_form(name: str, arity: int, conditions: Sequence[Condition], dims: dict[str, int]) -> Form:
    """An op that has the conditions and nothing else: whatever holds of it holds of every op that has them."""
    mine = [c for c in conditions if c.who[0] == name]
    linear = tuple(frozenset(c.args) for c in mine if c.kind == "linear")
    keeps = [tuple(dims.get(v, v) if isinstance(v, str) else v for v in c.args) for c in mine if c.kind == "keeps"]
    pointwise = any(c.kind == "pointwise" for c in mine)
    op = _unknown(f"{name}?{next(_numbers)}", arity, linear, keeps, pointwise)
    return Form(op, (), arity)


def _unknown(name: str, arity: int, linear: tuple[frozenset[int], ...], keeps: list[tuple[Any, ...]], pointwise: bool) -> Op:
    def equation(types: Types, attrs: Attrs) -> Equation:
        return _unknown_equation([len(t.shape) for t in types], keeps, pointwise)

    op = define(name, kind=Kind.COMPOSITE, equation=equation, run=_never, linear=linear, vjp=_unknown_vjp(name, linear, keeps, pointwise))
    return OPS.pop(op.name)


def _unknown_equation(ranks: Sequence[int], keeps: list[tuple[Any, ...]], pointwise: bool) -> Equation:
    if pointwise:
        labels = tuple(f"d{max(ranks) - i}" for i in range(max(ranks)))
        return Equation(tuple(labels[len(labels) - r :] for r in ranks), (labels,))
    ins = [[f"a{k}_{d}" for d in range(r)] for k, r in enumerate(ranks)]
    out = ["o0", "o1"]
    for d, k, e in keeps:
        ins[k][d] = out[e] = f"kept{d}"
    full = frozenset(x for labels in (*ins, out) for x in labels if not x.startswith("kept"))
    return Equation(tuple(map(tuple, ins)), (tuple(out),), unsharded=full, sizes={"o0": 2, "o1": 2})


def _unknown_vjp(name: str, linear: tuple[frozenset[int], ...], keeps: list[tuple[Any, ...]], pointwise: bool) -> Any:
    """For each operand an unknown op, linear in the cotangent, of the operands the slope may depend on."""

    def vjp(node: Node, ct: Node) -> Any:
        return tuple(_slope(node, ct, k) for k in range(len(node.args)))

    def _slope(node: Node, ct: Node, k: int) -> Any:
        fixed = next((s for s in linear if k in s), frozenset())
        others = [j for j in range(len(node.args)) if j not in fixed]
        there = _unknown_equation([a.ndim for a in node.args], keeps, pointwise)
        sizes = dict(zip(there.ins[k], node.args[k].shape, strict=True))
        ins = (there.outs[0], *(there.ins[j] for j in others))

        def equation(types: Types, attrs: Attrs) -> Equation:
            return Equation(ins, (there.ins[k],), unsharded=there.unsharded, sizes=sizes)

        also = [frozenset({1 + i}) for i, j in enumerate(others) if j != k and frozenset({j}) in linear]
        back = define(f"{name}~{k}", kind=Kind.COMPOSITE, equation=equation, run=_never, linear=(frozenset({0}), *also))
        OPS.pop(back.name, None)
        return back(ct, *(node.args[j] for j in others))

    return vjp


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("an unknown op is never run on numbers")
