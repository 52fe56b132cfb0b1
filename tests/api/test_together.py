"""Ranks that begin, or go on, with something else than rank 0: made alike, or refused in words."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.ranks import on_ranks
from weft import parallelize
from weft.core.errors import RuntimeFault


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def batches(many: int = 4) -> list[torch.Tensor]:
    return [torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(many)]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)).double()


def test_all_ranks_train_rank_0s_model(tmp_path, capfd):
    """Parameters, buffers and the state of the optimizer: as DDP begins, and as one process of torch goes on."""

    def job(rank: int) -> None:
        models = [net(0), net(7)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
        for m, o in zip(models, optimizers, strict=True):
            loss(m, batches()[0]).backward()
            o.step()
        mirror, theirs = copy.deepcopy((models[0], optimizers[0]))
        step = parallelize(models[rank], loss, optimizers[rank], batches()[0], "dp2,zero1")
        for batch in batches():
            theirs.zero_grad()
            want = loss(mirror, batch)
            want.backward()
            theirs.step()
            torch.testing.assert_close(step(batch), want.detach(), atol=1e-11, rtol=1e-11)
        for (name, got), want in zip(step.sync_model().state_dict().items(), mirror.state_dict().values(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11, msg=name)

    on_ranks(2, job, tmp_path)
    assert "rank 1 began with other values in" in capfd.readouterr().err


def test_nothing_is_said_of_ranks_alike(tmp_path, capfd):
    def job(rank: int) -> None:
        model = net(0)
        parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.05), batches()[0], "dp2", check=False)

    on_ranks(2, job, tmp_path)
    assert "began" not in capfd.readouterr().err


@pytest.mark.parametrize("what", ["rate", "shape", "batch", "number"])
def test_another_set_up_is_refused(what, tmp_path):
    def job(rank: int) -> None:
        odd = rank == 1
        model = nn.Linear(3, 3 if what == "shape" and odd else 2).double()
        batch = {"x": batches()[0][: 2 if what == "batch" and odd else 4], "k": 2 if what == "number" and odd else 1}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if what == "rate" and odd else 0.1)
        told = {"rate": "SGD group 0: lr=0.1`", "shape": r"parameter weight: torch.float64 \[2, 3\]", "batch": r"batch.x: torch.float64 \[4, 3\]",
                "number": "batch.k: 1"}[what]  # fmt: skip
        with pytest.raises(RuntimeFault, match=rf"ranks disagree about set-up[\s\S]*rank 0 has `{told}"):
            parallelize(model, lambda m, b: loss(m, b["x"]) * b["k"], optimizer, batch, "dp2")

    on_ranks(2, job, tmp_path)


def test_a_scheduler_stepped_on_one_rank_alone_is_noticed(tmp_path):
    def job(rank: int) -> None:
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = parallelize(model, loss, optimizer, batches()[0], "dp2", check=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if rank == 0:
            for _ in range(4):
                step(batches()[0])
        else:
            with pytest.raises(RuntimeFault, match=r"rank 1 steps with other settings than rank 0[\s\S]*lr.0 is 0.05 on rank 0, 0.0050"):
                [(step(batches()[0]), scheduler.step()) for _ in range(40)]

    _ended_together(job, tmp_path)


@pytest.mark.filterwarnings("ignore:the step changes Python")
def test_random_numbers_of_python_must_be_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_TIMEOUT", "5")

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * random.random()

    def job(rank: int) -> None:
        random.seed(rank)
        model = Drawn().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pytest.raises(RuntimeFault, match="ranks disagree about"):
            parallelize(model, loss, optimizer, batches()[0], "dp2", check=False)(batches()[0])

    on_ranks(2, job, tmp_path)


def test_a_value_changed_on_all_ranks_is_a_new_program(tmp_path):
    def job(rank: int) -> None:
        model, scale = net(0), [1.0]
        mirror = copy.deepcopy(model)
        theirs = torch.optim.SGD(mirror.parameters(), lr=0.05)
        times = lambda m, b: loss(m, b) * (scale[0] if scale[0] < 3 else 10.0)  # noqa: E731
        step = parallelize(model, times, torch.optim.SGD(model.parameters(), lr=0.05), batches()[0], "dp2,zero1", check=False)
        for i, batch in enumerate(batches()):
            scale[0] = 1.0 + i
            theirs.zero_grad()
            want = times(mirror, batch)
            want.backward()
            theirs.step()
            torch.testing.assert_close(step(batch), want.detach(), atol=1e-11, rtol=1e-11)

    on_ranks(2, job, tmp_path)


def _ended_together(job: Any, folder: Any) -> None:
    """One rank is told and leaves; the other, whose peer is gone, may end any way."""
    with contextlib.suppress(AssertionError):
        on_ranks(2, job, folder)
    told = folder / "error1"
    assert not told.exists(), told.read_text()
