"""Training under every kind of plan over real processes gives the losses of one-process torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import CaptureError, PlanError
from weft.plan.spec import Spec

STEPS = 4


def workload(name: str) -> Any:
    return zoo.small(name, dtype=torch.float64)  # without dropout


def torch_losses(name: str, batch: int = 8) -> list[float]:
    w = workload(name)
    opt = torch.optim.AdamW(w.model.parameters(), lr=1e-2)
    out = []
    for i in range(STEPS):
        opt.zero_grad()
        loss = w.loss(w.model, w.example(batch, seed=i))
        loss.backward()
        opt.step()
        out.append(loss.item())
    return out


def weft_losses(name: str, plan: str, batch: int = 8) -> list[float]:
    w = workload(name)
    opt = torch.optim.AdamW(w.model.parameters(), lr=1e-2)
    step = parallelize(w.model, w.loss, opt, w.example(batch), plan=plan)
    return [step(w.example(batch, seed=i)).item() for i in range(STEPS)]


PLANS = {  # by number of processes; `weft bench losses` tries every plan on every model for fifty steps
    "gpt2": {
        2: ["dp2", "dp2,zero1", "dp2,zero3", "tp2", "tp2,sp", "cp2,ring", "cp2,ring,zero1"],
        4: ["dp2,tp2,zero1", "dp4,zero2", "dp2,cp2,zero3", "dp2,cp2,ring,zero1", "dp2,tp2,sp"],
    },
    "llama3-8b": {2: ["dp2,zero1", "tp2,sp", "cp2,a2a", "cp2,a2a,zero3"], 4: ["dp2,tp2,zero3", "dp2,cp2,a2a,zero3"]},
    "bert-large": {2: ["dp2,zero3", "tp2", "cp2,a2a"], 4: ["dp2,tp2,zero1"]},
    "vit": {2: ["dp2,zero1", "tp2,sp"], 4: ["dp2,tp2,zero3"]},
    "mixtral-8x7b": {2: ["ep2", "tp2", "cp2,ring"], 4: ["dp2,ep2,zero1"]},
    "dlrm": {2: ["dp2", "dp2,zero3", "tp2"], 4: ["dp2,tp2,zero1"]},
    "resnext50": {2: ["dp2,zero1", "tp2"], 4: ["dp4,zero3"]},
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_one_process(name: str, tmp_path: Path) -> None:
    want = torch_losses(name)
    for world, plans in PLANS[name].items():

        def job(rank: int, plans: list[str] = plans) -> None:
            for plan in plans:
                torch.testing.assert_close(weft_losses(name, plan), want, rtol=1e-8, atol=1e-8, msg=lambda m, plan=plan: f"{plan}: {m}")

        folder = tmp_path / str(world)
        folder.mkdir()
        on_ranks(world, job, folder)


@pytest.mark.timeout(120)
def test_losses_equal_one_process_between_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that take each other for hosts of their own send every byte, in many messages."""
    want = torch_losses("gpt2")
    monkeypatch.setattr("weft.runtime.comm.message_bytes", lambda device: 1 << 13)
    monkeypatch.setattr("weft.passes.message_bytes", lambda device: 1 << 13)

    def job(rank: int) -> None:
        for module in ("hosts", "peers"):
            monkeypatch.setattr(f"weft.runtime.{module}.host_identity", lambda: str(rank))
        for plan in ("dp2", "dp2,zero1", "dp2,zero3", "tp2"):
            torch.testing.assert_close(weft_losses("gpt2", plan), want, rtol=1e-8, atol=1e-8, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_dropout_is_that_of_one_process(tmp_path: Path) -> None:
    def losses(plan: str) -> list[float]:
        w = zoo.small("gpt2", dtype=torch.float64, dropout=0.2)
        step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan)
        return [step(w.example(8, seed=i)).item() for i in range(STEPS)]

    want = losses("dp1")
    assert want != torch_losses("gpt2")

    def job(rank: int) -> None:
        for plan in ("dp2,zero1", "tp2,sp", "cp2,a2a"):
            torch.testing.assert_close(losses(plan), want, rtol=1e-8, atol=1e-8, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_zero_along_cp_with_parameters_of_uneven_sizes(tmp_path: Path) -> None:
    """Dims that four or two ranks cannot share in equal parts, or share at all."""

    def losses(plan: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        opt, batches = torch.optim.AdamW(model.parameters(), lr=1e-2), [torch.rand(4, 8, 6, dtype=torch.float64) for _ in range(STEPS)]
        if not plan:
            return [_stepped(model, opt, x) for x in batches]
        step = parallelize(model, lambda m, x: m(x).square().mean(), opt, batches[0], plan=plan)
        return [step(x).item() for x in batches]

    want = losses("")
    for world, plans in {2: ("cp2,zero1", "cp2,zero3"), 4: ("dp2,cp2,zero1", "dp2,cp2,zero3", "cp4,zero2", "cp2,tp2,zero3")}.items():

        def job(rank: int, plans: tuple[str, ...] = plans) -> None:
            for plan in plans:
                torch.testing.assert_close(losses(plan), want, rtol=1e-10, atol=1e-12, msg=lambda m, plan=plan: f"{plan}: {m}")

        folder = tmp_path / str(world)
        folder.mkdir()
        on_ranks(world, job, folder)


def _stepped(model: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """The loss of one step of torch by itself."""
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    return loss.item()


def test_one_process_needs_no_launcher() -> None:
    torch.testing.assert_close(weft_losses("gpt2", "dp1"), torch_losses("gpt2"), rtol=1e-8, atol=1e-8)


def test_a_compiled_model_is_trained_as_it_was_written() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).double()
    ours, x = copy.deepcopy(plain), torch.randn(6, 4, dtype=torch.float64)
    theirs = torch.optim.AdamW(plain.parameters())
    compiled = torch.compile(ours, backend="eager")
    step = parallelize(compiled, lambda m, b: m(b).square().mean(), torch.optim.AdamW(compiled.parameters()), x, plan="dp1")
    for _ in range(3):
        want = plain(x).square().mean()
        theirs.zero_grad()
        want.backward()
        theirs.step()
        assert abs(float(step(x)) - float(want)) < 1e-12
    step.sync_model()
    step.sync_optimizer()
    for a, b in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_check_eval_and_state_move_between_plans(tmp_path: Path) -> None:
    w = workload("gpt2")
    state = tmp_path / "state.pt"

    def save(rank: int) -> None:
        step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan="dp2,zero1")
        step(w.example(8, seed=1))
        assert step.check(w.example(8, seed=2)) < 1e-6
        whole = step.state_dict()
        if rank == 0:
            torch.save(whole, state)

    folder = tmp_path / "a"
    folder.mkdir()
    on_ranks(2, save, folder)
    one = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8))
    one.load_state_dict(torch.load(state))
    assert one.steps == 1
    torch.testing.assert_close(one.eval(w.example(8, seed=1)).item(), float(one(w.example(8, seed=1))), rtol=1e-8, atol=1e-8)


