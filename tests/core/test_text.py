"""Programs print as text and parse back to the very same nodes; text that is no program is refused with its line."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops import harness
from tests.ops.test_every_op import CASES
from weft.core.errors import InvalidProgram, ParseError
from weft.core.layout import Layout, Mesh, P
from weft.core.node import DTYPES, Type, constant
from weft.core.program import Group, Program, new_program
from weft.core.text import excerpt, parse, read_type
from weft.frontend.trace import f32, f64, i64, input_node, trace
from weft.ops import comm, pointwise
from weft.testing.layouts import layouts

MESH = Mesh(dp=2, tp=2)
TWO = Mesh(a=2, b=2)


def same(p: Program) -> None:
    """The text denotes the program: same text, and, since nodes are interned, the same nodes."""
    back = parse(p.text)
    assert back.text == p.text
    assert [n for _, n in back.outputs] == [n for _, n in p.outputs]
    assert (back.inputs, back.state, back.groups, back.mesh) == (p.inputs, p.state, p.groups, p.mesh)


@pytest.mark.parametrize("c", CASES, ids=str)
def test_every_op_prints_and_parses_back(c: harness.Case) -> None:
    for program in harness.one_axis(c, harness.ONE_AXIS[0])[0][:12]:
        same(program)
    for program in harness.two_axes(c, 3):
        same(program)


@given(st.sampled_from([x for shape in [(4,), (6, 4), (2, 1, 3), ()] for x in layouts(TWO, shape)]), st.sampled_from(list(DTYPES.values())))
def test_every_type_prints_and_parses_back(layout: Layout, dtype: torch.dtype) -> None:
    type_ = Type(dtype, layout)
    assert read_type(str(type_), TWO) == type_
    x = input_node("x", type_)
    same(new_program("p", TWO, [x], {"x": x}))


def adam(g, p, m, v):  # type: ignore[no-untyped-def]
    g = comm.all_reduce(g, axis="dp")
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + (1 - 0.99) * (g * g)
    return {"p": p - 1e-3 * m / (pointwise.sqrt(v) + 1e-8), "m": m, "v": v}


def test_golden_text() -> None:
    p = trace(adam, MESH, g=f32(8, dp=P()), p=f32(8), m=f32(8), v=f32(8))
    assert p.text == GOLDEN
    same(p)


GOLDEN = """\
program adam(dp=2, tp=2)
  %g = input()                         f32[8] dp:P tp:R
  %p = input()                         f32[8] dp:R tp:R
  %m = input()                         f32[8] dp:R tp:R
  %v = input()                         f32[8] dp:R tp:R
  %0 = mul(0.9, %m)                    f32[8] dp:R tp:R
  %1 = all_reduce(%g, axis='dp')       f32[8] dp:R tp:R
  %2 = mul(0.1, %1)                    f32[8] dp:R tp:R
  %3 = add(%0, %2)                     f32[8] dp:R tp:R
  %4 = mul(0.001, %3)                  f32[8] dp:R tp:R
  %5 = mul(0.99, %v)                   f32[8] dp:R tp:R
  %6 = mul(%1, %1)                     f32[8] dp:R tp:R
  %7 = mul(0.010000000000000009, %6)   f32[8] dp:R tp:R
  %8 = add(%5, %7)                     f32[8] dp:R tp:R
  %9 = sqrt(%8)                        f32[8] dp:R tp:R
  %10 = add(%9, 1e-08)                 f32[8] dp:R tp:R
  %11 = div(%4, %10)                   f32[8] dp:R tp:R
  %12 = sub(%p, %11)                   f32[8] dp:R tp:R
  state p=p, m=m, v=v
  return p=%12, m=%3, v=%8"""


def test_groups_and_state() -> None:
    p = trace(adam, MESH, g=f32(8, dp=P()), p=f32(8), m=f32(8), v=f32(8))
    overlap = Group("overlap", "over", (p.find("all_reduce"),), (("chunks", 4), ("dim", 0)))
    groups = [Group("fuse", "root", tuple(p.between("sqrt", "div"))), overlap]
    grouped = p.with_groups(groups, None, "")
    assert "overlap over(chunks=4, dim=0): %1\n" in grouped.text
    same(grouped)


def test_numbers_that_would_change_their_dtype_are_named() -> None:
    """A bare number takes the dtype of its neighbours, so one of another dtype is written out."""
    p = trace(lambda x, k: pointwise.cast(k * 2, dtype="f64") + x * 2.5, MESH, x=f64(4), k=i64(4), name="mixed")
    assert "mul(%k, 2)" in p.text
    assert "mul(%x, 2.5)" in p.text
    same(p)
    q = trace(lambda x: pointwise.dropout(x, 3, p=0.5, site=0), MESH, x=f64(4), name="seeded")
    assert "const(dtype='i64', value=3)" in q.text
    same(q)


def test_infinity_and_negative_numbers() -> None:
    same(trace(lambda x: pointwise.maximum(x, float("-inf")) * -2.0, MESH, x=f64(4), name="inf"))


def test_a_constant_output() -> None:
    same(trace(lambda x: {"x": x, "c": constant(1.0, torch.float64, MESH)}, MESH, x=f64(4), name="c"))


def test_excerpt_marks_the_node() -> None:
    p = trace(adam, MESH, g=f32(8, dp=P()), p=f32(8), m=f32(8), v=f32(8))
    lines = excerpt(p, p.find("sqrt")).splitlines()
    assert [x for x in lines if x.startswith("  > ")] == [x for x in lines if "sqrt" in x]
    assert 3 <= len(lines) < len(p.nodes)


# -- refusals --------------------------------------------------------------------------------------------------------------------

ONE = "program p(a=2)\n  %x = input()   {}\n  return x=%x"
HEAD = "program p(a=2)\n  %x = input()   f64[4] a:S(0)\n"


def exp(operand: str, placement: str) -> str:
    return f"{HEAD}  %0 = exp({operand})   f64[4] {placement}\n  return y=%0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"this is not a program\n\n  needed  a first line 'program NAME\(axis=size, ...\)'\n  found   ''"),
        ("%x = input()   f64[4]", "this is not a program"),
        (exp("%y", "a:S(0)"), r"line 3 of program p: %y is used before it is made\n\n  needed  one of %x\n  found   %y"),
        (exp("%x", "a:R"), r"line 3 of program p: %0 does not have the type written\n\n  needed  f64\[4\] a:S\(0\)"),
        (HEAD + "  %0 = expp(%x)   f64[4] a:S(0)\n  return y=%0", r"line 3 of program p: no op 'expp'"),
        (HEAD + "  %0 = all_reduce(%x, axis='a')   f64[4] a:R\n  return y=%0", "line 3 of program p: all_reduce along a has nothing"),
        (HEAD + "  hello\n", r"a line that is no node, group, state or return\n\n  needed  '%x = op\(...\)   type'\n  found   hello"),
        (ONE.format("f65[4]"), "line 2 of program p: no dtype 'f65'"),
        (ONE.format("f64 4"), r"not a type\n\n  needed  dtype\[dims\] axis:placement"),
        (ONE.format("f64[4] a:S(1)"), r"line 2 of program p: axis a shards what is not there\n\n  needed  an atom of the 1 dims"),
        (ONE.format("f64[4] a:Q"), r"line 2 of program p: axis a holds nothing known\n\n  needed  R, S\(dim\), .*\n  found   Q"),
        (ONE.format("f64[4] a:P(mean)"), "line 2 of program p: a Partial has no such reduction"),
        (ONE.format("f64[4] a:O(2)"), "line 2 of program p: axis a has no rank 2"),
        (ONE.format("f64[4] b:S(0)"), "line 2 of program p: the mesh has no axis 'b'"),
        (HEAD + "  return y=%x, z", "line 3 of program p"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(text)


def test_a_program_without_outputs() -> None:
    with pytest.raises(InvalidProgram, match="program p has no outputs"):
        parse(HEAD)
