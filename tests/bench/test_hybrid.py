"""Stacks of mamba, attention and experts, priced from a row's words."""

from __future__ import annotations

import re

import pytest

from bench._hybrid import hybrid
from bench._layers import Layers, Product, Sized, backward, per_op
from weft.cluster.spec import cluster
from weft.cost.work import Attention, Gemm
from weft.plan.setting import Setting
from weft.plan.simulate import simulate

WORDS = "hybrid: 4 mamba2 (16 heads of 64; state 128; 8 groups) 4 moe (relu2; not gated; latent 256) 2 gqa"
SHAPE = Sized(10, 1024, 8, 32000, 2048, 2, 512, "small", gated=True, rotary=True, bias=False, tied=False, experts=16, chosen=4)


def test_layers_are_read_from_words() -> None:
    found = hybrid(SHAPE, WORDS, 2048, 1)
    assert (found.mamba, found.attention, found.states, found.latent, found.gated) == (4, 2, (16, 64, 128, 8), 256, False)
    assert sum(n for _, n in found.work(Setting.counted(8, 1, 8, zero=1, ep=8)).kinds) == 10 + 2


def test_words_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no layers are read from 'hybrid: some'"):
        hybrid(SHAPE, "hybrid: some", 0, 0)


@pytest.mark.parametrize("more", ["8 mamba2", "state 256", "latent 512"])
def test_more_of_anything_takes_longer(more: str) -> None:
    place, setting = cluster("1x8xB200"), Setting.counted(8, 1, 8, zero=1, ep=8)
    words = re.sub(rf"\d+ {more.split()[1]}" if more[0].isdigit() else rf"{more.split()[0]} \d+", more, WORDS)
    shape = Sized(**{**SHAPE.__dict__, "layers": 14}) if more[0].isdigit() else SHAPE
    few, many = (simulate(hybrid(s, w, 0, 0).work(setting), setting, place).seconds for s, w in ((SHAPE, WORDS), (shape, words)))
    assert many > few


# --- layers counted by hand


def test_the_backward_of_a_product_is_two() -> None:
    op = Product(6, 4, 8, bias=True)
    first, second, bias = backward(op)
    assert isinstance(first, Gemm) and isinstance(second, Gemm)
    assert (first.m, first.n, first.k) == (6, 8, 4)
    assert (second.m, second.n, second.k) == (8, 4, 6)
    assert bias.name == "matmul bias gradient"


def test_per_op_keeps_attention_and_every_second_product() -> None:
    forward = Layers(SHAPE, Setting.counted()).build().layer.forward
    again = list(per_op(forward))
    assert not any(isinstance(op, Attention) for op in again)
    assert sum(isinstance(op, Gemm) for op in again) == 2
