"""Plans of several stages, or with layers that differ, run as planned: each stage has its layers, and runs again what the plan says."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from bench._graph.planner import make_plan as plan_program
from bench._graph.planner import task_of
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.layout import O
from weft.frontend.capture import capture
from weft.plan.plan import Plan, load
from weft.plan.planner import Request, captured_stack, plan_stack
from weft.plan.setting import Setting
from weft.plan.space import Limits, PlanProblem
from weft.transform.stage_contents import Counted, stage_contents_of

STEPS, BATCH = 2, 16
LIMITS = {"max_tp": 0, "memory_gb": 0.0, "pins": {}}
SIZES = {"layers": 7, "hidden": 32, "heads": 4, "vocab": 67, "seq": 16}
FOUR = """
groups: [{nodes: 4, devices: 1, kind: x86-2}]
spine: {devices: 1, gbps_per_device: 0.1}
"""


class Small(Request):
    """GPT-2 at the size of a test."""

    def problem(self) -> PlanProblem:
        return PlanProblem(captured_stack("gpt2", "fp32", **SIZES)[0], cluster(self.cluster), self.batch, "fp32")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of a small GPT on four processes with a slow network between them and room for less than everything."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "four.yaml").write_text(FOUR)
    made = plan_stack(Small("gpt2", str(folder / "four.yaml"), BATCH, 0, "time", Limits(memory=1.5006e9)))
    assert isinstance(made, Plan)
    made.save(folder / "plan.json")
    return folder / "plan.json"


def gpt(**settings: Any) -> Any:
    return zoo.small("gpt2", dtype=torch.float64, **{**SIZES, "dropout": 0.0, **settings})


def adam(w: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(w.model.parameters(), lr=1e-2)


def torch_losses(w: Any) -> list[float]:
    optimizer, out = adam(w), []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = w.loss(w.model, w.example(BATCH, seed=i))
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def weft_losses(w: Any, plan: Path | str, **more: Any) -> tuple[list[float], Any]:
    """Without a word about anything that is not followed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = parallelize(w.model, w.loss, adam(w), w.example(BATCH), plan=str(plan), **more)
    return [step(w.example(BATCH, seed=i)).item() for i in range(STEPS)], step