def test_a_plan_for_other_ranks_is_refused() -> None:
    w = workload("mlp")
    with pytest.raises(PlanError, match="is for 4 processes") as e:
        parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters()), w.example(8), plan="dp2,tp2")
    assert "weft run -n 4" in str(e.value)


def test_an_unknown_word_in_a_plan_is_refused() -> None:
    w = workload("mlp")
    with pytest.raises(PlanError, match="no plan 'dp2,xx3'"):
        parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters()), w.example(8), plan="dp2,xx3")


@pytest.mark.parametrize(
    ("words", "instead"), [("fsdp2", "dp2,zero3"), ("dp2,zerro1", "zero1"), ("dp2,recomput", "recompute"), ("dpp4", "dp4"), ("ddp", "dp2")]
)
def test_words_of_other_systems_and_misspelt_ones_are_answered_with_weft_s(words: str, instead: str) -> None:
    with pytest.raises(PlanError, match="joined by commas") as e:
        Spec.parse(words)
    assert instead in e.value.repairs


def test_processes_that_never_met_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    w = workload("mlp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PlanError, match=r"(?s)needs a process group.*init_process_group\(\) before.*2 processes"):
        parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters()), w.example(8), plan="dp2")


def test_an_optimizer_is_needed_and_is_this_model_s() -> None:
    w = workload("mlp")
    with pytest.raises(CaptureError, match=r"(?s)needs an optimizer.*weft\.shard.*weft\.compile"):
        parallelize(w.model, w.loss, None, w.example(8), plan="dp1")  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"(?s)updates no parameter of this model.*SGD over 2 other tensors"):
        parallelize(w.model, w.loss, torch.optim.SGD(torch.nn.Linear(2, 2).parameters()), w.example(8), plan="dp1")


