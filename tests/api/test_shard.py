"""A module with weft inside and torch's loop around it: the losses, gradients and checkpoints of one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft import Spec, shard
from weft.core.errors import PlanError, RuntimeFault

STEPS = 3


def gpt() -> tuple[nn.Module, list[Any]]:
    w = zoo.small("gpt2", dtype=torch.float64, dropout=0.0)
    return w.model, [w.example(8, seed=i) for i in range(STEPS)]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["tokens"])
    return F.cross_entropy(whole(out).flatten(0, 1), batch["targets"].flatten())


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(model: nn.Module, batches: list[Any]) -> list[float]:
    """A plain loop: clipping, a scheduler, two parameter groups."""
    plain, decayed = [p for p in model.parameters() if p.ndim < 2], [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 2)
    out = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        out.append(loss.item())
    return out


def want() -> list[float]:
    return train(*gpt())


def test_one_process_needs_no_launcher() -> None:
    model, batches = gpt()
    model = shard(model, batches[0]["tokens"], "dp1")
    assert train(model, batches) == pytest.approx(want(), abs=1e-10)


def test_a_torch_loop_under_every_plan_of_the_model(tmp_path: Path) -> None:
    expected = want()

    def job(rank: int) -> None:
        for plan in ("tp2", "dp2", "dp2,zero1", "dp2,zero3", "tp2,sp"):
            model, batches = gpt()
            model = shard(model, {"tokens": batches[0]["tokens"]}, plan)
            held = [p for p in model.parameters() if p.to_local().numel() < p.numel()]
            assert len(held) == {"dp2": 0}.get(plan, len(held)) and (held or plan == "dp2")
            torch.testing.assert_close(train(model, batches), expected, rtol=1e-8, atol=1e-8)

    on_ranks(2, job, tmp_path)


def test_its_state_goes_through_torchs_checkpoints_into_a_plain_model(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        model, batches = gpt()
        model = shard(model, {"tokens": batches[0]["tokens"]}, "dp2,zero3")
        train(model, batches)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
        model.eval()
        with torch.no_grad():
            out = whole(model(batches[0]["tokens"]))
        if rank == 0:
            torch.save(out, tmp_path / "out.pt")

    on_ranks(2, job, tmp_path)
    plain, batches = gpt()
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    plain.load_state_dict(state)
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(batches[0]["tokens"]), torch.load(tmp_path / "out.pt"), rtol=1e-10, atol=1e-10)


class Odd(nn.Module):
    """Several results, a buffer that changes, a weight under two names, a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        h = Straight.apply(self.first(self.norm(x)))
        return {"score": self.second(h).sum(-1), "hidden": h if scale is None else h * scale}


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients pass as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Tensor:
        return ct


def test_results_buffers_ties_and_own_gradients_are_the_models(tmp_path: Path) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def run(model: nn.Module) -> list[Tensor]:
        out = model(x)
        (whole(out["score"]).square().mean() + whole(out["hidden"]).sum()).backward()
        return [whole(p.grad) for p in model.parameters()] + [b.clone() for b in model.buffers()]

    expected = run(Odd())

    def job(rank: int) -> None:
        model = shard(Odd(), x, "dp2")
        assert model.second.weight is model.first.weight
        for got, one in zip(run(model), expected, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-5)

    on_ranks(2, job, tmp_path)


def test_another_batch_is_refused_with_its_name() -> None:
    model = shard(Odd(), {"x": torch.randn(8, 6)}, "dp1")
    with pytest.raises(RuntimeFault, match="parallelized for another batch: x") as e:
        model(torch.randn(7, 6))
    assert "[8, 6]" in str(e.value) and "[7, 6]" in str(e.value)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double()


def seen_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of a call in training and one in evaluation mode, between which a step is made, and of the state after both."""
    out = whole(model(x))
    out.square().mean().backward()
    grads = [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with torch.no_grad():
        after = whole(model(x))
    return [out.detach(), *grads, after, *(whole(t).detach() for t in model.state_dict().values())]


def scaled(model: nn.Sequential) -> None:
    """Hooks of the model itself are torch's to call, once; those of its parts are a part of the passes."""
    model.register_forward_hook(lambda _m, _a, out: out * 2)
    model.register_forward_pre_hook(lambda _m, given: (given[0] + 1,))
    model[0].register_forward_hook(lambda _m, _a, out: out * 3)


