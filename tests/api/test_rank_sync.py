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


def test_batch_norms_over_ranks(tmp_path):
    """Those of torch wait for each other in the forward pass, on GPUs alone; a step has the full batch anyway."""

    def job(rank: int) -> None:
        model, mirror = nn.SyncBatchNorm.convert_sync_batchnorm(net(0)), net(0)
        step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.05), batches()[0], "dp2")
        theirs = torch.optim.SGD(mirror.parameters(), lr=0.05)
        for batch in batches():
            theirs.zero_grad()
            want = loss(mirror, batch)
            want.backward()
            theirs.step()
            torch.testing.assert_close(step(batch), want.detach(), atol=1e-11, rtol=1e-11)
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            model(batches()[0])  # outside of the step it is torch's own

    on_ranks(2, job, tmp_path)


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


def test_a_scheduler_stepped_on_one_rank_alone_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_TIMEOUT", "3")

    def job(rank: int) -> None:
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step = parallelize(model, loss, optimizer, batches()[0], "dp2", check=False)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if rank == 0:
            with contextlib.suppress(RuntimeFault):  # its peer is told, and leaves
                [step(batches()[0]) for _ in range(4)]
        else:
            with pytest.raises(RuntimeFault, match=r"rank 1 steps with other settings than rank 0[\s\S]*lr.0 is 0.05 on rank 0, 0.0050"):
                [(step(batches()[0]), scheduler.step()) for _ in range(40)]

    on_ranks(2, job, tmp_path)


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


# -- batches of other shapes -----------------------------------------------------------------------------------------------------------


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["x"]).square().sum() * batch["w"]


def sized(*sizes: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    made = [torch.randn(n, 3, dtype=torch.float64, generator=draw) for n in sizes]
    return [{"x": x, "w": x.new_tensor(len(x))} for x in made]


def trains_as_torch(plan: str, many: list[Any], bring: Any = lambda batch: batch, optimizer: Any = torch.optim.SGD) -> Any:
    """Steps under a plan, and torch's on the whole batches; `bring` is what a rank is given of one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    mirror = copy.deepcopy(model)
    theirs = optimizer(mirror.parameters(), lr=0.01)
    step = parallelize(model, summed, optimizer(model.parameters(), lr=0.01), many[0], plan, check=False)
    for batch in many:
        theirs.zero_grad()
        want = summed(mirror, batch)
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(bring(batch)), want.detach(), atol=1e-11, rtol=1e-11)
    for got, want in zip(step.sync_model().parameters(), mirror.parameters(), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)
    return step


def test_batches_of_other_shapes(tmp_path):
    """Among them one that measures what a rank's part of the others does: its values tell that it is whole."""

    def job(rank: int) -> None:
        for plan in ("dp2,zero1", "tp2", "pp2,micro4"):
            trains_as_torch(plan, sized(8, 8, 4, 5, 8, 4, 1))

    on_ranks(2, job, tmp_path)


def test_parts_of_batches_of_other_shapes(tmp_path):
    def job(rank: int) -> None:
        def mine(batch: Any) -> Any:
            return {**batch, "x": batch["x"].chunk(2)[rank]}

        trains_as_torch("dp2", sized(8, 8, 4, 6, 8, 16), mine)
        uneven = sized(8, 8, 5)
        step = trains_as_torch("dp2", uneven[:2], mine)
        with pytest.raises(RuntimeFault, match=r"batch 'x' is sharded otherwise than the plan shards it[\s\S]*\[3, 3\], \[2, 3\] on the ranks, of \[5, 3\]"):
            step({**uneven[2], "x": uneven[2]["x"].split([2, 3])[rank]})

    on_ranks(2, job, tmp_path)


def test_ranks_that_read_other_data_are_told(tmp_path):
    def job(rank: int) -> None:
        step = trains_as_torch("tp2", sized(8))
        with pytest.raises(RuntimeFault, match=r"ranks were given different batches: 'x'[\s\S]*the plan does not shard it along dp, tp"):
            step(sized(4, 4)[rank])

    on_ranks(2, job, tmp_path)


def test_a_shape_that_is_new_to_one_rank_alone_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_TIMEOUT", "3")

    def job(rank: int) -> None:
        step = trains_as_torch("dp2", sized(8))
        if rank == 1:
            with pytest.raises(RuntimeFault, match="rank 0 did not answer about the shapes of a batch"):
                step(sized(6)[0])

    on_ranks(2, job, tmp_path)


# -- what Python does on one rank alone ------------------------------------------------------------------------------------------------


class Logging(nn.Module):
    """Rank 0 counts its calls, and every other call is counted twice as much."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.inner, self.counts, self.calls = nn.Linear(3, 2), counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:the step changes Python")
@pytest.mark.parametrize("plan", ["dp2", "pp2,micro2"])
def test_python_that_one_rank_alone_changes(plan, tmp_path):
    """All trace at every call, and what they trace is the same; so is what one rank's loop changes and no step reads."""

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(Logging(rank == 0), nn.Tanh(), nn.Linear(2, 2)).double()
        model.seen = 0
        mirror = copy.deepcopy(model)
        theirs = torch.optim.SGD(mirror.parameters(), lr=0.05)
        step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.05), batches()[0], plan, check=False)
        assert step.forms.impure
        for batch in batches():
            theirs.zero_grad()
            want = loss(mirror, batch)
            want.backward()
            theirs.step()
            torch.testing.assert_close(step(batch), want.detach(), atol=1e-11, rtol=1e-11)
        assert model[0].calls == (4 if rank == 0 else 0) and len(step.forms.kept) == 1

    on_ranks(2, job, tmp_path)


def test_a_value_that_one_rank_alone_changes_and_no_step_reads(tmp_path):
    def job(rank: int) -> None:
        model = net(0)
        step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.05), batches()[0], "dp2", check=False)
        for i, batch in enumerate(batches()):
            model.epoch = i if rank == 0 else 0
            model[0].notes = ["a"] * (i * rank)
            step(batch)

    on_ranks(2, job, tmp_path)
