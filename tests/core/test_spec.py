"""Every rule of what a valid program is has a program that breaks it, and says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.core import spec
from weft.core.errors import InvalidProgram
from weft.core.layout import Mesh, P, S
from weft.core.node import Node
from weft.core.program import Group, Program
from weft.frontend.trace import f64, trace
from weft.ops import pointwise
from weft.ops.comm import all_reduce

MESH = Mesh(a=2)
BASE = trace(lambda x, y: {"u": pointwise.exp(x) * y, "v": x + y}, MESH, x=f64(4), y=f64(4), name="base")
X, Y = BASE.inputs
EXP, MUL, ADD = BASE.find("exp"), BASE.find("mul"), BASE.find("add")
OTHER = trace(lambda x: pointwise.exp(x), Mesh(b=2), x=f64(4), name="other")


def chain() -> Program:
    return trace(lambda x: pointwise.exp(pointwise.tanh(pointwise.exp(x))), MESH, x=f64(4), name="chain")


def _around() -> Program:
    """A group of the two ends, around a node that stays outside."""
    p = chain()
    return replace(p, groups=(Group("fuse", "ends", tuple(p.find_all("exp"))),))


def _wrong_type() -> Program:
    wrong = Node(EXP.op, EXP.args, EXP.attrs, (EXP.type.with_layout(EXP.layout.shard("a", 0)),))
    return replace(BASE, outputs=(("u", wrong),))


def _pair() -> Node:
    return trace(lambda x, y: list(all_reduce(x, y, axis="a")), MESH, x=f64(4, a=P()), y=f64(4, a=P()), name="p").nodes[2]


BREAKS: list[tuple[str, Any, str]] = [
    ("_names_are_unique", lambda: replace(BASE, outputs=(("u", MUL), ("u", ADD))), "the name 'u' stands twice"),
    ("_names_are_unique", lambda: replace(BASE, inputs=(X, Y, X)), "the name 'x' stands twice"),
    ("_names_can_be_read_back", lambda: replace(BASE, outputs=(("u v", MUL),)), "the name 'u v' has more than letters"),
    ("_names_can_be_read_back", lambda: replace(BASE, name="a b"), "the name 'a b' has more than letters"),
    ("_inputs_are_declared", lambda: replace(BASE, inputs=(X,)), "input 'y' is read but not declared"),
    ("_one_mesh", lambda: replace(OTHER, mesh=MESH), r"input is on Mesh\(b=2\), the program on Mesh\(a=2\)"),
    ("_outputs_are_tensors", lambda: replace(BASE, inputs=_pair().args, outputs=(("u", _pair()),)), "output 'u' is a tuple"),
    ("_state_fits", lambda: replace(BASE, state=(("w", "x"),)), "state x=w names no output or no input"),
    ("_state_fits", lambda: replace(BASE, state=(("u", "z"),)), "state z=u names no output or no input"),
    (
        "_state_fits",
        lambda: replace(trace(lambda x, y: {"y": pointwise.exp(x)}, MESH, x=f64(4, a=S(0)), y=f64(4), name="s"), state=(("y", "y"),)),
        r"state y=y would change its type: f64\[4\] a:R becomes f64\[4\] a:S\(0\)",
    ),
    ("_types_follow", _wrong_type, "the type of exp does not follow from its operands"),
    ("groups_are_disjoint", lambda: replace(BASE, groups=(Group("fuse", "f", (EXP,)), Group("fuse", "g", (EXP,)))), "a node is in two fuse"),
    ("groups_are_disjoint", lambda: replace(BASE, groups=(Group("fuse", "f", (OTHER.find("exp"),)),)), "a group holds exp, which is not in"),
    ("_groups_are_closed", _around, "group ends needs tanh outside it, which needs the group"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "program", "message"), BREAKS, ids=[f"{rule} {k}" for k, (rule, _, _) in enumerate(BREAKS)])
def test_a_program_that_breaks_the_rule(rule: str, program: Any, message: str) -> None:
    p = program()
    words = rule.strip("_").replace("_", " ")
    with pytest.raises(InvalidProgram, match=rf"program \w+.* is not valid\n\n  needed  {words}\n  found   {message}"):
        spec.validate(p)
    alone = [r.__name__ for r in spec.RULES if r(p)]
    assert alone[0] == rule


def test_every_rule_is_broken_by_some_program() -> None:
    assert {r.__name__ for r in spec.RULES} == {rule for rule, _, _ in BREAKS}


def test_a_valid_program_is_given_back() -> None:
    assert spec.validate(BASE) is BASE
    whole = chain()
    grouped = replace(whole, groups=(Group("fuse", "all", tuple(n for n in whole.nodes if n.op.name != "input")),))
    assert spec.validate(grouped) is grouped


def test_a_node_may_be_in_a_fuse_and_an_overlap_group() -> None:
    p = replace(BASE, groups=(Group("fuse", "f", (EXP,)), Group("overlap", "o", (EXP, MUL))))
    assert spec.validate(p) is p
