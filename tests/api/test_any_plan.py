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
from weft import Mesh, passes
from weft.api.parallelize import parallelize
from weft.cli import app
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.pairs import pairs
from weft.cost.simulate import predict
from weft.frontend.capture import capture
from weft.frontend.trace import tensor, trace
from weft.interp import run_global
from weft.ops.leaves import by_leaves, tree
from weft.ops.registry import Kind, Local, flops
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


def of_transformers(name: str, **sizes: Any) -> tuple[nn.Module, Any, list[Any]]:
    """Sizes whose leaves are of one row or column: their strides and alignment differ from plan to plan."""
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    odd = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32}
    model = t.AutoModelForCausalLM.from_config(getattr(t, f"{name}Config")(**odd, **sizes, pad_token_id=0))
    batches = [torch.randint(2, 37, (8, 11), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    return model, lambda m, x: F.cross_entropy(m(input_ids=x, use_cache=False).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()), batches


def of_convolutions() -> tuple[nn.Module, Any, list[Any]]:
    """Libraries choose the code of a convolution by its channels."""
    torch.manual_seed(0)
    convolved = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.MaxPool2d(2))
    model = nn.Sequential(convolved, nn.Flatten(), nn.Linear(72, 13), nn.GELU(), nn.Linear(13, 5))
    drawn = [torch.Generator().manual_seed(i) for i in range(3)]
    batches = [(torch.randn(8, 3, 8, 8, generator=g), torch.randint(0, 5, (8,), generator=g)) for g in drawn]
    return model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches


EXPERTS = {"intermediate_size": 10, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "experts_implementation": "eager"}
MODELS = {
    "mlp with dropout": of_mlp, "llama": lambda: of_zoo("llama3-8b"), "gpt2": lambda: of_zoo("gpt2"),
    "odd llama": lambda: of_transformers("Llama", intermediate_size=22), "mixtral": lambda: of_transformers("Mixtral", **EXPERTS),
    "convolutions": of_convolutions,
}  # fmt: skip


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


@pytest.mark.parametrize("sizes", [(1, 13, 5), (11, 11, 1), (1, 33, 65), (8, 24, 24)])
def test_a_leaf_has_the_same_bits_wherever_it_lies(sizes: tuple[int, int, int]) -> None:
    """Of matrices in a larger one, at any alignment."""
    m, k, n = sizes
    x, y = torch.randn(m, k), torch.randn(n, k)
    mesh, given = Mesh(dp=1), {"x": tensor("f32", m, k), "y": tensor("f32", n, k)}
    p = trace(lambda x, y: by_leaves(x, y, inner="einsum", equation="ik,nk->in", leaves=()), mesh, **given)
    ((_, node),) = p.outputs

    def at(value: Tensor, offset: int, more: int) -> Tensor:
        full = torch.zeros(offset + len(value) * (value.shape[1] + more))
        part = full[offset:].view(len(value), -1)[:, : value.shape[1]]
        part.copy_(value)
        return part

    ((_, want),) = run_global(p, {"x": x, "y": y}).items()
    ways = [node.op.local(Local(node, {"dp": 0}), at(x, i, j), at(y, j, i), **dict(node.attrs)) for i in range(0, 16, 3) for j in range(0, 8, 3)]
    torch.testing.assert_close(ways[0], want)
    assert all(torch.equal(way, ways[0]) for way in ways)


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
