"""A plan that changes the model is refused; a loss that is no number does no harm; a deterministic run gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api import pool, safety
from weft.api.parallelize import parallelize
from weft.api.step import Step
from weft.core.errors import InvalidProgram, PlanError, RuntimeFault
from weft.core.program import new_program


def made(plan: str = "dp1", *, name: str = "gpt2", **options: Any) -> tuple[Step, Any]:
    w = zoo.small(name, dtype=torch.float64, **({"dropout": options.pop("dropout")} if "dropout" in options else {}))
    return parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan, **options), w


def poisoned(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with one number in it that is none."""
    key = next(k for k, x in batch.items() if x.is_floating_point())
    bad = batch[key].clone()
    bad.view(-1)[3] = float("nan")
    return {**batch, key: bad}


# -- plans -----------------------------------------------------------------------------------------------------------------------------


def test_every_plan_is_checked_unless_told_not_to() -> None:
    step, _ = made(name="mlp")
    assert step.report is not None and step.report.equal and step.report.derived == step.report.outputs
    assert made(name="mlp", check=False)[0].report is None


@pytest.mark.parametrize("plan", ["dp2,zero1", "dp2,tp2,sp"])
def test_a_fused_update_is_derived_too(plan: str) -> None:
    from weft.frontend.capture import capture
    from weft.plan.spec import Spec

    w = zoo.small("gpt2", dtype=torch.float64)
    captured = capture(w.model, w.example(8), w.loss, torch.optim.AdamW(w.model.parameters()))
    report = safety.verified(captured.program, pool.prepare(captured, Spec.parse(plan)))
    assert report is not None and report.evaluated == 0


def test_a_plan_that_computes_something_else_is_refused() -> None:
    step, _ = made(name="mlp", check=False)
    p = step.captured.program
    wrong = new_program(p.name, p.mesh, p.inputs, {n: o * 2.0 if n == "loss" else o for n, o in p.outputs}, state=p.state)
    with pytest.raises(PlanError, match="the plan changes what the model computes") as e:
        safety.verified(p, wrong)
    assert "mul" in str(e.value) and "check=False" in str(e.value)


class Adaptive(torch.nn.Module):
    """How many rows each cluster of classes takes is what the batch says: drawn labels do not run its program."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.classes = torch.nn.Linear(6, 8), torch.nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10], div_value=2.0)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.classes(torch.tanh(self.first(batch["x"])), batch["y"]).loss


def adaptive() -> tuple[torch.nn.Module, Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model = Adaptive().double()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), "y": torch.tensor([0, 11, 5, 3, 19, 7, 1, 15])}
    return model, lambda m, b: m(b), torch.optim.SGD(model.parameters(), lr=0.5), batch


def test_a_program_that_only_the_batch_runs_is_compared_on_the_batch(tmp_path: Path) -> None:
    model, loss, optimizer, batch = adaptive()
    want = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        want.append(value.item())

    def job(rank: int) -> None:
        model, loss, optimizer, batch = adaptive()
        step = parallelize(model, loss, optimizer, batch, plan="tp2")
        assert rank or (step.report is not None and step.report.equal and step.report.evaluated > 0)
        torch.testing.assert_close([step(batch).item() for _ in range(3)], want, rtol=1e-12, atol=0)

    on_ranks(2, job, tmp_path)


def test_a_wrong_plan_of_such_a_program_is_refused() -> None:
    model, loss, optimizer, batch = adaptive()
    captured = parallelize(model, loss, optimizer, batch, check=False).captured
    p = captured.program
    wrong = new_program(p.name, p.mesh, p.inputs, {n: o * 2.0 if n == "loss" else o for n, o in p.outputs}, state=p.state)
    with pytest.raises(PlanError, match="the plan changes what the model computes"):
        safety.verified(p, wrong, lambda: captured.inputs(batch))
    with pytest.raises(InvalidProgram, match="cannot be run as the program says"):
        safety.verified(p, wrong)


# -- losses that are no number ---------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_told() -> None:
    step, w = made(name="mlp")
    step(w.example(8))
    with pytest.raises(RuntimeFault, match="the loss is nan at step 2") as e:
        step(poisoned(w.example(8)))
    assert "the batch has such values in" in str(e.value) and 'on_nan="skip"' in str(e.value)


def test_it_can_be_ignored() -> None:
    step, w = made(name="mlp", on_nan="ignore")
    assert step(poisoned(w.example(8))).isnan()


def test_another_word_is_refused() -> None:
    with pytest.raises(PlanError, match="on_nan='explode'") as e:
        made(name="mlp", on_nan="explode")
    assert "raise, skip, ignore" in str(e.value)


@pytest.mark.parametrize("plan", ["dp2", "dp2,zero1", "tp2"])
def test_a_step_that_is_skipped_changes_nothing(plan: str, tmp_path: Path) -> None:
    def losses(plan: str, bad: bool) -> list[float]:
        step, w = made(plan, name="mlp", on_nan="skip", clip=1.0)
        out = []
        for i in range(4):
            if bad and i == 2:
                assert step(poisoned(w.example(8, seed=9))).isnan()
            out.append(step(w.example(8, seed=i)).item())
        assert step.skipped == bad and step.steps == 4 + bad
        return out

    want = losses("dp1", bad=False)
    on_ranks(2, lambda rank: torch.testing.assert_close(losses(plan, bad=True), want, rtol=1e-9, atol=1e-9), tmp_path)


def test_on_an_accelerator_a_loss_is_looked_at_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(safety, "is_accelerator", lambda device: True)
    monkeypatch.setattr(safety, "pinned", lambda size, dtype, device: torch.empty(size, dtype=dtype))
    monkeypatch.setattr(safety, "mark", lambda device: order.append("marked") or (lambda: order.append("waited")))
    seen = safety.Losses("raise")
    seen.see(torch.tensor(float("nan")), None, 1, {})
    assert order == ["marked"]
    with pytest.raises(RuntimeFault, match="the loss is nan at step 1"):
        seen.see(torch.tensor(0.0), None, 2, {})
    assert order[:3] == ["marked", "marked", "waited"]


# -- the same bits ---------------------------------------------------------------------------------------------------------------------


def test_two_deterministic_runs_give_the_same_bits(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        for plan in ("dp2,zero1", "tp2"):
            runs = []
            for _ in range(2):
                step, w = made(plan, dropout=0.1, deterministic=True)
                losses = [step(w.example(8, seed=i)) for i in range(3)]
                runs.append((losses, step.state_dict()))
            (first, state), (again, other) = runs
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            assert all(torch.equal(x, other[n]) for n, x in state.items())

    on_ranks(2, job, tmp_path)


def test_another_word_for_deterministic_is_refused() -> None:
    with pytest.raises(PlanError, match="deterministic='any plans' is no option") as e:
        made(name="mlp", deterministic="any plans")
    assert 'deterministic="any plan"' in str(e.value)


def test_determinism_ends_with_the_step() -> None:
    step, w = made(name="mlp", deterministic=True)
    step(w.example(8))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_gpu_needs_a_setting_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(RuntimeFault, match="deterministic=True on a GPU") as e:
        safety.require_exact(torch.device("cuda"))
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in str(e.value)
