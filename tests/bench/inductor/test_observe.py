"""Steps of torch models observed on fake tensors: kernels, and bytes held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.inductor.fusion import observe_compiled
from bench.inductor.observe import observe, passing, seconds
from weft.cluster.profile import load
from weft.cost.work import Attention, Gemm

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


def head(columns: int) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """A product whose result is read by a pointwise kernel, compiled."""

    def make(compiler: Callable[..., Any]) -> Callable[[], Any]:
        x = torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(columns, 1024, dtype=torch.bfloat16, requires_grad=True)
        run = compiler(lambda: torch.tanh(F.linear(x, w)).square().sum())
        return lambda: run().backward()

    return make


def test_a_compiler_pads_odd_rows_where_that_is_faster() -> None:
    device = load("H200").device
    odd, even = (observe_compiled(head(n), device=device) for n in (8191, 8192))
    sizes = {(op.m, op.n, op.k) for op in odd.ops if isinstance(op, Gemm)}
    assert sizes == {(4096, 8192, 1024), (8192, 1024, 4096), (4096, 1024, 8192)}
    assert seconds(odd, device) < seconds(observe_compiled(head(8191)), device)
    # the weight's gradient reads the product's gradient by columns, so that is copied once more, before both results are there
    assert odd.peak - even.peak > 0.4 * 4096 * 8192 * 2


def test_nothing_is_padded_where_the_copy_costs_more() -> None:
    def make(compiler: Callable[..., Any]) -> Callable[[], Any]:
        x, w = torch.randn(65535, 64), torch.randn(64, 33)
        return compiler(lambda: x @ w)  # type: ignore[no-any-return]

    (product,) = [op for op in observe_compiled(make, device=load("H200").device).ops if isinstance(op, Gemm)]
    assert (product.m, product.n, product.k) == (65535, 33, 64)


def test_a_step_that_compiles_by_itself_is_seen_compiled() -> None:
    plain = torch.compile
    seen = observe_compiled(lambda _: mlp(torch.compile))
    assert seen.issued["host.compiled"] > 0
    assert torch.compile is plain


def test_what_depends_on_data_is_taken_at_its_largest() -> None:
    def make() -> Callable[[], Any]:
        x, mask = torch.randn(64, 8), torch.ones(64, dtype=torch.bool)
        return lambda: (x[mask], mask.nonzero(), float(x.sum()))

    taken = [op for op in observe(make).ops if op.name == "index"]
    assert taken[0].bytes == 2 * 64 * 8 * 4


def test_wefts_own_step_is_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given to the compiler by itself, and with nothing counted that was only there while it was traced."""
    import weft_zoo as zoo
    from weft.api.compiled import Compiled
    from weft.api.parallelize import parallelize

    def make(_: Callable[..., Any]) -> Callable[[], Any]:
        work = zoo.get("mlp", device="cpu", layers=2, hidden=64, inputs=64)
        batch = work.example(16)
        step = parallelize(work.model, work.loss, torch.optim.AdamW(work.model.parameters()), batch)
        return lambda: step(batch)

    plain = observe_compiled(make, host="host.plain")
    monkeypatch.setattr(Compiled, "_may_trace", lambda self, asked: True)
    whole = observe_compiled(make, host="host.plain")
    assert plain.issued["host.compiled"] == 0 < whole.issued["host.compiled"]
    assert sum(whole.issued.values()) < sum(plain.issued.values())
    assert sum(op.flops for op in whole.ops if isinstance(op, Gemm)) == sum(op.flops for op in plain.ops if isinstance(op, Gemm))
    assert whole.held == pytest.approx(plain.held, rel=0.05)
    device = load("H200").device
    assert seconds(whole, device, recorded=True) < seconds(whole, device)


def test_attention_of_cudnn_holds_the_gradient_of_the_queries_in_32_bits() -> None:
    queries = torch.empty(2, 3, 5, 8, device="meta", dtype=torch.bfloat16)
    assert passing("_scaled_dot_product_cudnn_attention_backward", (queries, queries)) == 4 * (2 * 3 * 5 * 8 + 2 * 3 * 5)
    assert passing("_scaled_dot_product_flash_attention", (queries, queries)) == 0
