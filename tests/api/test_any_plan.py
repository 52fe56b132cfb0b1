"""deterministic="any plan": the same bits in one process and under every plan, near those of torch; what cannot be so is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft import passes
from weft.api.parallelize import parallelize
from weft.cli import app
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.pairs import pairs
from weft.cost.simulate import predict
from weft.frontend.capture import capture
from weft.ops.leaves import tree
from weft.ops.registry import Kind, flops
from weft.passes import Draft
from weft.plan.spec import Spec
from weft.transform.any_plan import require_any_plan

PLANS = {2: ("dp2", "tp2", "dp2,zero1", "dp2,zero3"), 4: ("tp4", "dp4,zero3", "dp2,tp2,zero3")}


class MLP(nn.Module):
    def __init__(self, width: int, function: Any, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.function = nn.Linear(16, width), nn.Linear(width, 16), nn.Dropout(dropout), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.function(self.up(x))))


def of_mlp(width: int = 32, function: Any = F.gelu, dropout: float = 0.2) -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    batches = [tuple(torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for _ in range(2)) for i in range(3)]
    return MLP(width, function, dropout), lambda m, b: F.mse_loss(m(b[0]), b[1]), batches


def of_zoo(name: str, **sizes: Any) -> tuple[nn.Module, Any, list[Any]]:
    w = zoo.small(name, **sizes)
    return w.model, w.loss, [w.example(8, seed=i) for i in range(3)]


MODELS = {"mlp with dropout": of_mlp, "llama": lambda: of_zoo("llama3-8b"), "gpt2": lambda: of_zoo("gpt2")}


def trained(name: str, plan: str, deterministic: Any = "any plan", **more: Any) -> list[Tensor]:
    """Losses, gradient norms and parameters after three steps."""
    model, loss, batches = MODELS[name]()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = parallelize(model, loss, opt, batches[0], plan=plan, deterministic=deterministic, clip=0.5, **more)
    out = []
    for b in batches:
        out += [step(b).clone(), step.grad_norm.clone()]
    step.sync_model()
    return [*out, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("ranks", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_one_process(name: str, ranks: int, tmp_path: Path) -> None:
    want = trained(name, "dp1")

    def job(rank: int) -> None:
        for plan in PLANS[ranks]:
            got = trained(name, plan, check=plan == PLANS[ranks][-1])  # bits are compared here anyway
            odd = [k for k, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
            assert not odd, f"{plan}: {odd} of {len(want)} differ"

    on_ranks(ranks, job, tmp_path)


@pytest.mark.parametrize("function", [F.silu, F.softplus, F.mish, F.gelu, torch.tanh], ids=lambda f: f.__name__)
def test_so_are_those_of_functions_whose_shards_fill_no_vectors(function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "narrow", lambda: of_mlp(10, function, 0.0))
    want = trained("narrow", "dp1")

    def job(rank: int) -> None:
        for plan in ("dp2", "tp2"):
            assert all(torch.equal(a, b) for a, b in zip(trained("narrow", plan), want, strict=True)), plan

    on_ranks(2, job, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_near_those_of_torch(name: str) -> None:
    model, loss, batches = MODELS[name]()
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    mine, opt = copy.deepcopy(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = parallelize(mine, loss, torch.optim.AdamW(mine.parameters(), lr=1e-2), batches[0], deterministic="any plan")
    for b in batches:
        opt.zero_grad()
        want = loss(model, b)
        want.backward()
        opt.step()
        torch.testing.assert_close(step(b), want.detach(), rtol=2e-5, atol=0)


def test_what_sums_in_another_order_is_refused() -> None:
    model, loss, batches = of_mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def asked(plan: str, **more: Any) -> str:
        with pytest.raises(PlanError) as caught:
            parallelize(model, loss, opt, batches[0], plan=plan, deterministic="any plan", **more)
        return str(caught.value)

    said = asked("micro2")
    assert "a plan of dp, tp and zero" in said and "micro in micro2" in said and "leave out micro" in said
    assert "float32 or float64" in asked("dp1", precision=torch.bfloat16)
    with pytest.raises(PlanError) as caught:
        require_any_plan(Spec.parse("dp3"))
    for words in ("dp3 splits the tree of sums unevenly", "degrees of 1, 2, 4 or 8", "dp2"):
        assert words in str(caught.value)
    for words in ("cp2", "tp2,sp", "pp2"):
        with pytest.raises(PlanError, match="any plan"):
            require_any_plan(Spec.parse(words))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8, 12, 96, 67])
def test_a_shards_sum_is_a_node_of_the_tree(n: int) -> None:
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(n))
    whole = tree(x, 0)
    torch.testing.assert_close(whole, x.double().sum(0).float(), rtol=1e-5, atol=1e-6)
    for ranks in (2, 4, 8):
        if n % ranks == 0:
            assert torch.equal(pairs([tree(s, 0) for s in x.chunk(ranks)]), whole)
            assert torch.equal(pairs([tree(s[:, 1:3].t(), 1) for s in x.chunk(ranks)]), whole[1:3])


def test_its_price_is_predicted() -> None:
    """As many flops in more and smaller calls, and operands copied: never less time."""
    w = zoo.small("gpt2", layers=2, hidden=64)
    captured = capture(w.model, w.example(8), w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2))
    plain, ordered = (passes.run(Draft(captured, Spec.parse("dp2"), any_plan=asked)).program for asked in (False, True))
    assert plain is not None and ordered is not None
    assert sum(flops(n) for n in ordered.find_all("by_leaves")) >= sum(flops(n) for n in plain.nodes if n.op.kind is Kind.CONTRACT)
    here = cluster("1x2xH100")
    assert predict(ordered, here).step_ms > predict(plain, here).step_ms
    said = CliRunner().invoke(app, ["show", "gpt2", "--plan", "dp1", "--any-plan", "--cluster", "1x1xH100"])
    assert said.exit_code == 0 and "ms predicted with deterministic" in said.stdout and "without" in said.stdout
