"""A module with weft inside and torch's loop around it: the losses, gradients and checkpoints of one process."""

from __future__ import annotations

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
