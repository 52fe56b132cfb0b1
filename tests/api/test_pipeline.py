"""Pipelines over real processes: every schedule gives the losses of one-process torch, and each rank holds its own stage only."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError, RuntimeFault

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What a first capture imports, before any rank is forked."""
    weft_run("mlp", "micro2")


def workload(name: str, **settings: Any) -> Any:
    w = zoo.small(name, dtype=torch.float64, **settings)
    for m in w.model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    return w


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def torch_run(name: str, clip: float | None = None, **settings: Any) -> list[float]:
    """Losses and, where they are clipped, norms of gradients, step by step."""
    w = workload(name, **settings)
    opt, out = adam(w.model), []
    for i in range(STEPS):
        opt.zero_grad()
        loss = w.loss(w.model, w.example(8, seed=i))
        loss.backward()
        out.append(loss.item())
        if clip is not None:
            out.append(float(torch.nn.utils.clip_grad_norm_(w.model.parameters(), clip)))
        opt.step()
    return out


def weft_run(name: str, plan: str, clip: float | None = None, mean: bool = False, **settings: Any) -> list[float]:
    w = workload(name, **settings)
    step, out = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan, clip=clip, allow_micro_mean=mean), []
    for i in range(STEPS):
        out.append(step(w.example(8, seed=i)).item())
        if clip is not None:
            out.append(float(step.grad_norm))
    return out


def same(name: str, world: int, plans: list[str], folder: Path, clip: float | None = None, mean: bool = False, **settings: Any) -> None:
    want = torch_run(name, clip, **settings)

    def job(rank: int) -> None:
        for plan in plans:
            got = weft_run(name, plan, clip, mean, **settings)
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(world, job, folder)


def test_every_schedule_with_tied_embeddings_and_clipping(tmp_path: Path) -> None:
    plans = ["pp2", "pp2,gpipe,micro2", "pp2,interleaved,micro4", "pp2,zero-bubble,micro4", "pp2,zero-bubble,recompute"]
    plans += ["pp2,1f1b-eager,micro4", "pp2,zero-bubble-eager,recompute:selective", "pp2,zero-bubble-v,micro4", "pp2,dual-pipe-v,micro8"]
    same("gpt2", 2, plans, tmp_path, clip=0.5, layers=4)


def test_experts_and_sequences_shared_inside_stages(tmp_path: Path) -> None:
    same("mixtral-8x7b", 4, ["ep2,pp2,micro4"], tmp_path, mean=True, layers=2, balance=0.0)  # a balance loss is no sum over samples


PRODUCTS = ["dp2,pp2,zero1", "dp2,pp2,zero3,micro2", "tp2,pp2", "tp2,pp2,sp,interleaved", "pp4,zero-bubble", "pp4,dual-pipe-v,micro8"]
PRODUCTS += ["cp2,pp2,recompute", "cp2,pp2,zero1", "cp2,pp2,zero3,micro2"]


@pytest.mark.parametrize("plan", PRODUCTS)
def test_products_with_other_plans(plan: str, tmp_path: Path) -> None:
    same("gpt2", 4, [plan], tmp_path, clip=0.5, layers=8 if "-v" in plan else 4)


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        ("bert-large", ["pp2"]),
        ("vit", ["pp2,gpipe"]),
        ("mixtral-8x7b", ["pp2,micro1"]),  # its balancing loss is of whole batches
        ("llama3-8b", ["pp2,zero-bubble"]),
        ("resnext50", ["pp2,micro1"]),  # so are the statistics of batch norm
        ("mlp", ["pp2,1f1b,micro8"]),  # no block repeats: cut where one value passes
        ("dlrm", ["pp2"]),  # samples are not every tensor's first dim
        ("candle-uno", ["pp2,gpipe"]),
    ],
)
def test_other_models(name: str, plans: list[str], tmp_path: Path) -> None:
    same(name, 2, plans, tmp_path)


def test_micro_batches_alone_accumulate() -> None:
    torch.testing.assert_close(weft_run("gpt2", "micro4", 0.5), torch_run("gpt2", 0.5), rtol=1e-8, atol=1e-8)


