"""Rules applied at a place: matched, typed, and refused where they would change a type; what erasing communication leaves."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import InvalidTransform
from weft.core.layout import Mesh, P
from weft.core.program import Program
from weft.frontend.trace import f64, trace
from weft.ops import comm
from weft.ops.pointwise import exp, tanh
from weft.ops.shape import item
from weft.rewrite.engine import apply_rule, erase, erase_nodes, match_rule, rule, same_erased
from weft.rewrite.pattern import AttrHole, Hole
from weft.schedule import fuse, split
from weft.testing.same import assert_same_meaning

MESH = Mesh(a=2)
X, Y = Hole("x"), Hole("y")
SPLIT = rule("split", comm.all_reduce(X, axis="a"), comm.all_gather(comm.reduce_scatter(X, axis="a", dim=0), axis="a"))


def program() -> Program:
    def fn(g: Any, w: Any) -> Any:
        y = comm.all_reduce(g, axis="a")
        return {"y": tanh(y) * w, "z": y}

    return trace(fn, MESH, g=f64(4, 4, a=P()), w=f64(4, 4))


def test_a_rule_reads_as_two_expressions() -> None:
    assert str(SPLIT) == "all_reduce(x, axis='a')  ->  all_gather(reduce_scatter(x, axis='a', dim=0), axis='a')"
    assert list(SPLIT.holes) == ["x"]


def test_a_hole_on_the_right_stands_on_the_left() -> None:
    with pytest.raises(InvalidTransform, match="uses y on the right only"):
        rule("bad", exp(X), exp(Y))


def test_a_rule_applies_to_every_reader() -> None:
    p = program()
    q = apply_rule(p, SPLIT, [p.find("all_reduce")], "split")
    gather = q.find("all_gather")
    assert q.output_names["z"] is gather
    assert q.find("tanh").args == (gather,)
    assert_same_meaning(p, q)


def test_a_rule_elsewhere_is_refused() -> None:
    p = program()
    with pytest.raises(InvalidTransform, match="the rule split does not match here") as e:
        apply_rule(p, SPLIT, [p.find("tanh")], "try it")
    assert "> %" in str(e.value)


def test_a_rule_that_would_change_the_layout_is_refused() -> None:
    p = program()
    half = rule("half", comm.all_reduce(X, axis="a"), comm.reduce_scatter(X, axis="a", dim=0))
    with pytest.raises(InvalidTransform, match="would change the layout") as e:
        apply_rule(p, half, [p.find("all_reduce")], "half")
    assert (e.value.needed, e.value.found) == ("f64[4, 4] a:R", "f64[4, 4] a:S(0)")


def test_a_rule_whose_right_side_does_not_type_is_refused() -> None:
    p = program()
    twice = rule("twice", comm.all_reduce(X, axis="a"), comm.all_reduce(comm.all_reduce(X, axis="a"), axis="a"))
    with pytest.raises(InvalidTransform, match="twice is not valid here: all_reduce along a has nothing to do here"):
        apply_rule(p, twice, [p.find("all_reduce")], "twice")


def test_a_rule_of_several_outputs() -> None:
    p = trace(lambda x, y: {"a": comm.all_reduce(x, axis="a"), "b": comm.all_reduce(y, axis="a")}, MESH, x=f64(2, a=P()), y=f64(3, a=P()))
    both = comm.all_reduce(X, Y, axis="a")
    left = (comm.all_reduce(X, axis="a"), comm.all_reduce(Y, axis="a"))
    q = apply_rule(p, rule("merge", left, (item(both, index=0), item(both, index=1))), p.find_all("all_reduce"), "merge")
    assert len(q.find_all("all_reduce")) == 1
    assert_same_meaning(p, q)


def test_parameters_come_from_the_caller() -> None:
    p = program()
    scatter = comm.reduce_scatter(X, axis=AttrHole("axis"), dim=AttrHole("dim"))
    r = rule("any", comm.all_reduce(X, axis=AttrHole("axis")), comm.all_gather(scatter, axis=AttrHole("axis")))
    q = apply_rule(p, r, [p.find("all_reduce")], "any", params={"dim": 1})
    assert q.find("reduce_scatter").attr("dim") == 1


def test_matching_places_in_order() -> None:
    p = program()
    assert match_rule(SPLIT, [p.find("all_reduce")]) == {"x": p.input_names["g"]}


def test_erasing_leaves_what_one_device_would_run() -> None:
    p = program()
    q = split(p, "all_reduce", dim=0)
    assert same_erased(p, q)
    alone = erase(q)
    assert alone["z"].op.name == "input"  # the sum itself is the value of g
    assert [n.op.name for n in alone["y"].args] == ["tanh", "input"]
    assert erase_nodes(p)[p.find("all_reduce")] is erase_nodes(q)[q.find("reduce_scatter")]


def test_erasing_tells_programs_apart() -> None:
    p, q = trace(lambda x: exp(x), MESH, x=f64(4)), trace(lambda x: tanh(x), MESH, x=f64(4))
    assert not same_erased(p, q)


def test_a_group_is_not_broken() -> None:
    p = program()
    q = fuse(p, ["all_reduce", "tanh"])
    with pytest.raises(InvalidTransform, match="split would break the fuse group k0") as e:
        apply_rule(q, SPLIT, [q.find("all_reduce")], "split")
    assert e.value.found == "all_reduce becomes all_gather"


def test_a_group_elsewhere_is_carried_over() -> None:
    p = program()
    q = apply_rule(fuse(p, ["tanh", "mul"]), SPLIT, [p.find("all_reduce")], "split")
    assert [n.op.name for n in q.groups[0].nodes] == ["tanh", "mul"]
    assert_same_meaning(p, q)