def close(got: list[float], want: list[float]) -> None:
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_the_stages_of_a_plan_have_its_layers_and_run_again_what_it_says(planned: Path, tmp_path: Path) -> None:
    plan, one = load(planned), gpt()
    want = torch_losses(one)
    last = one.loss(one.model, one.example(BATCH)).item()
    ways = [{way for name, way, _ in stage if name not in ("first", "last")} for stage in plan.setting.stages]
    assert plan.setting.pp == 4 and {"none"} in ways and {"ffn"} in ways, "the case: mixed recompute"
    assert len({sum(n for _, _, n in stage) for stage in plan.setting.stages}) > 1, "the case: unequal stages"

    def job(rank: int) -> None:
        got, step = weft_losses(gpt(), planned)
        close([*got, step.eval(gpt().example(BATCH)).item()], [*want, last])
        halves = [half for stage in plan.setting.stages for half in halves_of(stage)]
        at = 0
        for g, stage in enumerate(plan.setting.stages):
            mine = halves[at : at + len(halves_of(stage))]
            assert parts_held(step, g) == {(k // 2, "mlp" if k % 2 else "attention") for k in range(at, at + len(mine))}
            assert ops_again(step, g) == Counter({"attention": mine.count("attention full"), "gelu": sum("ffn" in m for m in again(mine))})
            at += len(mine)

    on_ranks(4, job, tmp_path)


def halves_of(stage: Any) -> list[str]:
    """What a stage is made of, half layer by half layer, each with what it recomputes."""
    made = {"layer": ("attention", "ffn"), "attention": ("attention",), "ffn": ("ffn",)}
    return [f"{half} {way}" for name, way, n in stage for _ in range(n) for half in made.get(name, ())]


def again(halves: list[str]) -> list[str]:
    return [h for h in halves if h in ("ffn full", "ffn ffn")]


def parts_held(step: Any, stage: int) -> set[tuple[int, str]]:
    """The halves of layers whose weights are at a stage."""
    names = [n for n, x in step.program.input_names.items() if n.startswith("param.blocks.") and x.layout.placement("pp") == O(stage)]
    parts = {(int(n.split(".")[2]), n.split(".")[3]) for n in names}
    return {(k, part) for k, part in parts if part in ("attention", "mlp")}


def ops_again(step: Any, stage: int) -> Counter[str]:
    """How many attentions and activations of a stage run in the backward pass, beyond those of the forward pass."""
    return counted(step.micro_batches.pipeline.stages[stage].unsplit[1]) - counted(step.micro_batches.split.plain[stage].forward)


def counted(program: Any, *names: str) -> Counter[str]:
    return Counter(n.op.name for n in program.nodes if n.op.name in (names or ("attention", "gelu")))


# -- one stage -----------------------------------------------------------------------------------------------------------------


def by_hand(path: Path, stages: Any, layers: tuple[int, ...] = (), **setting: Any) -> Plan:
    predicted = {"step_ms": 1.0, "tokens_per_s": 1.0, "mfu": 0.1, "memory_gb": 1.0, "gap": 0.0}
    own = Setting.counted(**{"global_batch": BATCH, "recompute": "mixed", "dtype": "fp32", **setting})
    own = replace(own, stages=stages) if stages else own.with_layers(layers)
    made = Plan("gpt2", "4xx86-2", 16, "time", "weft", own, LIMITS, predicted)
    made.save(path)
    return load(path)


ROW = (
    ("first", "none", 1),
    *(("layer", way, 1) for way in ("activation", "selective", "ffn", "per-op", "full")),
    ("layer", "none", 2),
    ("last", "none", 1),
)


def test_each_layer_of_one_stage_runs_its_own_part_again(tmp_path: Path) -> None:
    by_hand(tmp_path / "plan.json", (ROW,), dp=2, micro_batch=4)
    want = torch_losses(gpt())

    def job(rank: int) -> None:
        got, step = weft_losses(gpt(), tmp_path / "plan.json")
        close(got, want)
        assert step.plan.micro == 2 and ops_again(step, 0) == {"attention": 2, "gelu": 5}

    on_ranks(2, job, tmp_path)


# -- captured programs -----------------------------------------------------------------------------------------------------------

NET = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch(seed):
    gen = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(256, 16, generator=gen), "y": torch.randn(256, 16, generator=gen)}


def make(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *(Block(32) for _ in range(depth)), nn.Linear(32, 16)), loss, batch(0)
"""


class Own:
    """A user's model, with the face of a zoo's."""

    def __init__(self, folder: Path, depth: int = 3) -> None:
        made: dict[str, Any] = {}
        exec((folder / "net.py").read_text(), made)
        self.model, self.loss = made["make"](depth)[0].double(), made["loss"]
        self.batch = made["batch"]

    def example(self, _: int, seed: int = 0) -> dict[str, torch.Tensor]:
        return {k: x.double() for k, x in self.batch(seed).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("own")
    (where / "net.py").write_text(NET)
    (where / "four.yaml").write_text(FOUR)
    return where


def test_units_of_an_earlier_planner_are_refused(folder: Path) -> None:
    task = task_of(f"{folder}/net.py:make", cluster(str(folder / "four.yaml")), 256, "fp32")
    made = plan_program(task, Limits(memory=1.5002e9), lambda _: None)
    assert isinstance(made, Plan) and made.setting.stages
    made.save(folder / "plan.json")
    own = Own(folder)
    with pytest.raises(PlanError, match=r"(?s)has stages of an earlier planner.*units of a program.*plan again"):
        parallelize(own.model, own.loss, adam(own), own.example(256), plan=folder / "plan.json")


# -- schedules -----------------------------------------------------------------------------------------------------------------


def test_every_order_the_planner_knows_is_run(folder: Path, tmp_path: Path) -> None:
    want = torch_losses(Own(folder, 8))

    def job(rank: int) -> None:
        for schedule in ("interleaved", "1f1b-eager", "zero-bubble-eager"):  # the others stand in test_pipeline.py
            close(weft_losses(Own(folder, 8), f"pp4,{schedule},micro8", check=False)[0], want)

    on_ranks(4, job, tmp_path)


# -- what is not followed ------------------------------------------------------------------------------------------------------


def captured(name: str, **settings: Any) -> Any:
    w = zoo.small(name, **settings)
    return capture(w.model, w.example(4), w.loss, torch.optim.SGD(w.model.parameters(), lr=0.1))


def test_a_model_of_other_layers_is_told(tmp_path: Path) -> None:
    plan = by_hand(tmp_path / "plan.json", (), layers=(3, 4), pp=2, recompute="none")
    pieces = stage_contents_of(plan.spec)
    assert pieces is not None
    found = pieces.find(captured("gpt2", layers=4))
    assert found.splits is None and found.recomputed is None
    assert found.problems == ["where its stages are split: it has 7 layers and this model 4 blocks that repeat"]
    both = Counted((ROW[:3], ROW[3:])).find(captured("gpt2", layers=4))
    assert both.problems == ["where its stages are split and what it recomputes: it has 7 layers and this model 4 blocks that repeat"]


def test_half_a_layer_where_there_is_none(folder: Path) -> None:
    stages = (
        (("first", "none", 1), ("layer", "none", 1), ("attention", "none", 1)),
        (("ffn", "none", 1), ("layer", "none", 1), ("last", "none", 1)),
    )
    own = Own(folder)
    step = capture(own.model, own.example(4), own.loss, torch.optim.SGD(own.model.parameters(), lr=0.1))
    found = Counted(stages).find(step)
    assert found.problems == ["where stage 1 of it ends: inside layer 2 no value passes alone"] and found.splits is None


def test_a_part_that_a_layer_does_not_have() -> None:
    stages = ((("first", "none", 1), ("layer", "activation", 2), ("last", "none", 1)),)
    found = Counted(stages).find(captured("mixtral-8x7b", layers=2))
    assert found.problems == ["recompute activation of layer 1, 2: it has no such part that could be recomputed, and keeps everything"]
    assert found.recomputed == ()


def test_what_is_told_is_refused(tmp_path: Path) -> None:
    by_hand(tmp_path / "plan.json", (ROW,))
    w = gpt(layers=2)
    with pytest.raises(PlanError, match=r"(?s)plan.json cannot be followed on this step.*it has 7 layers and this model 2 blocks that repeat"):
        parallelize(w.model, w.loss, adam(w), w.example(BATCH), plan=str(tmp_path / "plan.json"))
