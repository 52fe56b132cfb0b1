"""What a training loop needs beside the step: schedulers, groups, clipping, accumulation, data sharding, ranks that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.data import Rows
from weft.api.parallelize import parallelize
from weft.core.errors import RuntimeFault

STEPS = 4


def gpt() -> Any:
    return zoo.small("gpt2", dtype=torch.float64, dropout=0.0)


def with_groups(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Norms and biases without decay and at another rate."""
    small = [p for p in model.parameters() if p.ndim < 2]
    large = [p for p in model.parameters() if p.ndim > 1]
    return kind([{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2, **options)


def schedule(optimizer: Any) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])


def torch_losses(clip: float) -> tuple[list[float], list[float]]:
    w = gpt()
    optimizer = with_groups(w.model)
    scheduler = schedule(optimizer)
    losses, norms = [], []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = w.loss(w.model, w.example(8, seed=i))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(w.model.parameters(), clip)))
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, norms


def test_schedulers_groups_clipping_and_accumulation_together(tmp_path: Path) -> None:
    want, norms = torch_losses(clip=0.5)

    def job(rank: int) -> None:
        for plan, accumulate in (("dp2,zero1", 1), ("dp2,zero3", 2), ("tp2", 2)):
            w = gpt()
            optimizer = with_groups(w.model)
            step = parallelize(w.model, w.loss, optimizer, w.example(8), plan=plan, clip=0.5, accumulate=accumulate)
            scheduler = schedule(optimizer)
            for i in range(STEPS):
                assert step(w.example(8, seed=i)).item() == pytest.approx(want[i], abs=1e-8), (plan, i)
                assert step.grad_norm is not None and float(step.grad_norm) == pytest.approx(norms[i], abs=1e-8), (plan, i)
                scheduler.step()

    on_ranks(2, job, tmp_path)


class Words(Dataset[Any]):
    """Sample k is known by its number."""

    def __init__(self, w: Any, samples: int) -> None:
        whole = w.example(samples, seed=3)
        self.samples = [{name: x[i] for name, x in whole.items()} for i in range(samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


def losses(plan: str, restart: int | None = None) -> list[float]:
    w = gpt()
    data = Words(w, 17)  # the last batch is one sample, fewer than there are ranks
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(4), plan=plan)
    out: list[float] = []
    for stop in (restart or 6, 6):
        for batch in DataLoader(data, batch_sampler=step.rows(len(data), seed=5)):
            if step.steps == stop:
                break
            out.append(step(batch).item())
    return out


def test_every_plan_reads_its_rows_of_the_same_batches(tmp_path: Path) -> None:
    want = losses("dp1")
    assert losses("dp1", restart=3) == want  # a loader made again goes on where the step is

    def job(rank: int) -> None:
        for plan in ("dp2", "cp2", "tp2"):
            torch.testing.assert_close(losses(plan), want, rtol=1e-8, atol=1e-8, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_an_epoch_reads_every_sample_once() -> None:
    batches = iter(Rows(11, 4, torch.arange, seed=1))
    first = [next(batches) for _ in range(3)]
    assert sorted(i for rows in first for i in rows) == list(range(11)) and len(first[2]) == 3
    assert [next(batches) for _ in range(3)] != first


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_tensor_that_all_samples_share_does_not_say_how_many_they_are(accumulate: int) -> None:
    """A mask [6, 6] comes first in batches of four."""
    model = nn.Linear(6, 1)
    batch = {"mask": torch.ones(6, 6).tril(), "x": torch.randn(4, 6), "y": torch.randn(4, 1)}

    def loss(model: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(b["x"] @ b["mask"]) - b["y"]).square().mean()

    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, plan="dp1", accumulate=accumulate)
    assert next(iter(step.rows(12, shuffle=False))) == [0, 1, 2, 3]


def test_a_small_data_set_is_refused() -> None:
    with pytest.raises(RuntimeFault, match="smaller than a batch"):
        Rows(3, 4, torch.arange, drop_last=True)


# -- ranks that differ -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "needle"),
    [("plan", "plan=dp2"), ("model", "parameter tokens.weight: torch.float64 [67, 32]"), ("batch", "batch.tokens: torch.int64 [8, 16]")],
)
def test_ranks_that_differ_are_named(what: str, needle: str, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        odd = rank == 1
        w = zoo.small("gpt2", dtype=torch.float64, **({"hidden": 64} if odd and what == "model" else {}))
        example = w.example(6 if odd and what == "batch" else 8)
        plan = "tp2" if odd and what == "plan" else "dp2"
        with pytest.raises(RuntimeFault, match="ranks disagree about set-up") as e:
            parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters()), example, plan=plan)
        assert "rank 0 has `" in str(e.value) and "rank 1 has `" in str(e.value) and needle in str(e.value)

    on_ranks(2, job, tmp_path)


class Notes(torch.nn.Module):
    """Writes buffers that it never reads: in place, and by putting another tensor in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.mean.copy_(out.detach().mean(0))
        self.largest = out.detach().abs().max()
        return out


def test_buffers_that_are_written_and_never_read_are_kept() -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Notes().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    data = torch.randn(3, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, optimizer = made()
    for x in data:
        optimizer.zero_grad()
        loss(plain, x).backward()
        optimizer.step()
    model, optimizer = made()
    step = parallelize(model, loss, optimizer, data[0])
    for x in data:
        step(x)
    step.sync_model()
    for (name, want), got in zip(plain.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=name)
