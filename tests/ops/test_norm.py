"""Norms beyond layouts: dtypes, where communication appears, layouts of gradients, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft.ops  # noqa: F401 - defines the ops
from weft import interp
from weft.autodiff import vjp
from weft.core.errors import TypeMismatch
from weft.core.layout import Mesh, P, R, S
from weft.core.program import Program
from weft.core.text import parse
from weft.frontend.trace import f64, i64, tensor, trace
from weft.ops import norm
from weft.ops.registry import flops

MESH = Mesh(a=2)


def comm(program: Program) -> list[str]:
    return [n.op.name for n in program.nodes if n.op.kind.name == "COMM"]


def _norms() -> list[tuple[str, Callable[..., Any], Callable[..., torch.Tensor]]]:
    return [
        ("softmax", lambda x, w, b: norm.softmax(x), lambda x, w, b: torch.softmax(x, -1)),
        ("log_softmax", lambda x, w, b: norm.log_softmax(x), lambda x, w, b: torch.log_softmax(x, -1)),
        ("layer_norm", lambda x, w, b: norm.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (8,), w, b)),
        ("rms_norm", lambda x, w, b: norm.rms_norm(x, w), lambda x, w, b: F.rms_norm(x, (8,), w, 1e-6)),
    ]


@pytest.mark.parametrize("place", [R, S(0), S(1)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 2e-2), ("f16", 2e-3)])
@pytest.mark.parametrize(("name", "fn", "ref"), _norms(), ids=[n for n, _, _ in _norms()])
def test_dtypes(name: str, fn: Any, ref: Any, dtype: str, tolerance: float, place: Any) -> None:
    along = S(0) if place == S(1) else R
    p = trace(fn, MESH, x=tensor(dtype, 5, 8, a=place), w=tensor(dtype, 8, a=along), b=tensor(dtype, 8, a=along))
    torch.manual_seed(0)
    values = {k: torch.randn(n.shape).to(n.dtype) for k, n in p.input_names.items()}
    want = ref(*[v.float() for v in values.values()])
    for got in (interp.run_global(p, values)["out"], interp.run(p, values, tolerance=tolerance)["out"]):
        assert got.dtype == p.output_names["out"].dtype
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "reductions"), [("softmax", 2), ("log_softmax", 2), ("layer_norm", 2), ("rms_norm", 1)])
def test_communication_only_where_the_dim_is_cut(name: str, reductions: int) -> None:
    fn = getattr(norm, name)
    whole, cut = (trace(lambda x: fn(x), MESH, x=f64(4, 6, a=S(d))) for d in (0, 1))
    assert [n.op.name for n in whole.nodes] == ["input", name]
    assert comm(cut) == ["all_reduce"] * reductions
    assert cut.output_names["out"].type.on("a") == S(1)


def test_backward_is_one_op_and_weights_stay_pending() -> None:
    back = vjp(trace(norm.layer_norm, MESH, x=f64(5, 4, a=S(0)), weight=f64(4), bias=f64(4)))
    assert [n.op.name for n in back.nodes if n.op.name not in ("input", "item")] == ["layer_norm_backward"]
    assert [back.output_names[f"d.{k}"].type.on("a") for k in ("x", "weight", "bias")] == [S(0), P(), P()]


def test_huge_logits_do_not_overflow() -> None:
    p = trace(lambda x: norm.softmax(x), MESH, x=f64(2, 4, a=S(1)))
    x = torch.tensor([[1e4, 1e4 - 1, -1e4, 0], [-1e4, -1e4, -1e4, -1e4 - 2]], dtype=torch.float64)
    torch.testing.assert_close(interp.run(p, {"x": x})["out"], torch.softmax(x, -1))


def test_prints_and_parses_back() -> None:
    p = trace(norm.layer_norm, MESH, x=f64(5, 4, a=S(0)), weight=f64(4), bias=f64(4))
    assert parse(p.text).text == p.text


def test_work_is_that_of_the_slice() -> None:
    whole, half = (trace(norm.rms_norm, MESH, x=f64(6, 4, a=place)).output_names["out"] for place in (R, S(0)))
    assert flops(whole) == 2 * flops(half) > 0


def test_a_bias_without_a_weight_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="layer_norm with a bias has a weight"):
        trace(lambda x, b: norm.layer_norm(x, None, b), MESH, x=f64(5, 4), b=f64(4))


def test_a_pending_operand_is_refused_with_a_repair() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(norm.rms_norm, MESH, x=f64(5, 4, a=P()))
    assert "needed  rms_norm to be linear in operand 0" in str(e.value)
    assert "try     all_reduce(operand 0, 'a')" in str(e.value)
    assert "test_norm.py, line" in str(e.value)


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeMismatch, match="softmax takes floats"):
        trace(lambda x: norm.softmax(x), MESH, x=i64(5, 4))


def test_a_dim_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="no dim 2 in a tensor of 2 dims"):
        trace(lambda x: norm.softmax(x, 2), MESH, x=f64(5, 4))


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(norm.rms_norm, MESH, x=f64(5, 4), weight=f64(3))
    assert "found   4 in operand 0, 3 in operand 1" in str(e.value)
