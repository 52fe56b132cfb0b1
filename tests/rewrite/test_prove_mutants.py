"""A hundred rules made false on purpose, by changing a dim, a condition, a layout or the order of operands: none passes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import weft.ops  # noqa: F401
from weft.core.node import OPS
from weft.rewrite import algebra, parallel
from weft.rewrite.generic import unrolled
from weft.rewrite.pattern import Call, Hole
from weft.rewrite.prove.ladder import Effort, prove, without
from weft.rewrite.rulefile import show
from weft.rewrite.schema import OpHole, Schema
from weft.rewrite.second.z3_check import check_by_z3

NOT_COMMUTING = {"matmul", "sub", "concat", "div", "einsum"}
OTHER_OP = {"add": "sub", "mul": "add", "neg": "relu", "matmul": "add", "sub": "add"}
OTHER_LAYOUT = {
    "all_to_all": "reduce_scatter", "all_gather": "all_reduce", "all_reduce": "all_gather", "reduce_scatter": "slice",
    "slice": "reduce_scatter", "broadcast": "all_gather", "reduce": "all_reduce",
}  # fmt: skip


def mutants(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for k, c in enumerate(schema.conditions):
        yield f"without {c}", without(schema, k)
    for changed, side in _changed(schema.right[0]):
        yield f"{changed}: {side}", replace(schema, right=(side, *schema.right[1:]), name=f"{schema.name}_m")


def _changed(expr: Any) -> Iterator[tuple[str, Any]]:
    """The expression with one thing changed."""
    if not isinstance(expr, Call):
        return
    for k, a in enumerate(expr.args):
        yield from ((what, Call(expr.op, (*expr.args[:k], b, *expr.args[k + 1 :]), expr.attrs)) for what, b in _changed(a))
    if isinstance(expr.op, OpHole):
        return
    name = expr.op.name
    if name in NOT_COMMUTING and len(expr.args) == 2:
        yield "operand order", Call(expr.op, (expr.args[1], expr.args[0]), expr.attrs)
    if name in OTHER_OP and not any(isinstance(a, float) for a in expr.args):
        yield "op", Call(OPS[OTHER_OP[name]], expr.args, expr.attrs)
    if name in OTHER_LAYOUT:
        keys = {"axis", "dim"} if OTHER_LAYOUT[name] in ("slice", "reduce_scatter") else {"axis"}
        yield "layout", Call(OPS[OTHER_LAYOUT[name]], expr.args, tuple((k, v) for k, v in expr.attrs if k in keys))
    for k, a in enumerate(expr.args):
        if isinstance(a, float):
            yield "number", Call(expr.op, (*expr.args[:k], a + 1, *expr.args[k + 1 :]), expr.attrs)
        for b in expr.args[:k]:
            if isinstance(a, Hole) and isinstance(b, Hole) and a != b and name in ("add", "sub", "mul"):
                yield "hole", Call(expr.op, (*expr.args[:k], b, *expr.args[k + 1 :]), expr.attrs)
    for j, (key, v) in enumerate(expr.attrs):
        if key == "dim" and isinstance(v, int) and name not in ("slice", "reduce_scatter", "all_to_all"):
            yield "dim", Call(expr.op, expr.args, (*expr.attrs[:j], (key, 1 - v), *expr.attrs[j + 1 :]))


def _still_true(name: str, what: str) -> bool:
    """A gather for a sum, or a sum for a gather, at the end of an op that may be any op: both are rules, types tell them apart."""
    either = {"sink_gather", "sink_gather_summing", "data_parallel", "reduction_parallel_one"}
    return name in either and what.startswith(("layout: all_reduce(f(", "layout: all_gather(f(")) and "reduce_scatter" not in what


def _chosen() -> list[tuple[str, Schema]]:
    """A hundred, spread over the rules; unary rules first, since their layouts are fewer."""
    rules = [unrolled(r, 2) for r in (*algebra.rules(), *parallel.rules()) if max(r.op_holes.values(), default=0) < 2]
    per_rule = [[(f"{r.name}, {what}", m) for what, m in mutants(r) if not _still_true(r.name, what)] for r in rules]
    return [x for row in itertools.zip_longest(*per_rule) for x in row if x is not None][:100]


CHOSEN = _chosen()


def test_there_are_a_hundred() -> None:
    assert len(CHOSEN) == 100
    assert len({show(m) for _, m in CHOSEN}) == 100


@pytest.mark.parametrize("part", range(10))
def test_no_mutant_passes(part: int) -> None:
    for name, mutant in CHOSEN[part * 10 : part * 10 + 10]:
        found = prove(mutant, Effort(per_mesh=2, symbolic=1))
        assert found.status in ("refuted", "ill-typed"), f"{name}\n{show(mutant)}\n{found.status}"
        assert "left" in found.counterexample, f"{name}\n{found.counterexample}"


@pytest.mark.parametrize("part", range(5))
def test_no_mutant_passes_the_second_judge(part: int) -> None:
    pytest.importorskip("z3")
    for name, mutant in CHOSEN[part * 20 : part * 20 + 20]:
        assert check_by_z3(mutant).status in ("refuted", "no case"), f"{name}\n{show(mutant)}"
