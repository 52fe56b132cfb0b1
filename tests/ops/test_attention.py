"""Attention beyond layouts: dtypes, rows that see nothing, the two ways to cut the sequence, work, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import weft.ops  # noqa: F401 - defines the ops
from tests.ops.cases_attention import reference
from weft import interp
from weft.autodiff import vjp
from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import Mesh, P, R, S
from weft.core.text import parse
from weft.frontend.trace import f64, i64, tensor, trace
from weft.ops.attention import attention, attention_over_keys
from weft.ops.comm import all_to_all
from weft.ops.registry import flops
from weft.ops.rotary import rotary

MESH = Mesh(a=2)


def values(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]


def _out(**more: Any) -> Any:
    return lambda q, k, v: attention(q, k, v, **more)[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("f32", 1e-5), ("bf16", 2e-2), ("f16", 2e-3)])
def test_dtypes(dtype: str, tolerance: float) -> None:
    for fn, place in ((attention, S(2)), (attention_over_keys, R)):
        kv = tensor(dtype, 2, 2, 8, 4, a=R if fn is attention else S(2))
        p = trace(lambda q, k, v: list(fn(q, k, v, causal=True, offset=4)), MESH, q=tensor(dtype, 2, 4, 4, 4, a=place), k=kv, v=kv)  # noqa: B023
        xs = values((2, 4, 4, 4), (2, 2, 8, 4), (2, 2, 8, 4), dtype=p.inputs[0].dtype)
        want = reference(*[x.float() for x in xs], causal=True, offset=4)
        got = interp.run(p, dict(zip("qkv", xs, strict=True)), tolerance=tolerance)
        assert p.output_names["0"].dtype == p.inputs[0].dtype
        assert p.output_names["1"].dtype == torch.float32
        torch.testing.assert_close(got["0"].float(), want[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got["1"], want[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("over_keys", [False, True])
def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient(over_keys: bool) -> None:
    fn = attention_over_keys if over_keys else attention
    kv = f64(1, 1, 4, 2, a=S(2) if over_keys else R)
    p = trace(lambda q, k, v: fn(q, k, v, causal=True, offset=-2)[0], MESH, q=f64(1, 1, 3, 2), k=kv, v=kv)
    q, k, v = values((1, 1, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2))
    out = interp.run(p, {"q": q, "k": k, "v": v})["out"]
    assert torch.equal(out[0, 0, :2], torch.zeros(2, 2, dtype=torch.float64))
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, 0])
    back = interp.run(vjp(p), {"q": q, "k": k, "v": v, "ct.out": torch.ones_like(out)})
    assert all(torch.isfinite(g).all() for g in back.values())
    torch.testing.assert_close(back["d.v"][0, 0, 0], torch.ones(2, dtype=torch.float64))


def test_query_rows_cut_leaves_keys_and_values_pending() -> None:
    back = vjp(trace(_out(causal=True), MESH, q=f64(2, 2, 5, 3, a=S(2)), k=f64(2, 2, 5, 3), v=f64(2, 2, 5, 3)))
    assert [back.output_names[f"d.{x}"].type.on("a") for x in "qkv"] == [S(2), P(), P()]
    assert "attention_backward" in back.text
    assert "attention_lse_backward" not in back.text  # nothing read the log-sum-exp


def test_heads_cut_with_their_key_heads() -> None:
    p = trace(_out(), MESH, q=f64(2, 8, 5, 3, a=S(1)), k=f64(2, 4, 5, 3, a=S(1)), v=f64(2, 4, 5, 3, a=S(1)))
    assert p.output_names["out"].type.on("a") == S(1)
    assert [n.op.name for n in p.nodes if n.op.kind.name == "COMM"] == []


def test_more_query_heads_than_key_heads_to_cut() -> None:
    p = trace(_out(), Mesh(a=4), q=f64(2, 8, 5, 3, a=S(1)), k=f64(2, 1, 5, 3), v=f64(2, 1, 5, 3))
    q, k, v = values((2, 8, 5, 3), (2, 1, 5, 3), (2, 1, 5, 3))
    got = interp.run(p, {"q": q, "k": k, "v": v})["out"]
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_sequence_by_all_to_all() -> None:
    """Rows cut outside, heads cut inside, with rotary by global position: one all_to_all each way."""

    def ulysses(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (all_to_all(x, axis="a", dim=1) for x in (rotary(q), rotary(k), v))
        return all_to_all(attention(q, k, v, causal=True)[0], axis="a", dim=2)

    spec = f64(1, 4, 6, 4, a=S(2))
    p = trace(ulysses, MESH, q=spec, k=spec, v=spec)
    whole = trace(
        lambda q, k, v: attention(rotary(q), rotary(k), v, causal=True)[0], MESH, q=f64(1, 4, 6, 4), k=f64(1, 4, 6, 4), v=f64(1, 4, 6, 4)
    )
    xs = dict(zip("qkv", values(*[(1, 4, 6, 4)] * 3), strict=True))
    torch.testing.assert_close(interp.run(p, xs)["out"], interp.run_global(whole, xs)["out"])


def test_keys_cut_merge_by_three_reductions() -> None:
    kv = f64(1, 2, 8, 3, a=S(2))
    p = trace(lambda q, k, v: attention_over_keys(q, k, v)[0], MESH, name="decode", q=f64(1, 2, 1, 3), k=kv, v=kv)
    assert [n.op.name for n in p.nodes if n.op.kind.name == "COMM"] == ["all_reduce"] * 3
    assert [str(n.args[0].type.on("a")) for n in p.nodes if n.op.name == "all_reduce"] == ["P(max)", "P", "P"]
    assert parse(p.text).text == p.text


def test_work_halves_with_the_slice_and_with_the_mask() -> None:
    def work(place: Any, causal: bool) -> float:
        p = trace(_out(causal=causal), MESH, q=f64(2, 2, 4, 3, a=place), k=f64(2, 2, 4, 3), v=f64(2, 2, 4, 5))
        return next(flops(n) for n in p.nodes if n.op.name == "attention")

    assert work(R, False) == 2 * 2 * 2 * 4 * 4 * (3 + 5)
    assert work(S(2), False) == work(R, True) == work(R, False) / 2


def test_cut_keys_are_refused_with_a_repair() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(_out(), MESH, q=f64(2, 2, 4, 3), k=f64(2, 2, 4, 3, a=S(2)), v=f64(2, 2, 4, 3, a=S(2)))
    assert "needed  dim 2 of operand 1, which attention needs in full, unsharded" in str(e.value)
    assert "try     all_gather(operand 1, 'a')" in str(e.value)


def test_uneven_keys_are_refused() -> None:
    kv = f64(1, 2, 5, 3, a=S(2))
    with pytest.raises(TypeMismatch) as e:
        trace(lambda q, k, v: attention_over_keys(q, k, v)[0], MESH, q=f64(1, 2, 1, 3), k=kv, v=kv)
    assert "needed  a number of keys divisible by 2" in str(e.value)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TypeMismatch) as e:
        trace(_out(), MESH, q=f64(2, 3, 4, 3), k=f64(2, 2, 4, 3), v=f64(2, 2, 4, 3))
    assert "h a multiple of g" in str(e.value)
    assert "found   q f64[2, 3, 4, 3]" in str(e.value)


def test_a_cut_inside_a_group_of_heads_is_refused() -> None:
    with pytest.raises((TypeMismatch, LayoutError)):
        trace(_out(), Mesh(a=3), q=f64(2, 4, 4, 3, a=S(1)), k=f64(2, 2, 4, 3), v=f64(2, 2, 4, 3))


def test_a_mask_of_other_heads_is_refused() -> None:
    with pytest.raises(TypeMismatch, match="the mask has other heads"):
        trace(lambda q, m: attention(q, q, q, mask=m)[0], MESH, q=f64(2, 4, 5, 3), m=f64(2, 2, 5, 5))


def test_dtypes_that_differ_are_refused() -> None:
    with pytest.raises(TypeMismatch, match="attention takes one dtype"):
        trace(_out(), MESH, q=f64(2, 2, 4, 3), k=tensor("f32", 2, 2, 4, 3), v=f64(2, 2, 4, 3))


def test_rotary_refuses_an_odd_number_of_features() -> None:
    with pytest.raises(TypeMismatch, match="rotary does not fit its operands"):
        trace(lambda x: rotary(x), MESH, x=f64(4, 5))
    with pytest.raises(TypeMismatch, match="rotary takes floats"):
        trace(lambda x: rotary(x), MESH, x=i64(4, 6))
