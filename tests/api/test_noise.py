"""The noise scale a step tells agrees with one worked out sample by sample, and costs no collective."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft.api import pool
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError
from weft.frontend.capture import capture
from weft.ops.comm import is_comm
from weft.plan.spec import Spec
from weft.transform.noise import Noise

BATCH, STEPS = 24, 60


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(m(batch[0]), batch[1])


def batch(n: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=gen)
    return x, (x[:, :4] + torch.randn(n, 4, generator=gen)).argmax(1)


def offline(samples: int = 4096) -> float:
    """tr(S) / |G|^2 from every sample's own gradient."""
    m = model()
    x, y = batch(samples, 10**6)
    params = {k: v.detach() for k, v in m.named_parameters()}

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(m, params, x[None]), y[None])

    grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(params, x, y)
    flat = torch.cat([g.flatten(1) for g in grads.values()], 1)
    spread = flat.var(0).sum()
    return float(spread / (flat.mean(0).square().sum() - spread / samples))


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero1", "dp2,zero3", "dp2,shards3"])
def test_agrees_with_every_samples_gradient(plan: str, tmp_path: Path) -> None:
    want = offline()

    def job(rank: int) -> None:
        m = model()
        step = parallelize(m, loss, torch.optim.SGD(m.parameters(), lr=0.0), batch(BATCH, 0), plan=plan, noise=True)
        step.noise.keep = 0.999
        for i in range(STEPS):
            step(batch(BATCH, i))
        assert step.noise.steps == STEPS - 1
        assert abs(step.noise.scale / want - 1) < 0.2, (step.noise.scale, want)
        told = [None, None]
        dist.all_gather_object(told, step.noise.scale)
        assert told[0] == told[1]

    on_ranks(2, job, tmp_path)


def test_training_and_check_are_the_same(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        losses = []
        for noise in (False, True):
            m = model()
            step = parallelize(m, loss, torch.optim.AdamW(m.parameters(), lr=0.1), batch(BATCH, 0), plan="dp2,zero1", noise=noise)
            losses.append([step(batch(BATCH, i)).item() for i in range(3)])
            step.check(batch(BATCH, 9))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)

    on_ranks(2, job, tmp_path)


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero1", "dp2,zero3"])
def test_no_further_collective(plan: str) -> None:
    m = model()
    captured = capture(m, batch(BATCH, 0), loss, torch.optim.AdamW(m.parameters()))
    plain, told = (pool.prepare(captured, Spec.parse(plan), pool.PlanRequest(noise=n)) for n in (False, True))
    count = [Counter(n.op.name for n in p.nodes if is_comm(n)) for p in (plain, told)]
    assert count[1] <= count[0]


def test_only_copies_can_tell() -> None:
    m = model()
    captured = capture(m, batch(BATCH, 0), loss, torch.optim.AdamW(m.parameters()))
    with pytest.raises(PlanError, match="the noise scale needs data-parallel replicas"):
        pool.prepare(captured, Spec(tp=2), pool.PlanRequest(noise=True))


def test_what_two_numbers_say() -> None:
    noise = Noise()
    assert noise.scale != noise.scale
    spread, strength, n, size = 6.0, 2.0, 4, 32
    for _ in range(3):
        noise.add(strength + n * spread / size, strength + spread / size, size, n)
    assert abs(noise.scale - 3.0) < 1e-12
