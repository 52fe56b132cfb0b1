"""Expressions with holes: what they match, what they build, how they read."""

from __future__ import annotations

import pytest

from weft.core.errors import RuleError, TypeMismatch
from weft.core.layout import Layout, Mesh, P
from weft.core.node import Node, Type, dtype_of
from weft.ops import comm
from weft.ops.pointwise import add, exp, mul
from weft.ops.reduce import sum_
from weft.ops.source import input_node
from weft.rewrite.pattern import AttrHole, Hole, build, calls_of, holes_of, match

MESH = Mesh(a=2)
X, Y = Hole("x"), Hole("y")


def value(name: str, *shape: int, **places: P) -> Node:
    return input_node(name, Type(dtype_of("f64"), Layout.of(MESH, shape, places)))


U, V = value("u", 4), value("v", 4)
PENDING = value("g", 4, a=P())


def test_calls_on_holes_are_expressions() -> None:
    e = exp(X) * 2.0 - comm.all_reduce(Y, axis="a")
    assert str(e) == "sub(mul(exp(x), 2.0), all_reduce(y, axis='a'))"
    assert list(holes_of(e)) == ["x", "y"]
    assert [c.op.name for c in calls_of(e)] == ["sub", "mul", "exp", "all_reduce"]


@pytest.mark.parametrize("e", [X + Y, 1.0 + X, X - Y, 1.0 - X, X * Y, 2.0 * X, X / Y, X @ Y, -X])
def test_operators_match_what_they_write(e: object) -> None:
    bound = {"x": value("m", 3, 3), "y": value("n", 3, 3)}
    node = build(e, bound)
    assert match(e, node, {}) == {k: v for k, v in bound.items() if k in holes_of(e)}


def test_matching_binds_holes() -> None:
    assert match(X + Y, U + V, {}) == {"x": U, "y": V}
    assert match(X + Y, U * V, {}) is None
    assert match(exp(X), exp(U + V), {}) == {"x": U + V}


def test_a_hole_twice_is_one_node() -> None:
    assert match(X + X, U + U, {}) == {"x": U}
    assert match(X + X, U + V, {}) is None


def test_a_typed_hole_takes_its_type_only() -> None:
    assert match(Hole("x", U.type), V, {}) == {"x": V}
    assert match(Hole("x", U.type), PENDING, {}) is None


def test_attributes_are_part_of_the_pattern() -> None:
    node = comm.all_reduce(PENDING, axis="a")
    assert match(comm.all_reduce(X, axis="a"), node, {}) == {"x": PENDING}
    assert match(comm.all_reduce(X, axis="b"), node, {}) is None


def test_an_attribute_may_be_a_hole() -> None:
    node = comm.reduce_scatter(PENDING, axis="a", dim=0)
    e = comm.reduce_scatter(X, axis=AttrHole("axis"), dim=AttrHole("dim"))
    assert match(e, node, {}) == {"x": PENDING, "axis": "a", "dim": 0}
    assert build(e, {"x": PENDING, "axis": "a", "dim": 0}) is node


def test_an_attribute_the_pattern_leaves_out_must_not_be_there() -> None:
    assert match(sum_(X), sum_(U, dims=0), {}) is None
    assert match(sum_(X), sum_(U), {}) == {"x": U}


def test_numbers_match_constants() -> None:
    assert match(X * 2.0, U * 2.0, {}) == {"x": U}
    assert match(X * 2.0, U * 3.0, {}) is None


def test_shared_nodes_match_as_shared() -> None:
    """In exp(x) * exp(x) both factors are one node."""
    shared = exp(X)
    assert match(mul(shared, shared), exp(U) * exp(U), {}) == {"x": U}
    assert match(mul(shared, exp(Y)), exp(U) * exp(U), {}) == {"x": U, "y": U}


def test_building_types_what_it_builds() -> None:
    with pytest.raises(TypeMismatch, match="add does not fit"):
        build(add(X, Y), {"x": U, "y": PENDING})


def test_building_an_unbound_hole_is_refused() -> None:
    with pytest.raises(RuleError, match="hole y is not bound"):
        build(X + Y, {"x": U})


def test_an_expression_is_not_unpacked() -> None:
    with pytest.raises(RuleError, match="item"):
        list(comm.all_reduce(X, Y, axis="a"))
