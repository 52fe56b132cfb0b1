"""A user's op, written outside the package, has shapes, layouts, gradients and errors like any other."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.ops import harness
from weft.core.errors import NotDifferentiable, OpDefinitionError, TypeMismatch
from weft.core.node import OPS
from weft.ops.registry import Kind, flops

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_op.py"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, Any]]:
    try:
        yield runpy.run_path(str(EXAMPLE))
    finally:
        OPS.pop("distances", None)


def test_the_example_holds(example: dict[str, Any]) -> None:
    example["check"]()
    assert "distances(%x, %y)" in example["program"].text


def test_the_op_takes_about_ten_lines() -> None:
    code = EXAMPLE.read_text().partition("distances = ")[2].partition("def nearest")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_every_layout_of_it(example: dict[str, Any]) -> None:
    c = harness.case(
        "distances", example["distances"], lambda x, y: torch.cdist(x, y).square(), harness.normal(5, 4), harness.normal(3, 4)
    )
    for mesh in harness.ONE_AXIS:
        programs, _ = harness.one_axis(c, mesh)
        assert len(programs) >= 7
        harness.check_forward(c, programs)
        harness.check_gradient(c, programs)
    assert harness.missed(c, harness.ONE_AXIS[0]) == []


def test_its_work_and_its_errors(example: dict[str, Any]) -> None:
    def fn(x: Any, y: Any) -> Any:
        return example["distances"](x, y)

    p = weft.trace(fn, weft.Mesh(tp=2), x=weft.f64(5, 4, tp=weft.S(1)), y=weft.f64(3, 4, tp=weft.S(1)))
    assert str(p.output_names["out"].type) == "f64[5, 3] tp:P"
    assert flops(p.find("distances")) == 2 * 5 * 3 * 2
    with pytest.raises(TypeMismatch, match=r"distances does not fit its operands \(test_custom_op.py, line \d+\)"):
        weft.trace(fn, weft.Mesh(tp=2), x=weft.f64(5, 4), y=weft.f64(3, 3))


# -- what define refuses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facets", "message"),
    [
        ({"name": "add", "run": torch.add, "equation": "i, i -> i"}, r"op 'add' is defined twice\n\n  needed  a new name"),
        ({"name": "mine", "run": torch.add}, r"needs an equation or an infer rule, and one of them\n\n.*\n  found   neither"),
        ({"name": "mine", "run": torch.add, "equation": "i -> i", "infer": lambda *_: None}, "found   both"),
        ({"name": "mine", "run": torch.abs, "equation": "i -> i", "lineer": 1}, r"no facet 'lineer'\n\n.*\n  found   lineer= of 'mine'\n  try     linear"),
        ({"name": "mine", "run": None, "equation": "i -> i"}, r"op 'mine' has no meaning\n\n  needed  run=, a torch function"),
    ],
)
def test_an_entry_that_lacks_a_facet_fails_at_once(facets: dict[str, Any], message: str) -> None:
    name = facets.pop("name")
    with pytest.raises(OpDefinitionError, match=message):
        weft.define(name, kind=Kind.POINTWISE, **facets)
    assert name == "add" or name not in OPS


def test_an_op_without_a_vjp_says_so() -> None:
    size = weft.define("size_of", kind=Kind.REDUCE, equation="i ->", run=lambda x: x.abs().sum().detach())
    try:
        p = weft.trace(lambda x: size(x), weft.Mesh(a=2), x=weft.f64(4), name="p")
        with pytest.raises(NotDifferentiable, match=r"size_of has no gradient\n\n  needed  an op with a vjp\n  found   size_of"):
            weft.grad(p)
    finally:
        OPS.pop("size_of")
