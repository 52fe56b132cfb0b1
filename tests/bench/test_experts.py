"""Stacks of experts as published: their sizes against the publishers' own counts, and what each part adds to a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench._experts import ExpertShape, recomputed, with_experts
from bench._layers import Counted
from weft.cost.work import Attention, Collective, Gemm
from weft.plan.setting import Setting

MLA = "mla q1536 kv512 nope128 rope64 v128"


def deepseek() -> ExpertShape:
    sizes = Counted(61, 7168, 128, 129280, 4096, name="deepseek-v3", bias=False)
    return with_experts(sizes, MLA, experts=256, chosen=8, ffn=2048, shared=2048, dense=3, plain=18432)


def test_parameters_are_those_the_publisher_counts() -> None:
    assert deepseek().params == pytest.approx(671e9, rel=0.01)
    assert deepseek()._met(8) + deepseek().vocab * 7168 == pytest.approx(37e9, rel=0.02)  # activated per token


def test_kimi_has_a_trillion_parameters_of_which_32_billion_are_met() -> None:
    sizes = Counted(61, 7168, 64, 163840, 4096, name="kimi-k2", bias=False)
    kimi = with_experts(sizes, MLA, experts=384, chosen=8, ffn=2048, shared=2048, dense=1, plain=18432)
    assert kimi.params == pytest.approx(1.03e12, rel=0.02)
    assert kimi._met(8) + kimi.vocab * 7168 == pytest.approx(32e9, rel=0.03)


def test_heads_of_latent_attention_are_wider_than_their_share_of_the_model() -> None:
    (attention,) = [op for op in deepseek().work(Setting()).layer.forward if isinstance(op, Attention)]
    assert attention.head_dim == (128 + 64 + 128) // 2 and attention.kv_heads == 128


def test_first_layers_without_experts_come_first() -> None:
    (dense, count), *_ = deepseek().work(Setting()).others
    assert count == 3 and not any(isinstance(op, Gemm) and op.grouped for op in dense.forward)


def test_a_window_leaves_attention_less_to_do() -> None:
    shape = with_experts(Counted(36, 2880, 64, 201088, 4096, kv_heads=8, head=64), "gqa sinks; every second layer window 128", experts=128, chosen=4, ffn=2880)
    work = shape.work(Setting())
    near, full = ([op.flops for op in b.forward if isinstance(op, Attention)] for b in (work.others[0][0], work.layer))
    assert work.others[0][1] == 18 and near[0] < full[0] / 4


@pytest.mark.parametrize(("text", "again"), [("selective (mla_up_proj mlp)", ("mla_up_proj", "mlp")), ("selective", ("core_attn", "moe_act"))])
def test_selective_recompute_names_what_is_made_again(text: str, again: tuple[str, ...]) -> None:
    assert set(recomputed(text)) == set(again)


def test_recomputing_projections_does_not_recompute_attention() -> None:
    shape = replace(deepseek(), again=("mla_up_proj",))
    again = shape.work(Setting().recomputing("selective")).layer.rerun("selective")
    assert any(op.name == "keys up" for op in again) and not any(isinstance(op, Attention) for op in again)


def test_tokens_sent_beside_other_compute_are_waited_for_by_nothing_in_the_layer() -> None:
    setting = Setting.counted(64, 1, dp=8, ep=8)
    sent = [op for op in replace(deepseek(), beside=True).work(setting).layer.forward if isinstance(op, Collective) and op.axis == "ep"]
    assert len(sent) == 2 and all(op.hidden and op.concurrent for op in sent)
