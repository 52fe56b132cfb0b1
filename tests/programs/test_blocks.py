"""The blocks against plain torch, and the parallel forms that recipes make of whole blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft import interp
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.programs import blocks
from weft.rewrite.engine import same_erased
from weft.schedule import recipes


def values(p: Program) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    return {
        k: torch.randn(n.shape, generator=gen, dtype=n.dtype) if n.dtype.is_floating_point else torch.tensor(7)
        for k, n in p.input_names.items()
    }


def check(p: Program, *forms: Program) -> None:
    want = interp.run_global(p, values(p))["out"]
    for q in forms:
        torch.testing.assert_close(interp.run(q, values(p))["out"], want, rtol=1e-9, atol=1e-9)
        assert same_erased(p, q)


def test_mlp_equals_torch() -> None:
    p = blocks.mlp(Mesh(tp=2), 3, 5, 4, p=0.0, dtype="f64")
    v = values(p)
    y = F.gelu(v["x"] @ v["w1"] + v["b1"]) @ v["w2"] + v["b2"] + v["x"]
    torch.testing.assert_close(interp.run(p, v)["out"], F.layer_norm(y, (4,), v["gain"], v["shift"]))


def test_self_attention_equals_torch() -> None:
    p = blocks.self_attention(Mesh(tp=2), 2, 6, 8, p=0.0, dtype="f64")
    v = values(p)
    q, k, w = ((v["x"] @ v[m]).view(2, 6, 4, 2).transpose(1, 2) for m in ("wq", "wk", "wv"))
    y = F.scaled_dot_product_attention(q, k, w, is_causal=True).transpose(1, 2).reshape(2, 6, 8) @ v["wo"] + v["bo"] + v["x"]
    torch.testing.assert_close(interp.run(p, v)["out"], F.layer_norm(y, (8,), v["gain"], v["shift"]))


@pytest.mark.parametrize("tp", [2, 3])
def test_megatron_mlp_is_found_by_cutting_one_weight(tp: int) -> None:
    p = blocks.mlp(Mesh(tp=tp), 3, 5, 4, dtype="f64", tp=None)
    q = recipes.megatron(p, "w1", "b1", "w2")
    assert [n.op.name for n in q.nodes if n.op.kind.name == "COMM"] == ["all_reduce"]
    assert str(q.input_names["w1"].type) == f"f64[4, 16] tp:{'S(1)'}"
    assert str(q.input_names["w2"].type).endswith("tp:S(0)")
    check(p, q, recipes.sequence_parallel(q))


def test_megatron_attention_has_one_sum() -> None:
    p = blocks.self_attention(Mesh(tp=2), 2, 6, 8, dtype="f64", tp=None)
    q = recipes.megatron(p, "wq", "wk", "wv", "wo")
    assert [n.op.name for n in q.nodes if n.op.kind.name == "COMM"] == ["all_reduce"]
    check(p, q, recipes.sequence_parallel(q))


@pytest.mark.parametrize("seq", [6, 7])
def test_ring_attention_gathers_keys_and_values_under_the_attention(seq: int) -> None:
    p = blocks.self_attention(Mesh(cp=2), 2, seq, 8, dtype="f64", tp=None)
    q = recipes.ring_attention(p, "x")
    (group,) = q.groups
    assert group.kind == "overlap" and [n.op.name for n in group.nodes] == ["all_gather", "item", "item", "attention"]
    check(p, q)


def test_all_to_all_attention_turns_from_sequence_to_heads_and_back() -> None:
    p = blocks.self_attention(Mesh(cp=2), 2, 6, 8, dtype="f64", tp=None)
    q = recipes.all_to_all_attention(p, "x")
    assert [n.op.name for n in q.nodes if n.op.kind.name == "COMM"] == ["all_to_all"] * 4 + ["all_gather"]
    check(p, q)


def test_the_boundary_sends_slices() -> None:
    p = blocks.boundary(Mesh(pp=2, tp=3), 2, 7, 4, dtype="f64")
    q = recipes.sliced_send(p)
    assert [n.op.name for n in q.nodes if n.op.kind.name == "COMM"] == ["reduce_scatter", "slice", "send", "all_gather"]
    check(p, p, q)


def test_dropout_draws_the_same_mask_however_the_value_is_cut() -> None:
    p = blocks.projection(Mesh(tp=2), 2, 6, 8, p=0.5, dtype="f64")
    check(p, recipes.sequence_parallel(p))
