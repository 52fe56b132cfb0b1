"""The judge: one global value, the same value rank by rank, and what it refuses to call a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import interp
from weft.core.errors import InvalidProgram, WeftError
from weft.core.layout import Layout, Mesh, O, P, S
from weft.core.node import Type
from weft.core.program import Program
from weft.frontend.trace import f64, i64, tensor, trace
from weft.ops import comm
from weft.ops.pointwise import exp, square
from weft.ops.reduce import amax, sum_
from weft.ops.shape import optimization_barrier
from weft.testing.layouts import layouts
from weft.testing.values import draw_inputs

TWO = Mesh(a=2, b=2)
DOUBLE = torch.float64


def type_of(mesh: Mesh, shape: tuple[int, ...], **places: Any) -> Type:
    return Type(DOUBLE, Layout.of(mesh, shape, places))


@pytest.mark.parametrize("mesh", [Mesh(a=2), Mesh(a=3), TWO, Mesh(a=3, b=2)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3)], ids=str)
def test_what_is_distributed_denotes_what_it_was(mesh: Mesh, shape: tuple[int, ...]) -> None:
    """For every layout, with every rank's slice and random terms of every pending reduction."""
    value = torch.randn(shape, dtype=DOUBLE)
    for layout in layouts(mesh, shape, inner=len(shape) < 2):
        locals_ = interp.distribute(value, Type(DOUBLE, layout), seed=3)
        assert interp.same_values(interp.denote(locals_, Type(DOUBLE, layout), tolerance=1e-12), value, 1e-12), layout


def test_terms_are_not_the_value() -> None:
    """A Partial whose terms happen to equal the value would hide mistakes."""
    value = torch.zeros(4, dtype=DOUBLE)
    for op in ("sum", "max", "min"):
        terms = interp.distribute(value, type_of(Mesh(a=2), (4,), a=P(op)))
        assert not torch.equal(terms[0], value) or not torch.equal(terms[1], value)


def test_ranks_without_a_value_have_none() -> None:
    at_root = interp.distribute(torch.ones(2), type_of(Mesh(a=3), (2,), a=O(1)))
    assert [x is None for x in at_root] == [True, False, True]


def test_replicas_that_differ_are_refused() -> None:
    t = type_of(Mesh(a=2), (2,))
    with pytest.raises(InvalidProgram, match="replicas along a differ") as e:
        interp.denote([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])], t)
    assert e.value.found == "ranks 0 and 1 apart by 0.5"


def test_replicas_may_differ_by_the_tolerance() -> None:
    t = type_of(Mesh(a=2), (1,))
    assert interp.denote([torch.tensor([1.0]), torch.tensor([1.0 + 1e-6])], t, tolerance=1e-5) == torch.tensor([1.0])


def test_a_rank_that_holds_the_wrong_shape_is_refused() -> None:
    with pytest.raises(InvalidProgram, match=r"a rank holds the wrong shape at {'a': 1}"):
        interp.denote([torch.ones(2), torch.ones(2)], type_of(Mesh(a=2), (3,), a=S(0)))


def test_a_missing_input_is_refused() -> None:
    p = trace(lambda x, y: x + y, TWO, x=f64(2), y=f64(2))
    with pytest.raises(InvalidProgram, match="no value for input 'y'"):
        interp.run_global(p, {"x": torch.ones(2)})


def sums() -> Program:
    return trace(lambda x, w: sum_(comm.all_reduce(x @ w, axis="a")), Mesh(a=3), x=f64(4, 7, a=S(1)), w=f64(7, 5, a=S(0)))


def test_the_ranks_mean_what_the_program_means() -> None:
    p = sums()
    inputs = draw_inputs(p)
    torch.testing.assert_close(interp.run(p, inputs)["out"], interp.run_global(p, inputs)["out"])
    torch.testing.assert_close(interp.run_global(p, inputs)["out"], (inputs["x"] @ inputs["w"]).sum())


def test_an_uneven_cut_has_an_empty_rank() -> None:
    p = trace(lambda x: comm.all_reduce(amax(x, dims=0), axis="a"), Mesh(a=4), x=f64(5, 2, a=S(0)))
    x = torch.randn(5, 2, dtype=DOUBLE)
    assert [len(part) for part in interp.distribute(x, p.inputs[0].type)] == [2, 2, 1, 0]
    torch.testing.assert_close(interp.run(p, {"x": x})["out"], x.amax(0))


def test_values_of_several_ranks_side_by_side() -> None:
    """One value at a root beside one that all ranks hold."""

    def pair(x: Any, y: Any) -> dict[str, Any]:
        a, b = optimization_barrier(x, y)
        return {"a": comm.broadcast(a, axis="a"), "b": b * 2.0}

    p = trace(pair, Mesh(a=2), x=f64(3, a=O(1)), y=f64(4, a=S(0)))
    inputs = draw_inputs(p)
    got = interp.run(p, inputs)
    torch.testing.assert_close(got["a"], inputs["x"])
    torch.testing.assert_close(got["b"], 2 * inputs["y"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_over_a_field_nothing_is_rounded(seed: int) -> None:
    """Large residues, which floats could not multiply exactly."""

    def polynomial(x: Any, w: Any) -> Any:
        y = comm.all_reduce(x @ w, axis="a")
        return square(y) - 3.0 * y

    p = trace(polynomial, Mesh(a=2), x=f64(2, 4, a=S(1)), w=f64(4, 2, a=S(0)))
    gen = torch.Generator().manual_seed(seed)
    inputs = {k: torch.randint(0, interp.PRIME, n.shape, generator=gen) for k, n in p.input_names.items()}
    product = [[sum(int(a) * int(b) for a, b in zip(row, col, strict=True)) for col in inputs["w"].T] for row in inputs["x"]]
    expected = torch.tensor([[(v * v - 3 * v) % interp.PRIME for v in row] for row in product])
    assert torch.equal(interp.run(p, inputs, prime=interp.PRIME)["out"], expected)
    assert torch.equal(interp.run_global(p, inputs, prime=interp.PRIME)["out"], expected)


def test_what_is_no_polynomial_has_no_meaning_over_a_field() -> None:
    p = trace(lambda x: exp(x), Mesh(a=2), x=f64(2))
    with pytest.raises(WeftError, match="exp is no polynomial"):
        interp.run_global(p, {"x": torch.ones(2, dtype=torch.int64)}, prime=interp.PRIME)


def test_integers_and_flags() -> None:
    def both(i: Any, f: Any) -> dict[str, Any]:
        return {"i": comm.all_reduce(sum_(i), axis="a"), "f": comm.all_gather(f, axis="a")}

    p = trace(both, Mesh(a=3), i=i64(7, a=S(0)), f=tensor("bool", 5, a=S(0)))
    inputs = {"i": torch.arange(7), "f": torch.arange(5) % 2 == 0}
    got = interp.run(p, inputs)
    assert int(got["i"]) == 21
    assert torch.equal(got["f"], inputs["f"])