class Carried(nn.Module):
    """Reads a buffer that it writes afterwards, and a table whose rows are scaled in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.table = nn.LSTMCell(12, 6), nn.Embedding(5, 6, max_norm=1.0)
        self.register_buffer("h", torch.ones(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        before = self.h.clone()
        h, _ = self.cell(x.flatten(1), (before, before))
        self.h.copy_(h.detach())
        return h * self.table((x[:, 0, 0] > 0).long())


def frozen_norm(model: nn.Sequential) -> None:
    model[1].eval()
    model[1].running_mean += 0.3


@pytest.mark.parametrize(
    ("make", "change"), [(normed, frozen_norm), (normed, scaled), (lambda: Carried().double(), lambda _: None)], ids=["modes", "hooks", "buffers"]
)
def test_modes_hooks_and_what_a_pass_writes_are_the_models(make: Any, change: Any, tmp_path: Path) -> None:
    x = torch.randn(8, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def made() -> nn.Module:
        model = make()
        change(model)
        return model

    expected, modes = seen_and_gradients(made(), x), [m.training for m in made().modules()]

    def job(rank: int) -> None:
        for plan in ("dp2,zero3", "tp2"):
            model = shard(made(), x, plan)
            assert [m.training for m in model.modules()] == modes
            torch.testing.assert_close(seen_and_gradients(model, x), expected, rtol=1e-9, atol=1e-9, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_a_graph_that_is_retained_is_walked_again_and_one_that_is_not_is_refused_as_by_torch() -> None:
    x, grads = torch.randn(8, 6), []
    for wrap in (lambda m: m, lambda m: shard(m, x, "dp1")):
        model = wrap(Odd())
        out = whole(model(x)["hidden"])
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
        grads.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            out.sum().backward()
        out = whole(model(x)["hidden"])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.square().sum().backward()
    torch.testing.assert_close(*grads)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout()

    def forward(self, *given: Tensor, scale: float = 1.0) -> Tensor:
        return self.second(self.drop(self.first(sum(given)))) * scale


CHANGES = {
    "model.drop.training: True when traced, False now": lambda m, x: m.drop.eval() and m(x),
    "model.first.weight.requires_grad: False when traced, True now": lambda m, x: m.first.requires_grad_(True) and m(x),
    "model.first._forward_hooks: '0 of them' when traced, '1' now": lambda m, x: m.first.register_forward_hook(print) and m(x),
    "given.1 of the call: None when traced, 'a tensor' now": lambda m, x: m(x, x),
    "scale of the call: None when traced, 3.0 now": lambda m, x: m(x, scale=3.0),
    "given.0 with requires_grad=True": lambda m, x: m(x.clone().requires_grad_()),
    "model.eval()": lambda m, x: whole(m.eval()(x)).sum().backward(),
    "copy.deepcopy or torch.save of Scaling": lambda m, x: copy.deepcopy(m),
}


@pytest.mark.parametrize("found", CHANGES)
def test_what_its_passes_do_not_have_is_refused(found: str) -> None:
    model, x = Scaling(), torch.randn(8, 6)
    model.first.requires_grad_(False)
    model = shard(model, x, "dp1")
    model(x, scale=1.0)
    with pytest.raises(RuntimeFault) as e:
        CHANGES[found](model, x)
    assert found in str(e.value)


@pytest.mark.parametrize("plan", ["micro2", "pp2", "dp2"])
def test_plans_that_need_the_step_or_more_processes_are_refused(plan: str) -> None:
    with pytest.raises(PlanError, match=r"needs the entire training step|is for 2 processes") as e:
        shard(Odd(), torch.randn(8, 6), plan)
    assert "weft.parallelize" in str(e.value) or "weft run -n 2" in str(e.value)


def test_any_kind_of_plan_is_taken(tmp_path: Path) -> None:
    expected = want()

    def job(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for plan in (Spec(dp=2, zero=1), "dp2,zero2", mesh, "auto"):
            model, batches = gpt()
            model = shard(model, {"tokens": batches[0]["tokens"]}, plan)
            torch.testing.assert_close(train(model, batches), expected, rtol=1e-8, atol=1e-8)
            if plan == "auto":
                assert model.weft.decision.named.mesh.ranks == 2

    on_ranks(2, job, tmp_path)


def test_the_former_name_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"weft.shard\(model, example, plan\)"):
        weft.parallelize_module(Odd(), "dp1", torch.randn(8, 6))
