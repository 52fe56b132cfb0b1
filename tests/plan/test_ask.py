"""`weft.plan(...)` in Python: the search of the command for modules at hand, configs and names, and plans that run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from tests.api.ranks import on_ranks
from weft.core.errors import PlanError, UnknownName
from weft.plan.plan import Plan, load
from weft.plan.planner import Request, make_plan
from weft.plan.spec import Spec

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(4)), nn.Linear(16, 8)).double()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=gen, dtype=torch.float64), torch.randn(8, 8, generator=gen, dtype=torch.float64)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def torch_losses() -> list[float]:
    model = made()
    optimizer, found = adamw(model), []
    for i in range(STEPS):
        optimizer.zero_grad()
        value = loss(model, batch(i))
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.parametrize("fixed", ["pp2", "zero3,tp1", "tp2", "dp2,zero0"])
def test_the_plan_of_a_module_at_hand_runs_as_torch(fixed: str, tmp_path: Path) -> None:
    want, model = torch_losses(), made()
    before = copy.deepcopy(model.state_dict())
    plan = weft.plan(model, loss, adamw(model), batch(0), "1x2xA100", fixed=fixed, runnable=True)
    assert isinstance(plan, Plan) and Spec.parse(f"{fixed},?").allows(plan.spec) and plan.spec.mesh.ranks == 2
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items()) and next(model.parameters()).device.type == "cpu"
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").spec == plan.spec

    def job(rank: int) -> None:
        for step in (plan.parallelize(), weft.parallelize(m := made(), loss, adamw(m), batch(0), plan=tmp_path / "plan.json")):
            torch.testing.assert_close([step(batch(i)).item() for i in range(STEPS)], want, rtol=1e-9, atol=1e-9)
            assert step.plan.pp == plan.spec.pp and step.plan.zero == plan.spec.zero

    on_ranks(2, job, tmp_path)


def test_on_the_machine_at_hand() -> None:
    model = made()
    plan = weft.plan(model, loss, adamw(model), batch(0))
    assert plan.cluster.startswith("1x1x") and str(plan.spec.mesh.ranks) == "1"
    step = plan.parallelize()
    torch.testing.assert_close([step(batch(i)).item() for i in range(STEPS)], torch_losses(), rtol=1e-9, atol=1e-9)


def test_a_name_is_planned_as_by_the_command() -> None:
    plan = weft.plan("gpt2", batch=8, cluster="1x2xA100")
    same = make_plan(Request("gpt2", "1x2xA100", 8))
    assert isinstance(same, Plan) and plan.text() == same.text()
    assert str(plan).startswith("gpt2 on 1x2xA100, global batch 8 x 1,024 tokens") and "<table" in plan._repr_html_()
    other = weft.plan("gpt2", batch=8, cluster="1x2xA100", fixed="recompute,dp1")
    assert "recompute  none  full" in str(plan.diff(other)) and other.spec.recompute == "full"
    assert "nn" in plan.export("fsdp2")
    with pytest.raises(PlanError, match=r"(?s)this plan has no model bound to it.*model=, loss=, optimizer=, batch="):
        plan.parallelize()


def test_why_a_module_is_planned_so_is_told_where_it_is_at_hand() -> None:
    model = made()
    plan = weft.plan(model, loss, adamw(model), batch(0), "1x2xA100", fixed="tp1,pp1,dp2,zero0")
    assert "next best" in str(plan.explain())
    from weft.frontend import source

    with pytest.raises(UnknownName, match=r"(?s)module:Gone:1 is not at hand.*weft.plan\(model"):
        source.load("module:Gone:1")


def test_a_config_of_hugging_faces() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    plan = weft.plan(config, cluster="1x2xA100", batch=8, fixed="dp2")
    assert plan.spec.dp == 2 and "GPT2Config" in plan.model and str(plan.spec) == "dp2"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: weft.plan(made(), cluster="1x2xA100"), "Sequential"), (lambda: weft.plan(5), "FILE.py:FUNCTION"),
        (lambda: weft.plan(made(), loss, cluster="1x2xA100"), "such a batch"), (lambda: weft.plan("gpt2", batch="many"), "not a number of samples"),
        (lambda: weft.plan("llama2-13b", batch=8, cluster="1x2xV100"), r"(?s)no plan of llama2-13b fits on 1x2xV100.*needs at least.*--cluster"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(ask: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        ask()


def test_the_package_is_still_a_package() -> None:
    import weft.plan.named as named

    assert weft.plan.named is named and callable(weft.plan) and weft.Spec is Spec
