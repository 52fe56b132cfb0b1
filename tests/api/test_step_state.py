"""`step.state` is what torch's own tools take: DTensors over the step's mesh, whichever the plan; on one process plain tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.api.ranks import on_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch() -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(plan: str) -> weft.api.step.Step:
    model = net()
    step = weft.parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(), plan=plan)
    step(batch())
    return step


def torchs() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(model, batch()).backward()
    optimizer.step()
    moments = {f"exp_avg.{n}": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return {**{f"param.{n}": p.detach() for n, p in model.named_parameters()}, **moments}


@pytest.mark.parametrize("plan", ["dp2,zero3", "dp2,zero1", "tp2", "dp2"])
def test_state_is_dtensors_of_torchs_values(plan: str, tmp_path: Path) -> None:
    want = torchs()

    def job(rank: int) -> None:
        state = trained(plan).state
        assert all(isinstance(x, DTensor) for x in state.values())
        for name, x in want.items():
            torch.testing.assert_close(state[name].full_tensor(), x, rtol=1e-10, atol=1e-12)
        places = [state[f"{of}.0.weight"].placements[-1] for of in ("param", "exp_avg")]
        assert places == {
            "dp2,zero3": [Shard(0), Shard(0)], "dp2,zero1": [Replicate(), Shard(0)], "tp2": [Shard(0), Shard(0)], "dp2": [Replicate(), Replicate()],
        }[plan]  # fmt: skip
        dcp.save({"param": state["param.2.weight"]}, checkpoint_id=tmp_path / "saved")

    on_ranks(2, job, tmp_path)
    read = {"param": torch.empty(2, 8, dtype=torch.float64)}
    dcp.load(read, checkpoint_id=tmp_path / "saved", no_dist=True)
    torch.testing.assert_close(read["param"], want["param.2.weight"], rtol=1e-10, atol=1e-12)


def test_stages_have_dtensors_of_their_own_ranks(tmp_path: Path) -> None:
    want = torchs()

    def job(rank: int) -> None:
        state = trained("pp2,micro2").state
        mine = [n for n in want if n in state]
        assert mine and len(mine) < len(want)
        for name in mine:
            torch.testing.assert_close(state[name].full_tensor(), want[name], rtol=1e-10, atol=1e-12)

    on_ranks(2, job, tmp_path)


def test_one_process_has_plain_tensors() -> None:
    state = trained("dp1").state
    assert not any(isinstance(x, DTensor) for x in state.values())
    torch.testing.assert_close(state["param.0.weight"], torchs()["param.0.weight"])
