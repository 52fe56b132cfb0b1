"""A captured step is compared with the user's own module in plain torch before it runs, and nothing of that is noticed."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from tests.testing.plant import Facet, plant
from weft.api import check_cost
from weft.api import parallelize as parallelize_module
from weft.api.parallelize import parallelize
from weft.api.step import Step
from weft.core.errors import CaptureError
from weft.frontend.capture.aten import norms
from weft.ops import attention


def made(name: str = "gpt2", dtype: torch.dtype = torch.float32, plan: str = "dp1", **options: Any) -> tuple[Step, Any]:
    settings = {"dropout": options.pop("dropout")} if "dropout" in options else {}
    w = zoo.small(name, dtype=dtype, **settings)
    return parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan, **options), w


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Loud(Net):
    """It says when it is run on values, and counts."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not isinstance(x, torch._subclasses.FakeTensor):
            print("called")
        return super().forward(x)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def net(**options: Any) -> tuple[Step, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = options.pop("model", None) or Net().double()
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    example = options.pop("example", None)
    given = torch.randn(8, 6, dtype=torch.float64) if example is None else example
    return parallelize(model, options.pop("loss", squares), optimizer, given, **options), model, optimizer


# -- what is equal ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
def test_a_step_is_compared_with_torch_dropout_and_all(dtype: torch.dtype, limit: float) -> None:
    step, _ = made(dtype=dtype, dropout=0.1, clip=0.5)
    assert step.verified is not None and step.verified.compared > 100 and step.verified.worst < limit
    assert "tensors equal torch's on the example" in str(step.verified)


def test_micro_batches_and_pipelines_are_too() -> None:
    step, _ = made(plan="micro2")
    assert step.verified is not None and step.verified.compared > 50


def test_a_sparse_gradient_is_compared_as_the_dense_one_it_is() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).double()
    given = torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(0))
    step, _, _ = net(model=model, example=given, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert step.verified is not None and step.verified.worst < 1e-12


def test_it_can_be_left_out() -> None:
    assert net(check=False)[0].verified is None


def lose_causal_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *xs, **how: plain(*xs, **{**how, "causal": False}))


# -- what is not -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_lost_causal_mask_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_causal_masks(monkeypatch)
    with pytest.raises(CaptureError, match="the captured step of GPT does not compute what torch does") as e:
        made(dtype=dtype)
    assert "blocks.0.attention" in str(e.value) and "of its largest value" in str(e.value) and "check=False" in str(e.value)


def test_another_probability_of_dropout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = norms.drop
    monkeypatch.setattr(norms, "drop", lambda r, x, p: plain(r, x, p / 2))
    with pytest.raises(CaptureError, match=r"the first module whose output the program does not compute is blocks\.0\.norm1"):
        made(dropout=0.2)


def test_a_wrong_gradient_is_told_from_a_wrong_output() -> None:
    with plant(Facet("tanh", "vjp", lambda n, ct: (ct,))), pytest.raises(CaptureError, match=r"first\.(weight|bias)") as e:
        net()
    assert "every module's output is right, so it is the backward pass or the update" in str(e.value)


def test_a_wrong_update_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.frontend.capture import optimizers

    monkeypatch.setattr(optimizers, "_TRACED", {})
    monkeypatch.setattr(optimizers, "runs_the_same", lambda *_: True)  # so that the first op that is tried, Adam with decay in the gradient, is taken
    with pytest.raises(CaptureError, match=r"(after the update|exp_avg_sq of .*) differs"):
        net()


def test_a_step_that_torch_cannot_run_is_told() -> None:
    class Odd(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, torch._subclasses.FakeTensor):
                raise RuntimeError("no such kernel here")
            return super().forward(x)

    with pytest.raises(CaptureError, match="torch itself cannot run this step") as e:
        net(model=Odd().double())
    assert "no such kernel here" in str(e.value)


def test_every_rank_raises_alike(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        norms.drop, plain = lambda r, x, p: plain(r, x, p / 2), norms.drop
        with pytest.raises(CaptureError, match="does not compute what torch does"):
            made(plan="dp2", dropout=0.2)

    on_ranks(2, job, tmp_path)


# -- what is not noticed -----------------------------------------------------------------------------------------------------------------


def test_nothing_of_it_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    model = Loud().double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    numbers = torch.get_rng_state(), random.getstate()
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize(model, squares, optimizer, torch.ones(8, 6, dtype=torch.float64))
    assert model.calls == 0 and "called" not in capsys.readouterr().out
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0]) and random.getstate() == numbers[1]


class Locked(Loud):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_run_itself_and_put_back() -> None:
    model = Locked().double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    step, _, optimizer = net(model=model)
    assert step.verified is not None and step.verified.compared
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and model.calls == 0 and all(p.grad is None for p in model.parameters())


