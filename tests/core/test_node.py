"""Nodes: the same request gives the same node, numbers become constants, and errors stand at the user's line."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from weft.core.errors import TypeMismatch, UnknownName
from weft.core.layout import Layout, Mesh, P, S
from weft.core.node import OPS, Node, Type, _built, apply, constant, dtype_of, listening, make, op_named, toposort
from weft.frontend.trace import input_node
from weft.ops import comm, pointwise, shape
from weft.ops.linalg import einsum, matmul

MESH = Mesh(a=2)


def value(name: str, *shape: int, dtype: torch.dtype = torch.float64, **placements: object) -> Node:
    return input_node(name, Type(dtype, Layout.of(MESH, shape, placements)))  # type: ignore[arg-type]


X, Y, K = value("x", 4, 3), value("y", 4, 3), value("k", 4, dtype=torch.int64)


# -- interning -------------------------------------------------------------------------------------------------------------------


def test_the_same_request_gives_the_same_node() -> None:
    assert X + Y is X + Y
    assert pointwise.clamp(X, lo=0.0, hi=1.0) is pointwise.clamp(X, hi=1.0, lo=0.0)
    assert X + Y is not Y + X
    assert einsum("ij,kj->ik", X, Y) is einsum("ij, kj -> ik", X, Y)
    assert pointwise.cast(X, dtype="f32") is pointwise.cast(X, dtype=torch.float32)
    assert shape.permute(X, 1, 0) is shape.permute(X, (-1, -2))


def test_equality_is_identity() -> None:
    assert X == value("x", 4, 3)
    assert len({X + Y, X + Y, X * Y}) == 2


def test_two_dropouts_stay_two() -> None:
    assert pointwise.dropout(X, 1, p=0.5, site=0) is not pointwise.dropout(X, 1, p=0.5, site=1)


def test_nodes_nobody_holds_are_forgotten() -> None:
    gc.collect()
    before = len(_built)
    kept = pointwise.exp(pointwise.tanh(X + 12345.0))
    assert len(_built) > before
    del kept
    gc.collect()
    assert len(_built) <= before


def test_nothing_is_mutated() -> None:
    with pytest.raises(AttributeError):
        X.op = None  # type: ignore[misc]
    with pytest.raises(TypeError, match="a node is not pickled: print its program and parse it back"):
        pickle.dumps(X)


# -- numbers ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "number", "dtype"),
    [
        (lambda: X * 2, 2.0, torch.float64),
        (lambda: 2 - X, 2.0, torch.float64),
        (lambda: K + 2, 2, torch.int64),
        (lambda: K > 1, 1, torch.int64),
        (lambda: value("h", 4, dtype=torch.bfloat16) / 3, 3.0, torch.bfloat16),
    ],
)
def test_a_number_takes_the_dtype_beside_it(made: object, number: float, dtype: torch.dtype) -> None:
    node = made()  # type: ignore[operator]
    (const,) = [a for a in node.args if a.op.name == "const"]
    assert (const.attr("value"), const.dtype, type(const.attr("value"))) == (number, dtype, type(number))


def test_order_of_a_number_and_a_value() -> None:
    assert [a.op.name for a in (2 - X).args] == ["const", "input"]
    assert [a.op.name for a in (X - 2).args] == ["input", "const"]
    assert [a.op.name for a in (2**X).args] == ["const", "input"]


def test_a_float_beside_whole_numbers_is_refused() -> None:
    with pytest.raises(TypeMismatch, match=r"operands of several dtypes.*\n\n  needed  one dtype\n  found   i64 and f32\n  try     cast"):
        K * 0.5


def test_what_is_no_value_is_refused() -> None:
    with pytest.raises(TypeMismatch, match=r"add cannot take str\n\n  needed  program values, or numbers with at least one\n  found"):
        X + "one"
    with pytest.raises(TypeMismatch, match="add cannot take int"):
        apply(op_named("add"), (1, 2), {})


# -- several values --------------------------------------------------------------------------------------------------------------


def test_tuples_unpack_into_items() -> None:
    pair = comm.all_reduce(value("p", 4, a=P()), value("q", 3, a=P()), axis="a")
    one, two = pair
    assert (one.shape, two.shape) == ((4,), (3,))
    assert one is next(iter(pair))
    with pytest.raises(TypeMismatch, match=r"all_reduce gives 2 values\n\n  needed  one of them"):
        pair.type  # noqa: B018
    with pytest.raises(TypeMismatch, match=r"exp was given all 2 values of all_reduce"):
        pointwise.exp(pair)
    with pytest.raises(TypeMismatch, match="input gives one value and cannot be unpacked"):
        list(X)


# -- errors at the user's line -----------------------------------------------------------------------------------------------------


def test_a_type_error_names_this_line() -> None:
    with pytest.raises(TypeMismatch) as e:
        matmul(X, Y)
    line = e.traceback[0].lineno + 1
    assert e.value.where == f"test_node.py, line {line}"
    assert str(e.value) == (
        f"matmul does not fit its operands (test_node.py, line {line})\n\n"
        "    operand 0  f64[4, 3] a:R\n    operand 1  f64[4, 3] a:R\n\n"
        "  needed  equal sizes along 'k'\n  found   3 in operand 0, 4 in operand 1"
    )


def test_operators_and_composites_name_the_line_that_wrote_them() -> None:
    with pytest.raises(TypeMismatch) as e:
        X + value("z", 4, 3, a=S(0))
    assert e.value.where == f"test_node.py, line {e.traceback[0].lineno + 1}"
    with pytest.raises(TypeMismatch) as e:
        shape.concat([X, value("w", 4, 2)], 0)
    assert e.value.where == f"test_node.py, line {e.traceback[0].lineno + 1}"
    assert e.value.needed == "equal sizes along 'd1'"


def test_a_repair_is_named() -> None:
    with pytest.raises(TypeMismatch, match="try     slice operand 0 along a, or all_gather operand 1"):
        X * value("z", 4, 3, a=S(0))
    with pytest.raises(TypeMismatch, match=r"exp to be linear in operand 0, the others replicated\n.*\n  try     all_reduce\(operand 0, 'a'\)"):
        pointwise.exp(value("p", 4, a=P()))


def test_unknown_names() -> None:
    with pytest.raises(UnknownName, match=r"no op 'sofmax'\n\n  needed  one of abs, "):
        op_named("sofmax")
    with pytest.raises(UnknownName, match=r"no dtype 'f12'\n\n  needed  one of f64, f32"):
        dtype_of("f12")


def test_an_unknown_facet_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Op' object has no attribute 'speed'"):
        OPS["add"].speed  # noqa: B018


# -- order and listening -------------------------------------------------------------------------------------------------------------


def test_toposort_puts_arguments_first() -> None:
    z = pointwise.exp(X + Y) * (X + Y)
    order = toposort([z])
    assert order == [X, Y, X + Y, pointwise.exp(X + Y), z]
    assert toposort([z, X]) == order


def test_toposort_of_a_deep_chain_does_not_recurse() -> None:
    z = X
    for _ in range(5000):
        z = make(op_named("neg"), (z,), {})
    assert len(toposort([z])) == 5001


def test_listening_hears_every_request() -> None:
    heard: list[Node] = []
    with listening(heard.append):
        z = X * 2.0
    assert X * 3.0 not in heard
    assert heard == [constant(2.0, torch.float64, MESH), z]