def test_a_number_learnt_from_gradients_that_are_summed(tmp_path: Path) -> None:
    """The rate of an inner step: its gradient is made of others' sums, of which the update stores nothing."""

    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rate = torch.nn.Linear(4, 3), torch.nn.Parameter(torch.tensor(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = [self.layer.weight, self.layer.bias]
            w, b = torch.autograd.grad(self.layer(x).square().sum(), own, create_graph=True)
            return torch.nn.functional.linear(x, own[0] - self.rate * w, own[1] - self.rate * b)

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def job(rank: int) -> None:
        torch.manual_seed(0)
        ours, batch = Inner().double(), torch.randn(8, 4, dtype=torch.float64)
        theirs = copy.deepcopy(ours)
        step = parallelize(ours, loss, torch.optim.AdamW(ours.parameters()), batch, "dp2")
        optimizer = torch.optim.AdamW(theirs.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            want = loss(theirs, batch)
            want.backward()
            optimizer.step()
            torch.testing.assert_close(step(batch), want.detach(), rtol=1e-10, atol=0)

    on_ranks(2, job, tmp_path)


def test_inference_under_tensor_parallelism(tmp_path: Path) -> None:
    w = workload("llama3-8b")
    batch = {k: v for k, v in w.example(2).items() if k != "targets"}
    with torch.no_grad():
        want = w.model(**batch)

    def job(rank: int) -> None:
        got = weft.compile(w.model, "tp2", batch)(batch)["out"]
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)

    on_ranks(2, job, tmp_path)


def test_a_device_mesh_names_a_plan() -> None:
    """By torch's names of dims; one whose ranks or dims are in another order than weft's is refused."""
    from types import SimpleNamespace

    from weft.api.options import spec_of

    def mesh(names, *sizes, ranks=None):
        n = int(torch.tensor(sizes).prod())
        return SimpleNamespace(mesh_dim_names=names, mesh=(torch.arange(n) if ranks is None else torch.tensor(ranks)).reshape(sizes))

    assert str(spec_of(mesh(("dp", "tp"), 2, 2))) == "dp2,tp2"
    assert str(spec_of(mesh(("fsdp",), 4))) == "dp4,zero3"
    assert str(spec_of(mesh(("pp", "dp_replicate", "dp_shard", "tp"), 2, 1, 4, 1))) == "dp4,pp2,zero3"
    hybrid = mesh(("dp_replicate", "dp_shard"), 2, 2)
    for bad in (mesh(("tp", "dp"), 2, 2), mesh(("dp",), 2, ranks=(1, 0)), mesh(("rows",), 2), mesh(None, 2), hybrid):
        with pytest.raises(PlanError, match="this DeviceMesh names no plan"):
            spec_of(bad)


def test_options_are_one_object_or_keywords() -> None:
    from weft import Options

    assert Options.of(Options(clip=1.0), {"seed": 3}) == Options(clip=1.0, seed=3)
    with pytest.raises(PlanError, match=r"parallelize has no option nonsense(.|\n)*clip"):
        Options.of(None, {"nonsense": True})
    with pytest.raises(PlanError, match=r"no option clp(.|\n)*try     clip="):
        Options.of(None, {"clp": 1.0})
    with pytest.raises(PlanError, match=r'no option zero(.|\n)*try     plan="dp2,zero1"'):
        Options.of(None, {"zero": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    from weft.api.options import device_for

    with pytest.raises(PlanError, match="device='cuda' is not on this machine"):
        device_for(torch.nn.Linear(2, 2), "cuda")