def test_a_loss_that_takes_the_module_from_around_it() -> None:
    model = Net().double()
    step, _, _ = net(model=model, loss=lambda _, batch: squares(model, batch))
    assert step.verified is not None and step.verified.compared


# -- what it takes -----------------------------------------------------------------------------------------------------------------------


def test_fewer_samples_where_all_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cost, "seconds", lambda program, device: 60.0)
    step, _ = made("mlp")
    assert step.verified is not None and step.verified.samples == "2 of the example's 8 samples"


def test_what_is_not_compared_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cost, "seconds", lambda program, device: 6000.0)
    words = "Net was compared with torch in parts: 3 tensors equal torch's on updates alone; .* what stands around the blocks was not compared"
    with pytest.warns(UserWarning, match=words):
        step, _, _ = net()
    assert step.verified is not None and "the full step would take some 6000 s" in str(step.verified)


def test_memory_is_predicted() -> None:
    step, _, _ = net()
    small, large = check_cost.alive(step.captured.program), check_cost.memory(step.captured.program, 1)
    assert 0 < small < large < 1e6
    assert check_cost.memory(step.captured.program, 8) < large


# -- later -------------------------------------------------------------------------------------------------------------------------------


def test_a_step_is_compared_with_torch_from_where_it_is() -> None:
    step, w = made(dtype=torch.float64, dropout=0.1)
    for i in range(2):
        step(w.example(8, seed=i))
    assert step.check(w.example(8, seed=5)) < 1e-9


def test_so_is_one_in_micro_batches() -> None:
    step, w = made(dtype=torch.float64, plan="micro2", clip=0.5)
    step(w.example(8))
    assert 0 < step.check(w.example(8, seed=5)) < 1e-9


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_a_check_finds_what_capture_lost(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_causal_masks(monkeypatch)
    step, w = made(plan=plan, check=False)
    with pytest.raises(CaptureError, match="does not compute what torch does"):
        step.check(w.example(8))


def test_ranks_agree_on_a_check(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        step, w = made(dtype=torch.float64, plan="dp2,zero1")
        step(w.example(8))
        assert 0 < step.check(w.example(8)) < 1e-9

    on_ranks(2, job, tmp_path)


# -- programs made later -------------------------------------------------------------------------------------------------------------------


class Modes(Net):
    """Of mode `b` the trace makes something else than torch does."""

    mode = "a"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.mode == "a":
            return y
        return y * 1.001 if self.mode == "b" and isinstance(x, torch._subclasses.FakeTensor) else y.square()


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_a_program_made_later_is_compared_too(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    own = parallelize_module
    plain = own.check_against_torch
    monkeypatch.setattr(own, "check_against_torch", lambda *xs: (looked.append(xs), plain(*xs))[1])
    model, batch = Modes().double(), torch.randn(8, 6, dtype=torch.float64)
    step, _, _ = net(model=model, plan=plan)
    for mode in ("a", "c", "a", "c"):
        model.mode = mode
        step(batch)
    assert len(looked) == 2 and step.verified is not None and step.verified.compared  # each program once
    model.mode = "b"
    before = {n: x.clone() for n, x in step.state.items()}
    for _ in range(2):
        with pytest.raises(CaptureError, match="the captured step of Modes does not compute what torch does"):
            step(batch)
    assert step.steps == 4 and all(torch.equal(x, before[n]) for n, x in step.state.items())
    model.mode = "a"
    step(batch)


@pytest.mark.parametrize("plan", ["dp1", "micro2"])
def test_so_is_the_loss_in_evaluation_mode(plan: str) -> None:
    class Odd(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 1.001 if not self.training and isinstance(x, torch._subclasses.FakeTensor) else y

    step, _, _ = net(model=Odd().double(), plan=plan)
    with pytest.raises(CaptureError, match="the captured loss of Odd does not compute what torch does"):
        step.eval(torch.randn(8, 6, dtype=torch.float64))
    step, _, _ = net(plan=plan)
    step.eval(torch.randn(8, 6, dtype=torch.float64))


def test_ranks_compare_it_from_rows_of_their_own(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model = Modes().double()
        step, _, _ = net(model=model, plan="dp2")
        rows = torch.randn(4, 6, dtype=torch.float64)
        model.mode = "c"
        step(rows)
        assert rank or step.verified.compared > 4
        model.mode = "b"
        with pytest.raises(CaptureError, match="does not compute what torch does"):
            step(rows)

    on_ranks(2, job, tmp_path)


class Cancelled(torch.nn.Module):
    """Its biases stand before a batch norm of two samples, so their gradients are rounding alone, and exactly zero in some order of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6)), torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return self.norm(x)


def test_gradients_that_are_rounding_alone_are_torchs() -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        model = Cancelled()
        adam = torch.optim.Adam(model.parameters())
        step = parallelize(model, lambda m, x: m(x).square().mean(), adam, torch.randn(8, 8), "dp1,micro4", allow_micro_mean=True)
        assert step.verified is not None
