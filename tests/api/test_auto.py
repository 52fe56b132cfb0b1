"""`plan="auto"`: all ranks take rank 0's choice, it is the fastest predicted that fits, and it trains as one process does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api import auto, planfile, pool
from weft.api.micro_steps import micro_steps
from weft.api.parallelize import parallelize
from weft.api.pipeline_plans import PipelinePlans
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.frontend.capture import Captured, capture
from weft.plan.pins import dtensor_pins, parse_pin
from weft.plan.plan import Plan, load, with_batch_shares
from weft.plan.setting import Setting
from weft.plan.spec import Spec

STEPS = 3


def workload() -> Any:
    w = zoo.small("gpt2", dtype=torch.float64)
    for m in w.model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    return w


def adamw(w: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(w.model.parameters(), lr=1e-2)


def torch_losses(batch: int) -> list[float]:
    w, out = workload(), []
    opt = adamw(w)
    for i in range(STEPS):
        opt.zero_grad()
        loss = w.loss(w.model, w.example(batch, seed=i))
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


def weft_losses(plan: str, batch: int, **more: Any) -> tuple[list[float], Any]:
    w = workload()
    step = parallelize(w.model, w.loss, adamw(w), w.example(batch), plan=plan, **more)
    return [step(w.example(batch, seed=i)).item() for i in range(STEPS)], step


@pytest.fixture(scope="module")
def captured() -> Captured:
    w = workload()
    return capture(w.model, w.example(8), w.loss, adamw(w))


def test_ranks_agree_and_train_as_one(tmp_path: Path) -> None:
    want, uneven = torch_losses(8), torch_losses(12)

    def job(rank: int) -> None:
        got, step = weft_losses("auto", 8)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        chosen: list[Any] = [None, None]
        dist.all_gather_object(chosen, (str(step.decision), step.decision.text))
        assert chosen[0] == chosen[1] and step.decision.named.mesh.ranks == 2
        got, step = weft_losses("dp2,shards3", 12)
        torch.testing.assert_close(got, uneven, rtol=1e-8, atol=1e-8)
        local = {n.layout.local_shape({"dp": rank})[0] for name, n in step.program.input_names.items() if name.startswith("batch.")}
        assert local == {8 if rank == 0 else 4}

    on_ranks(2, job, tmp_path)


def test_the_fastest_that_fits_is_taken(captured: Captured) -> None:
    found = auto.decide(captured, cluster("2xx86-2"))
    had = [o for o in found.options if not o.reason]
    assert found.chosen.ms == min(o.ms for o in had) and {"dp2", "dp2,zero1", "tp2", "cp2"} <= {o.plan for o in had}
    assert found.followed.program.text == found.text and any(o.plan.startswith(pool.SOLVER) for o in had)
    assert "predicted" in str(found) and f"  {had[-1].plan}: +" in str(found)
    again = auto.decide(captured, cluster("2xx86-2"))
    assert again == found


def test_too_little_memory_is_told(captured: Captured) -> None:
    place = cluster("2xx86-2")
    small = {**place.device.constants, "memory.bytes": replace(place.device.constants["memory.bytes"], value=1e3)}
    tight = replace(place.groups[0].profile, device=replace(place.device, constants=small))
    with pytest.raises(PlanError, match=r"no plan fits on 2xx86-2\n\n +needed +1e-06 GB on a rank or less"):
        auto.decide(captured, replace(place, groups=(replace(place.groups[0], profile=tight),)))


def lines(fixed: int = 0) -> PipelinePlans:
    w = workload()
    return PipelinePlans(micro_steps(w.model, w.example(8), w.loss, adamw(w)), 8, fixed)


def test_micro_batches_that_would_be_another_step_are_not_offered(captured: Captured) -> None:
    w = workload()
    root = micro_steps(w.model, w.example(8), lambda m, b: w.loss(m, b).sqrt(), adamw(w))
    found = auto.decide(captured, cluster("2xx86-2"), lines=PipelinePlans(root, 8))
    reasons = {o.plan: o.reason for o in found.options if "micro" in o.plan}
    assert reasons and all("would not be the full batch's: sqrt" in reason for reason in reasons.values())


def test_stages_are_offered_beside_the_rest(captured: Captured) -> None:
    found = auto.decide(captured, cluster("2xx86-2"), lines=lines())
    had = {o.plan: o for o in found.options if not o.reason}
    assert {"pp2,micro8", "pp2,micro4", "pp2,gpipe,micro4", "pp2,zero-bubble,micro4"} <= set(had)
    assert found.chosen.ms == min(o.ms for o in had.values()) and not any("recompute" in plan for plan in had)
    assert "pp2,interleaved,micro4" in had


def test_stages_come_with_every_plan_for_their_ranks(captured: Captured) -> None:
    offered = {str(n) for n in lines().stages(4, partial(pool.words, captured))}
    assert {"dp2,pp2,zero1,micro4", "tp2,pp2,micro8", "cp2,pp2,micro8", "pp4,micro8"} <= offered
    w = zoo.small("mixtral-8x7b")
    experts = capture(w.model, w.example(8), w.loss, adamw(w))
    assert "ep2,pp2,micro4" in {str(n) for n in lines().stages(4, partial(pool.words, experts))}


def test_how_many_micro_batches_can_be_fixed(captured: Captured) -> None:
    found = auto.decide(captured, cluster("2xx86-2"), lines=lines(fixed=4))
    orders = ("", "gpipe,", "zero-bubble,", "1f1b-eager,", "zero-bubble-eager,", "interleaved,", "zero-bubble-v,", "dual-pipe-v,")
    assert {o.plan for o in found.options if "pp2" in o.plan and not o.reason} == {f"pp2,{order}micro4" for order in orders}


def test_little_memory_is_found_room_in() -> None:
    """On one process: all kept, then blocks run again, then micro-batches too; each holds less than the one before."""
    w = workload()
    captured = capture(w.model, w.example(8), w.loss, adamw(w))
    place, many = cluster("1xx86-2"), lines()
    first = auto.decide(captured, place, lines=many)
    second = auto.decide(captured, place, pool.PlanRequest(memory=first.chosen.gb * 1e9 - 1), lines=many)
    third = auto.decide(captured, place, pool.PlanRequest(memory=second.chosen.gb * 1e9 - 1), lines=many)
    assert not first.named.recompute and second.named.recompute and second.named.micro_batches == 1 < third.named.micro_batches
    assert first.chosen.gb > second.chosen.gb > third.chosen.gb
    assert f"{first.plan}: not possible, it needs {first.chosen.gb:.3g} GB of {first.chosen.gb:.3g} GB" in str(second)


def test_with_little_memory_it_trains_as_one(tmp_path: Path) -> None:
    want = torch_losses(8)
    got, step = weft_losses("auto", 8, memory="1.5MB")
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    assert step.plan.recompute and step.check(workload().example(8)) < 1e-8

    def job(rank: int) -> None:
        got, step = weft_losses("auto", 8, memory=0.9e6)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        assert step.plan.pp == 2 and str(step.plan) == step.decision.words

    on_ranks(2, job, tmp_path)


def test_memory_is_for_a_choice() -> None:
    with pytest.raises(PlanError, match="memory= is for a choice between plans") as e:
        weft_losses("dp1", 8, memory="1GB")
    assert "leave out memory=" in str(e.value)


def test_pins_bind_every_plan(captured: Captured) -> None:
    name = next(n for n, x in captured.parameters.items() if "mlp" in n and x.ndim == 2)
    pin = parse_pin(f"{name.removeprefix('param.')}=tp:S(1)")
    found = auto.decide(captured, cluster("2xx86-2"), pool.PlanRequest((pin,)))
    assert found.named.tp == 2 and str(found.followed.program.input_names[name].layout.placement("tp")) == "S(1)"
    assert "an axis of dp" in next(o.reason for o in found.options if o.plan == "dp2") or any(
        "dp2" == o.plan and o.reason for o in found.options
    )


def test_a_users_own_plan_is_in_the_pool(captured: Captured) -> None:
    model = workload().model
    linear = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear))
    mine = dtensor_pins(model, {linear: "rowwise"})
    found = auto.decide(captured, cluster("2xx86-2"), others={"mine": mine})
    assert next(o for o in found.options if o.plan == "tp2 as mine").ms >= found.chosen.ms


PREDICTED_KEYS = {"step_ms": 1.0, "tokens_per_s": 1.0, "mfu": 0.5, "memory_gb": 1.0, "gap": 0.0}


def saved(path: Path, **changes: Any) -> Plan:
    limits = {"max_tp": 0, "memory_gb": 0.0, "pins": {}}
    setting = with_batch_shares(Setting.counted(**{"global_batch": 8, **changes}), changes.get("shares", ()))
    plan = Plan("gpt2", "2xx86-2", 16, "time", "weft", setting, limits, PREDICTED_KEYS)
    plan.save(path)
    return load(path)


def test_a_plan_file_runs(tmp_path: Path) -> None:
    want = torch_losses(8)
    saved(tmp_path / "plan.json", dp=2, zero=1, micro_batch=2)

    def job(rank: int) -> None:
        got, step = weft_losses(str(tmp_path / "plan.json"), 8)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        assert step.plan == Spec(dp=2, zero=1, micro=2)

    on_ranks(2, job, tmp_path)


def test_what_a_plan_file_asks_and_is_not_done_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "again.json", dp=2, recompute="selective", zero=3)
    assert str(planfile.follow(tmp_path / "again.json").spec) == "dp2,zero3,micro4,recompute:selective"
    saved(tmp_path / "once.json", dp=2, zero=3, keep_gathered=True)
    with pytest.raises(PlanError, match="gathered once a step") as e:
        planfile.follow(str(tmp_path / "once.json"))
    assert "weft plan ... --pin keep_gathered=false" in str(e.value)
    saved(tmp_path / "stages.json", pp=2, tp=2, micro_batch=1, recompute="full", overlap_tp=True, schedule="zero-bubble-eager")
    spec = load(tmp_path / "stages.json").spec
    assert planfile.follow(tmp_path / "stages.json").spec == spec and str(spec) == "tp2,pp2,zero-bubble-eager,micro8,async-tp,recompute"
    two = (("a", 1, 6, 1), ("b", 1, 2, 1))
    saved(tmp_path / "both.json", dp=2, pp=2, shares=two)
    with pytest.raises(PlanError, match="cannot be run by parallelize") as e:
        planfile.follow(tmp_path / "both.json")
    assert "equal shares" in str(e.value)


def test_a_plan_file_of_stages_runs(tmp_path: Path) -> None:
    want = torch_losses(8)
    saved(tmp_path / "plan.json", pp=2, micro_batch=2)

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got, step = weft_losses(str(tmp_path / "plan.json"), 8)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        assert step.plan == Spec(pp=2, micro=4)

    on_ranks(2, job, tmp_path)


def test_shares_that_can_be_dealt(tmp_path: Path) -> None:
    two = (("a", 1, 8, 1), ("b", 1, 4, 1))
    assert saved(tmp_path / "a.json", dp=2, global_batch=12, shares=two).spec.shards == 3
    assert str(planfile.follow(tmp_path / "a.json").spec) == "dp2,shards3"
    three = (("a", 1, 9, 1), ("b", 1, 3, 1))
    assert not saved(tmp_path / "b.json", dp=2, global_batch=12, shares=three).spec.shards
    with pytest.raises(PlanError, match=r"torch\.chunk's rule"):
        planfile.follow(tmp_path / "b.json")


def test_a_batch_that_is_not_so_many_pieces(captured: Captured) -> None:
    with pytest.raises(PlanError, match="a batch of 8 is not 3 equal shards"):
        pool.prepare(captured, Spec(dp=2, shards=3))


def test_a_layer_of_no_features_is_planned_and_trains_as_torchs() -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with warnings.catch_warnings(action="ignore"):  # torch says that there is nothing to initialise
            model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 0), torch.nn.Linear(0, 4)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model[0](x).square().mean() + model(x) - 1).square().mean()

    x, (model, optimizer) = torch.randn(8, 8, dtype=torch.float64), made()
    assert auto.decide(capture(model, x, loss, optimizer), cluster("2xx86-2")).options
    step, (model, optimizer) = parallelize(model, loss, optimizer, x, plan="auto"), made()
    for _ in range(STEPS):
        optimizer.zero_grad()
        want = loss(model, x)
        want.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), want.detach(), rtol=1e-12, atol=0)


def test_positions_that_all_samples_share_leave_data_parallelism() -> None:
    w = torch.nn.Linear(6, 1, dtype=torch.float64)
    batch = {"positions": torch.ones(1, 6, dtype=torch.float64), "x": torch.ones(4, 6, dtype=torch.float64), "y": torch.ones(4, 6, dtype=torch.float64)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return m(b["x"] * b["y"] + b["positions"]).square().mean()

    made = capture(w, batch, loss, torch.optim.AdamW(w.parameters()))
    assert {4, 2, 1} == {spec.dp for spec in pool.words(made, 4)}
