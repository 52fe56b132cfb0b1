"""Steps of torch models observed on fake tensors: kernels, and bytes held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.cluster.profile import load
from weft.plan.fusion import observe_compiled
from weft.plan.observe import observe, seconds
from weft.plan.workload import Attention, Gemm

WIDTH, BATCH, LAYERS = 64, 32, 4


def mlp(compiler: Callable[..., Any] | None = None) -> Callable[[], Any]:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    x = torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(layers.parameters(), fused=True)

    def forward() -> torch.Tensor:
        y = x
        for layer in layers:
            y = torch.tanh(layer(y)) * 2 + 1
        return y.sum()

    run = compiler(forward) if compiler else forward

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        run().backward()
        optimizer.step()

    return step


def test_products_of_a_step() -> None:
    seen = observe(mlp)
    products = [op for op in seen.ops if isinstance(op, Gemm)]
    assert len(products) == LAYERS + LAYERS + LAYERS - 1  # the first layer's input needs no gradient
    assert sum(op.flops for op in products) == (3 * LAYERS - 1) * 2 * BATCH * WIDTH * WIDTH


def test_bytes_held() -> None:
    """Weights, gradients, two moments, the batch, and an odd few hundred bytes of step counts."""
    weights, batch = LAYERS * WIDTH * WIDTH * 4, BATCH * WIDTH * 4
    seen = observe(mlp)
    assert seen.held == pytest.approx(4 * weights + batch, rel=0.05)
    # at its worst the step has freed the old gradients and holds what the backward needs: two tensors a layer
    assert seen.peak >= seen.held
    assert seen.peak <= seen.held + 3 * LAYERS * batch


def test_nothing_is_computed() -> None:
    made: list[torch.Tensor] = []

    def make() -> Callable[[], Any]:
        made.append(torch.empty(2**40))  # a terabyte of numbers that are not there
        return lambda: made[0].add_(1.0)

    assert observe(make).held == 2**42


def test_compiled_steps_launch_fewer_kernels() -> None:
    plain, fused = observe(mlp), observe_compiled(mlp)
    assert sum(op.launches for op in fused.ops) < sum(op.launches for op in plain.ops)
    assert sum(op.flops for op in fused.ops) == sum(op.flops for op in plain.ops)
    assert sum(op.bytes for op in fused.ops) < sum(op.bytes for op in plain.ops)
    assert fused.peak <= plain.peak


def test_attention_is_seen_whole() -> None:
    def make() -> Callable[[], Any]:
        q = torch.randn(2, 4, 128, 32, requires_grad=True)
        return lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    forward, back = [op for op in observe(make).ops if isinstance(op, Attention)]
    assert (forward.batch, forward.heads, forward.queries, forward.causal) == (2, 4, 128, True)
    assert back.flops == 2.5 * forward.flops


def test_convolutions_are_products() -> None:
    def make() -> Callable[[], Any]:
        conv = nn.Conv2d(8, 16, 3, padding=1)
        x = torch.randn(4, 8, 10, 10)
        return lambda: conv(x).sum().backward()

    first, second = [op for op in observe(make).ops if isinstance(op, Gemm)]
    assert (first.m, first.n, first.k) == (400, 16, 72)
    assert first.flops == second.flops


def test_the_slower_of_host_and_device_sets_the_pace() -> None:
    seen, device = observe(mlp), load("H200").device
    kernels = sum(op.launches for op in seen.ops)
    assert seconds(seen, device) >= kernels * device.get("host.launch")
