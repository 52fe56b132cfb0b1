"""Values that a user writes into the module after `parallelize` are the step's, as they would be torch's, or refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft import parallelize
from weft.core.errors import RuntimeFault


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def made(seed: int = 0, norm: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    if not norm:
        model.norm = nn.Identity()
    return model.double()


def batches(many: int = 4) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(8, 6, dtype=torch.float64) for _ in range(many)]


def steps(plan: str = "dp1", norm: bool = True) -> tuple[Any, nn.Module, Callable[[Tensor], Tensor], nn.Module]:
    """weft's step and torch's, of two models alike."""
    ours, theirs = made(norm=norm), made(norm=norm)
    step = parallelize(ours, squares, torch.optim.AdamW(ours.parameters(), lr=0.05), batches()[0], plan=plan)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.05)

    def plain(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = squares(theirs, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, ours, plain, theirs


def init(model: nn.Module) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p)


def put(model: nn.Module) -> None:
    model.first.weight.data = model.first.weight.data * 2


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda m: m.load_state_dict(made(1).state_dict()),
    "init": init,
    "one of them": lambda m: nn.init.ones_(m.first.weight),
    "data": lambda m: [p.data.mul_(0.5) for p in m.parameters()],
    "data replaced": put,
    "a buffer": lambda m: m.norm.running_mean.fill_(0.3),
    "a buffer, and data": lambda m: (m.norm.running_mean.fill_(0.3), m.first.weight.data.mul_(0.5)),
    "another module": lambda m: setattr(m, "last", made(1).last),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_before_the_first_step_is_trained(write: str) -> None:
    step, ours, plain, theirs = steps()
    for model in (ours, theirs):
        WRITES[write](model)
    for batch in batches():
        assert torch.allclose(step(batch), plain(batch), rtol=0, atol=1e-9)
    assert_alike(step.sync_model(), theirs)


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_so_is_what_is_written_after_a_sync(plan: str) -> None:
    step, ours, plain, theirs = steps(plan, norm=plan == "dp1")  # a batch norm is not that of the whole batch in parts of it
    for i, batch in enumerate(batches()):
        assert torch.allclose(step(batch), plain(batch), rtol=0, atol=1e-9)
        if i == 1:
            step.sync_model()
            for model in (ours, theirs):
                with torch.no_grad():
                    model.last.weight.mul_(0.5)
    assert_alike(step.sync_model(), theirs)


def test_what_is_written_last_is_kept(tmp_path: Path) -> None:
    """No step follows that would take it: whoever asks for the state does."""
    for ask in (lambda s: s.sync_model(), lambda s: s.state_dict(), lambda s: s.checkpoints(tmp_path).save(), lambda s: s.save_pretrained(tmp_path / "hf")):
        step, ours, _, _ = steps()
        step(batches()[0])
        step.sync_model()
        with torch.no_grad():
            ours.last.weight.clamp_(-0.1, 0.1)
        ask(step)
        assert torch.equal(ours.last.weight, step.full("param.last.weight")) and ours.last.weight.abs().max() <= 0.1


def assert_alike(ours: nn.Module, theirs: nn.Module) -> None:
    for (n, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9), n


@pytest.mark.parametrize("write", WRITES)
def test_a_write_into_old_values_is_refused(write: str) -> None:
    step, ours, _, _ = steps()
    step(batches()[0])
    WRITES[write](ours)
    with pytest.raises(RuntimeFault, match="values were written into the module while the step has others") as e:
        step(batches()[1])
    assert "step.sync_model(), then write" in str(e.value) and "written after step 1" in str(e.value)
    step.sync_model()  # gives up what was written
    step(batches()[1])


def test_what_weft_writes_itself_is_no_one_elses() -> None:
    step, ours, plain, _ = steps()
    for i, batch in enumerate(batches()):
        assert torch.allclose(step(batch), plain(batch), rtol=0, atol=1e-9)
        if i % 2:
            step.sync_model()
            step.sync_optimizer()
            step.check(batch)
            step.eval(batch)
            ours.eval()
            assert torch.isfinite(ours(batch)).all()
            ours.train()


def test_another_state_of_the_optimizer_is_refused() -> None:
    step, _, _, _ = steps()
    step(batches()[0])
    saved = copy.deepcopy(step.sync_optimizer().state_dict())
    step(batches()[1])
    step.optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeFault, match="the optimizer's state was changed after the step was made") as e:
        step(batches()[2])
    assert "before weft.parallelize" in str(e.value)


def test_a_model_that_cannot_be_copied_is_not_taken_for_written() -> None:
    model = made()
    model.lock = threading.Lock()  # type: ignore[assignment]
    step = parallelize(model, squares, torch.optim.AdamW(model.parameters()), batches()[0])
    for batch in batches():
        step(batch)
        step.check(batch)


def test_every_rank_takes_its_part_of_what_is_written(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        step, ours, plain, theirs = steps("dp2,zero3")
        for model in (ours, theirs):
            model.load_state_dict(made(1).state_dict())
        for batch in batches():
            assert torch.allclose(step(batch), plain(batch), rtol=0, atol=1e-9)
        assert_alike(step.sync_model(), theirs)

    on_ranks(2, job, tmp_path)


def test_ranks_that_write_other_values_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        step, ours, _, _ = steps("dp2")
        ours.load_state_dict(made(rank + 1).state_dict())
        with pytest.raises(RuntimeFault, match="ranks have written other values into the module"):
            step(batches()[0])

    on_ranks(2, job, tmp_path)


class Scaled(nn.Module):
    """A number of Python's in the forward pass: another one means another program."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.scale


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("change", ["a number in Python", "another shape"])
def test_updates_synced_back_are_counted_once_by_a_later_program(kind: type[torch.optim.Optimizer], change: str) -> None:
    ours = Scaled().double()
    theirs = copy.deepcopy(ours)
    mine, plain = (kind(m.parameters(), lr=0.1) for m in (ours, theirs))  # type: ignore[call-arg]
    drawn = torch.randn(6, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = parallelize(ours, lambda m, x: m(x).square().mean(), mine, drawn[0])
    for i, x in enumerate(drawn):
        if i == 3:
            step.sync_optimizer()
            x = x[:5] if change == "another shape" else x
            ours.scale = theirs.scale = 2.0 if change == "a number in Python" else 1.0
        plain.zero_grad()
        want = theirs(x).square().mean()
        want.backward()
        plain.step()
        assert torch.allclose(step(x), want.detach(), rtol=0, atol=1e-12)
    for p, q in zip(step.sync_optimizer().state.values(), plain.state.values(), strict=True):
        assert float(p["step"]) == float(q["step"]) == 6


class Rivals(nn.Module):
    """One makes what another judges; each is trained by a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.double()


def judged(model: nn.Module, batch: Tensor) -> Tensor:
    made = model.maker(batch).detach()
    return nn.functional.softplus(torch.cat([model.judge(made), -model.judge(batch)])).mean()


def fooled(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.softplus(-model.judge(model.maker(batch))).mean()


def test_two_steps_of_one_module_hear_of_each_other(tmp_path: Path) -> None:
    def of(model: nn.Module) -> tuple[Any, Any]:
        return torch.optim.Adam(model.judge.parameters(), 1e-2), torch.optim.Adam(model.maker.parameters(), 1e-2)

    theirs = Rivals()
    optimizers = of(theirs)
    for batch in batches():
        for loss, optimizer in zip((judged, fooled), optimizers, strict=True):
            theirs.zero_grad()
            loss(theirs, batch).backward()
            optimizer.step()

    def job(rank: int) -> None:
        ours = Rivals()
        judges, fools = (parallelize(ours, f, o, batches()[0], plan="dp2", check=False) for f, o in zip((judged, fooled), of(ours), strict=True))
        for batch in batches():
            for step in (judges, fools):
                step(batch)
                step.sync_model()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-9, atol=1e-9)
        judges(batches()[0])
        with pytest.raises(RuntimeFault, match="another step of this module has trained it since"):
            fools(batches()[0])
        judges.sync_model()
        fools(batches()[0])
        with pytest.raises(RuntimeFault, match="another step"):
            judges.eval(batches()[0])

    on_ranks(2, job, tmp_path)
