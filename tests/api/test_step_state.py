"""`step.state` is what torch's own tools take: DTensors over the step's mesh, whichever the plan; on one process plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.api.ranks import on_ranks
from weft import parallelize
from weft.core.errors import RuntimeFault


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


class Heads(nn.Module):
    """Reads one of two heads, as Python says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads, self.which = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 3) for _ in range(2)), 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[self.which](torch.tanh(self.body(x)))


WHICH = [0, 0, 1, 0, 1, 1, 1]


def inputs() -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(8, 6, dtype=torch.float64) for _ in WHICH]


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that torch has of a model and its optimizer."""
    state = {f"{n}.{k}": x for n, p in model.named_parameters() for k, x in optimizer.state.get(p, {}).items()}
    return {**model.state_dict(), **state}


def in_torch(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for k in steps:
        model.which = WHICH[k]
        optimizer.zero_grad()
        squares(model, inputs()[k]).backward()
        optimizer.step()


def in_weft(steps: range, model: nn.Module, step: Any) -> None:
    for k in steps:
        model.which = WHICH[k]
        step(inputs()[k])


def begun(which: int, plan: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = Heads()
    model.which, optimizer = which, adamw(model)
    return model, optimizer, parallelize(model, squares, optimizer, inputs()[0], plan=plan, check=False)


HANDED: dict[str, Any] = {
    "state_dict": lambda old, new, folder: new.load_state_dict(old.state_dict()),
    "take_state": lambda old, new, folder: new.take_state(old),
    "a checkpoint": lambda old, new, folder: (old.checkpoints(folder).save(), new.checkpoints(folder).restore()),
}


@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("handed", HANDED)
def test_state_of_parameters_that_the_program_at_hand_does_not_read_goes_along(handed: str, first: int, tmp_path: Path) -> None:
    model = Heads()
    optimizer = adamw(model)
    in_torch(range(len(WHICH)), model, optimizer)
    want = kept(model, optimizer)

    def job(rank: int) -> None:
        for plan, which in (("dp2,zero1", 0), ("tp2", 1)):
            model, _, old = begun(0, "dp2,zero3")
            in_weft(range(first), model, old)
            model, optimizer, step = begun(which, plan)
            HANDED[handed](old, step, str(tmp_path / f"saved {plan}"))
            in_weft(range(first, len(WHICH)), model, step)
            step.sync_model(), step.sync_optimizer()
            torch.testing.assert_close(kept(model, optimizer), want, rtol=1e-9, atol=1e-9, check_dtype=False)

    on_ranks(2, job, tmp_path)


def test_torch_goes_on_from_what_a_step_gives_back() -> None:
    want = Heads()
    theirs = adamw(want)
    in_torch(range(len(WHICH)), want, theirs)
    model, optimizer, step = begun(0, "dp1")
    in_weft(range(4), model, step)
    step.sync_model(), step.sync_optimizer()
    in_torch(range(4, len(WHICH)), model, optimizer)
    torch.testing.assert_close(kept(model, optimizer), kept(want, theirs), rtol=1e-9, atol=1e-9, check_dtype=False)


def test_state_that_an_optimizer_begins_to_keep_starts_where_it_does_in_torch() -> None:
    def momentum(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["momentum"] = 0.9

    want = Heads()
    theirs = torch.optim.SGD(want.parameters(), lr=0.1)
    in_torch(range(2), want, theirs)
    momentum(theirs)
    in_torch(range(2, 5), want, theirs)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parallelize(model, squares, optimizer, inputs()[0], check=False)
    in_weft(range(2), model, before)
    momentum(optimizer)
    with pytest.raises(RuntimeFault, match="parallelize again, and take_state of this step"):
        in_weft(range(2, 3), model, before)
    step = parallelize(model, squares, optimizer, inputs()[0], check=False)
    step.take_state(before)
    in_weft(range(2, 5), model, step)
    step.sync_model(), step.sync_optimizer()
    torch.testing.assert_close(kept(model, optimizer), kept(want, theirs), rtol=1e-9, atol=1e-9)


def test_state_of_another_optimizer_is_refused() -> None:
    _, _, step = begun(0, "dp1")
    model = Heads()
    other = parallelize(model, squares, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), inputs()[0], check=False)
    other(inputs()[0])
    for a, b in ((step, other), (other, step)):
        with pytest.raises(RuntimeFault, match="does not belong to this model and optimizer"):
            a.load_state_dict(b.state_dict())