def test_mixed_precision_and_a_user_who_accumulates(tmp_path: Path) -> None:
    def run(plan: str, **more: Any) -> list[float]:
        w = zoo.small("gpt2", dropout=0.0)
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan, precision=torch.bfloat16, **more)
        return [step(w.example(8, seed=i)).item() for i in range(STEPS)]

    want = run("micro2")
    on_ranks(2, lambda rank: torch.testing.assert_close(run("pp2", accumulate=2), want, rtol=1e-4, atol=1e-4), tmp_path)


@pytest.mark.parametrize(("plan", "ranks"), [("pp2", 2), ("dp2,pp2,micro2", 4)])
def test_batches_of_any_size_are_evaluated(plan: str, ranks: int, tmp_path: Path) -> None:
    alone = workload("mlp")
    want = [alone.loss(alone.model.eval(), alone.example(size, seed=size)).item() for size in (8, 7, 5, 2, 8)]

    def job(rank: int) -> None:
        w = workload("mlp")
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan)
        found = [step.eval(w.example(size, seed=size)).item() for size in (8, 7, 5, 2, 8)]
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)

    on_ranks(ranks, job, tmp_path)


def test_a_step_without_a_finite_loss_is_left_out_on_every_stage(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = workload("mlp")
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan="pp2", on_nan="skip", clip=1.0)
        good, bad = w.example(8), w.example(8)
        name = next(k for k, x in bad.items() if x.is_floating_point())
        bad[name] = torch.full_like(bad[name], float("nan"))
        before = step.eval(good).item()
        assert not step(bad).isfinite() and step.skipped == 1
        assert step.eval(good).item() == before
        step(good)
        assert step.skipped == 1 and step.eval(good).item() != before

    on_ranks(2, job, tmp_path)


def test_dropout_is_that_of_the_whole_batch_in_one_process(tmp_path: Path) -> None:
    def run(plan: str) -> list[float]:
        w = zoo.small("gpt2", dtype=torch.float64, layers=4, dropout=0.2)
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan)
        return [step(w.example(8, seed=i)).item() for i in range(STEPS)]

    want = run("dp1")

    def job(rank: int) -> None:
        for plan in ("pp2,micro4", "dp2,micro2", "pp2,interleaved,micro4,recompute"):
            torch.testing.assert_close(run(plan), want, rtol=1e-10, atol=1e-10)

    on_ranks(2, job, tmp_path)


def test_a_rank_holds_its_stage_and_no_more(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = workload("gpt2", layers=4)
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan="pp2")
        blocks = {n.split(".")[2] for n in step.state if n.startswith("param.blocks.")}
        assert len(blocks) == 2 and all(("blocks" not in n) or n.split(".")[2] in blocks for n in step.state)
        assert ("param.tokens.weight" in step.state) == (rank == 0)  # the head reads it too, but has it sent
        assert {n.removeprefix("exp_avg.") for n in step.state if n.startswith("exp_avg.")} == {
            n.removeprefix("param.") for n in step.state if n.startswith("param.")
        }

    on_ranks(2, job, tmp_path)


