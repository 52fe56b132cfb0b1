"""A step whose batch follows the noise: one state over all batches, and all ranks take the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench._adaptive import Adaptive
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.api.step import Step
from weft.core.errors import PlanError

SIZES = (8, 16)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(m(batch[0]), batch[1])


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=gen)
    return x, x[:, :3].argmax(1)


def test_one_state_over_all_batches(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        m, alone = model(), model()
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        other = torch.optim.AdamW(alone.parameters(), lr=0.1)

        def make(batch: int) -> Step:
            return parallelize(m, loss, opt, draw(batch, 0), plan="dp2,zero1", noise=True)

        step, taken = Adaptive(make, SIZES, every=8), []
        for i in range(20):
            batch = draw(step.batch, i)
            taken.append(step.batch)
            other.zero_grad()
            want = loss(alone, batch)
            want.backward()
            other.step()
            torch.testing.assert_close(step(batch), want.detach(), rtol=1e-4, atol=1e-5)
        told = [None, None]
        dist.all_gather_object(told, taken)
        assert told[0] == told[1] and set(taken) == set(SIZES) and step.noise.steps > 10
        assert step.chosen[0][:2] == (3, 16)

    on_ranks(2, job, tmp_path)


def test_what_is_lacking_is_told() -> None:
    with pytest.raises(PlanError, match="no batch to choose from"):
        Adaptive(lambda batch: None, ())  # type: ignore[arg-type, return-value]
    m = model()
    plain = Adaptive(lambda batch: parallelize(m, loss, torch.optim.SGD(m.parameters(), lr=0.1), draw(batch, 0)), (8,))
    with pytest.raises(PlanError, match="the step does not measure noise"):
        plain(draw(8, 0))