class Draws(nn.Module):
    """It drops values in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x).tanh(), 0.5, training=True))


def test_what_draws_in_evaluation_mode_draws_as_in_one_pass() -> None:
    batch, found = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), []
    for plan in ("dp1", "micro2"):
        model = Draws()
        step = parallelize(model, lambda m, x: m(x).square().mean(), adam(model), batch, plan=plan)
        found.append([step(batch).item(), step.eval(batch).item(), step.eval(batch).item()])
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0][1] == found[0][2]


def test_check_eval_state_and_the_model(tmp_path: Path) -> None:
    one = workload("gpt2", layers=4)
    alone = parallelize(one.model, one.loss, adam(one.model), one.example(8), plan="dp1")
    alone(one.example(8, seed=1))
    value, state = alone.eval(one.example(8, seed=2)).item(), alone.state_dict()

    def job(rank: int) -> None:
        w = workload("gpt2", layers=4)
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan="pp2,zero-bubble-v")
        step(w.example(8, seed=1))
        assert step.check(w.example(8, seed=2)) < 1e-8
        assert step.eval(w.example(8, seed=2)).item() == pytest.approx(value, rel=1e-8)
        whole = step.state_dict()
        assert whole.keys() == state.keys()
        for name in state:
            torch.testing.assert_close(whole[name], state[name], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(step.sync_model().blocks[3].mlp.up.weight, state["param.blocks.3.mlp.up.weight"], rtol=1e-7, atol=1e-9)
        step.load_state_dict(state)
        assert step.eval(w.example(8, seed=2)).item() == pytest.approx(value, rel=1e-8)

    on_ranks(2, job, tmp_path)


def test_checkpoints_move_between_pipelines_and_other_plans(tmp_path: Path) -> None:
    plans = ["dp2", "pp2", "pp2,zero-bubble-v", "micro2,dp2,zero1"]

    def job(rank: int) -> None:
        steps, wants = {}, {}
        w = workload("gpt2", layers=4)
        for i, plan in enumerate(plans):
            steps[plan] = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan)
            steps[plan](w.example(8, seed=i))
            steps[plan].checkpoints(str(tmp_path / plan)).save(wait=i % 2 == 0) if i % 2 == 0 else _async(steps[plan], tmp_path / plan)
            wants[plan] = steps[plan](w.example(8, seed=7)).item()
        for plan, step in steps.items():
            for other in plans:
                assert step.checkpoints(str(tmp_path / other)).restore() == 1
                assert step(w.example(8, seed=7)).item() == pytest.approx(wants[other], rel=1e-8), (plan, other)

    on_ranks(2, job, tmp_path)


def _async(step: Any, folder: Path) -> None:
    store = step.checkpoints(str(folder))
    store.save(wait=False)
    store.finish()


# -- refusals --------------------------------------------------------------------------------------------------------------------


def refuse(world: int, plan: str, match: str, folder: Path, name: str = "gpt2", batch: int = 8, **more: Any) -> None:
    w = workload(name)

    def job(rank: int) -> None:
        with pytest.raises((PlanError, RuntimeFault), match=match):
            parallelize(more.get("model", w.model), more.get("loss", w.loss), adam(w.model), w.example(batch), plan=plan)

    on_ranks(world, job, folder)


def test_more_stages_than_layers(tmp_path: Path) -> None:
    refuse(
        2, "pp2,interleaved,virtual200", r"400 stages are more than the model can be split into(.|\n)*400 or more parts(.|\n)*found +\d+(.|\n)*pp\d+", tmp_path
    )


def test_a_batch_that_does_not_split(tmp_path: Path) -> None:
    refuse(2, "pp2,micro3", r"a batch of 8 is not 3 equal micro-batches(.|\n)*multiple of 3(.|\n)*micro2", tmp_path)


def test_micro_batches_are_cut_along_the_samples() -> None:
    from weft.frontend.capture.micro import micro_batch

    batch = {"dense": torch.arange(8).reshape(8, 1), "sparse": torch.arange(24).reshape(3, 8), "scale": torch.tensor(2.0)}
    part = micro_batch(batch, 1, 4)
    assert part["dense"].flatten().tolist() == [2, 3]
    assert part["sparse"].tolist() == [[2, 3], [10, 11], [18, 19]]
    assert part["scale"] == 2
    with pytest.raises(PlanError, match=r"batch dim(.|\n)*is ambiguous(.|\n)*most of its tensors begin with(.|\n)*x \[8, 2\], y \[3, 8, 8\]"):
        micro_batch({"x": torch.ones(8, 2), "y": torch.ones(3, 8, 8)}, 0, 4)


def test_a_model_that_cannot_take_a_micro_batch() -> None:
    """As many tables as samples: the first dim is taken for the samples, and the model says that it is not."""
    model = torch.nn.Linear(1, 1)

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return sum(m(x[i, :, None]) for i in range(4)).mean()

    with pytest.raises(PlanError, match=r"cannot take a micro-batch(.|\n)*sharded along its samples(.|\n)*\[2, 4\]"):
        parallelize(model, loss, adam(model), torch.ones(4, 4), plan="micro2", allow_micro_mean=True)


@pytest.mark.parametrize("plan", ["pp2", "dp2,pp2"])
def test_a_plan_in_micro_batches_is_checked_before_it_runs(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.transform import pipeline as line

    w, place = workload("gpt2"), line.place

    def wrong(program: Any, *args: Any, **more: Any) -> Any:
        p = place(program, *args, **more)
        name = next((n for n in p.output_names if n.startswith("d.param.")), None)
        return p.with_outputs([(n, x + x if n == name else x) for n, x in p.outputs], "twice as much")

    def job(rank: int) -> None:
        report = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan).report
        assert report.equal if rank == 0 else report is None
        monkeypatch.setattr(line, "place", wrong)
        with pytest.raises(PlanError, match="the plan changes what the model computes"):
            parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan)

    on_ranks(4 if "dp" in plan else 2, job, tmp_path)


class _Shared(torch.nn.Module):
    """One batch norm on both sides of a long way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return self.norm(x)


def test_state_that_two_stages_share(tmp_path: Path) -> None:
    model = _Shared()

    def job(rank: int) -> None:
        with pytest.raises(PlanError, match="is changed in the forward pass and used by several stages"):
            parallelize(model, lambda m, x: m(x).square().mean(), adam(model), torch.randn(8, 8), plan="pp2", allow_micro_mean=True)

    on_ranks(2, job, tmp_path)


class _Short(torch.nn.Module):
    """One product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


def test_a_model_that_cannot_be_cut(tmp_path: Path) -> None:
    model = _Short()

    def job(rank: int) -> None:
        with pytest.raises(PlanError, match=r"4 stages are more(.|\n)*or more parts(.|\n)*pp\d"):
            parallelize(model, lambda m, x: m(x), adam(model), torch.randn(8, 4), plan="pp4,micro2")

    on_ranks(4, job, tmp_path)


def test_a_pipeline_that_names_no_micro_batches_takes_equal_ones(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        w = workload("gpt2")
        step = parallelize(w.model, w.loss, adam(w.model), w.example(3), plan="pp2")
        assert str(step.plan) == "pp2,micro3"
        assert step.check(w.example(3)) < 1e-9

    on_ranks(2, job, tmp_path)


def test_a_batch_of_another_shape_is_another_program() -> None:
    w = workload("gpt2")
    theirs = copy.deepcopy(w.model)
    step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan="micro2")
    optimizer = adam(theirs)
    for batch in (w.example(8), w.example(6), w.example(8), w.example(7)):
        optimizer.zero_grad()
        loss = w.loss(theirs, batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-9, atol=0)
    assert str(step.plan) == "micro1"


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ("dp2,gpipe", "pp2 or more for gpipe"),
        ("pp2,virtual2", "interleaved"),
        ("pp2,interleaved,micro3", "micro4"),
        ("pp2,zero-bubble-v,virtual3", "virtual2"),
        ("pp4,dual-pipe-v,micro4", "8 micro-batches or more"),
        ("pp0", "degrees of 1"),
    ],
)
def test_words_that_do_not_go_together(plan: str, match: str) -> None:
    from weft.plan.spec import Spec

    with pytest.raises(PlanError, match=match):
        Spec.parse(plan)


# -- other people's models: torch on the whole batch, in one process, is the judge -------------------------------------------------


class _Branches(torch.nn.Module):
    """Two products with one gradient, normed by state that parameters alone change, and a cell with two biases alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.a, self.b = (torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8)) for _ in range(2))
        self.cell = torch.nn.LSTMCell(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        h = self.a(h) + self.b(h)
        h, _ = self.cell(h, (h, h))
        return self.last(h)


class _Whole(torch.nn.Module):
    """A torch op that weft never cuts, over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(torch.linalg.svdvals(h.T @ h + torch.eye(8)) * h)


def _labelled(seed: int) -> UserDict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (8,), generator=draw)
    y[2:4] = -100  # a micro-batch without a label
    return UserDict(x=torch.randn(8, 4, dtype=torch.float64, generator=draw), y=y)


def _summed(m: Any, b: Any) -> torch.Tensor:
    out = m(b["x"])
    return torch.nn.functional.cross_entropy(out, b["y"], weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)) + out.square().sum()


def _trained(make: Any, one: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, parameters and buffers after some steps."""
    torch.manual_seed(0)
    model = make().double()
    step, after = one(model, adam(model))
    losses = [step(_labelled(i)) for i in range(STEPS)]
    after()
    return losses, {n: x.detach().clone() for n, x in (*model.named_parameters(), *model.named_buffers())}


def _by_torch(model: Any, opt: Any) -> Any:
    def step(b: Any) -> float:
        opt.zero_grad()
        loss = _summed(model, b)
        loss.backward()
        opt.step()
        return loss.item()

    return step, lambda: None


@pytest.mark.parametrize("plan", ["pp2", "pp2,zero-bubble,micro2", "dp2,zero1,micro4"])
def test_labels_branches_and_state(plan: str, tmp_path: Path) -> None:
    want = _trained(_Branches, _by_torch)

    def by_weft(model: Any, opt: Any) -> Any:
        step = parallelize(model, _summed, opt, _labelled(9), plan=plan)
        return (lambda b: step(b).item()), step.sync_model

    on_ranks(2, lambda rank: torch.testing.assert_close(_trained(_Branches, by_weft), want, rtol=1e-9, atol=1e-11), tmp_path)


def test_an_op_that_is_never_cut_meets_no_other_stage(tmp_path: Path) -> None:
    """It ran on its own rank of the pipeline and waited there for the others."""
    want = _trained(_Whole, _by_torch)

    def by_weft(model: Any, opt: Any) -> Any:
        step = parallelize(model, _summed, opt, _labelled(9), plan="pp2,micro1")
        return (lambda b: step(b).item()), step.sync_model

    def job(rank: int) -> None:
        torch.testing.assert_close(_trained(_Whole, by_weft), want, rtol=1e-9, atol=1e-11)
        model = _Whole().double()
        with pytest.raises(PlanError, match=r"aten._linalg_svd.default, which weft does not know and takes a sum over all samples(.|\n)*micro1"):
            parallelize(model, _summed, adam(model), _labelled(9), plan="pp2,micro4")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = parallelize(model, _summed, adam(model), _labelled(9), plan="pp2")
        said = [str(x.message) for x in told if "through the stages at once" in str(x.message)]
        assert str(step.plan) == "pp2,micro1" and len(said) == (rank == 0) and all("aten._linalg_svd" in words for words in said)

    on_ranks(2, job, tmp_path)


def test_a_model_in_bfloat16(tmp_path: Path) -> None:
    """AdamW divides by 1 - 0.999, which is 0 in bfloat16."""

    def run(plan: str) -> list[float]:
        w = zoo.small("gpt2", dtype=torch.bfloat16, dropout=0.0)
        step = parallelize(w.model, w.loss, adam(w.model), w.example(8), plan=plan)
        return [step(w.example(8)).item() for _ in range(STEPS)]

    want = run("dp1")
    assert want[-1] < want[0] - 0.05
    on_ranks(2, lambda rank: torch.testing.assert_close(run("pp2"), want, rtol=2e-2, atol=2e-2), tmp_path)


def test_an_order_that_never_ends_is_refused_before_it_runs() -> None:
    from weft.api.runner import require_an_end
    from weft.plan.schedules import SCHEDULES, Action

    routes = {(0, "forward"): {1: ["act.0"]}, (1, "forward"): {}, (0, "backward"): {}, (1, "backward"): {0: ["d.act.0.1"]}}
    require_an_end(routes, SCHEDULES["1f1b"].orders(2, 4))
    backward_first = (tuple(Action(kind, 0, 0) for kind in ("backward", "forward")), SCHEDULES["1f1b"].orders(2, 1)[1])
    with pytest.raises(PlanError, match=r"the pipeline schedule deadlocks(.|\n)*rank 0 at backward 0; rank 1 at forward 0(.|\n)*gpipe"):
        require_an_end(routes, backward_first)


class Running(nn.Module):
    """A mean of what it has seen, moved before it is read, and a scale moved after."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        out = self.inner((x - self.mean) / self.scale)
        self.scale = 0.9 * self.scale + 0.1 * x.abs().max()
        return out


@pytest.mark.parametrize("options", [{"plan": "micro4"}, {"accumulate": 2}])
def test_buffers_that_the_batch_moves_are_read_as_torch_reads_them(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Running().double()
    theirs = copy.deepcopy(model)
    batches = [torch.randn(8, 4, dtype=torch.float64) for _ in range(3)]
    step = parallelize(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), batches[0], **options)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss = theirs(batch).square().mean()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(batch), loss.detach(), rtol=1e-12, atol=0)
    step.sync_model()
    for mine, want in zip((*model.parameters(), *model.buffers()), (*theirs.parameters(), *theirs.buffers()), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-14)
