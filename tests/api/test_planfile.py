"""Plan files of captured models: parameters and optimizer state are held as the plan says, and training equals one process."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench._graph.planner import make_plan, task_of
from tests.api.ranks import on_ranks
from weft.api import planfile
from weft.api.parallelize import parallelize
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.layout import R
from weft.frontend.capture import capture
from weft.ops.comm import is_comm
from weft.plan.plan import Plan
from weft.plan.space import Limits
from weft.plan.spec import Spec
from weft.rewrite.engine import same_erased

STEPS, BATCH = 3, 8
NET = """
import torch
from torch import nn


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make(width=512):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))
    return model, loss, batch(0)


def batch(seed):
    gen = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 64, generator=gen), "y": torch.randn(8, 64, generator=gen)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's model, and a plan for two processes of it."""
    where = tmp_path_factory.mktemp("planned")
    (where / "net.py").write_text(NET)
    made = make_plan(task_of(f"{where}/net.py:make", cluster("2xx86-2"), BATCH, "fp32"), Limits(), lambda _: None)
    assert isinstance(made, Plan) and made.layouts["inputs"]
    made.save(where / "plan.json")
    return where


def net(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("net")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("net", None)  # other tests have a file of that name too


def adamw(model: torch.nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **settings)


def as_type(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: x.to(dtype) for k, x in batch.items()}


def torch_losses(folder: Path, dtype: torch.dtype, clip: float = 0.0, **settings: Any) -> list[float]:
    own, out = net(folder), []
    model = own.make()[0].to(dtype)
    optimizer = adamw(model, **settings)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = own.loss(model, as_type(own.batch(i), dtype))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        out.append(loss.item())
    return out


def weft_losses(folder: Path, plan: str, dtype: torch.dtype, settings: Any = None, **more: Any) -> tuple[list[float], Any]:
    own = net(folder)
    model = own.make()[0].to(dtype)
    step = parallelize(model, own.loss, adamw(model, **(settings or {})), as_type(own.batch(0), dtype), plan=str(folder / plan), **more)
    return [step(as_type(own.batch(i), dtype)).item() for i in range(STEPS)], step


def held(step: Any) -> dict[str, dict[str, str]]:
    """As a plan file says it: what is not whole, along the axes of a stage."""
    kinds = ("param.", "exp_avg")
    every = {n: x.layout.placements for n, x in step.program.input_names.items() if n.startswith(kinds)}
    cut = {n: {a: str(p) for a, p in places.items() if p != R and a != "pp"} for n, places in every.items()}
    return {n: places for n, places in cut.items() if places}


def planned(folder: Path, plan: str = "plan.json") -> dict[str, dict[str, str]]:
    inputs = planfile.load(folder / plan).layouts["inputs"]
    return {n: places for n, places in inputs.items() if n.startswith(("param.", "exp_avg"))}


def test_the_program_of_the_plan_is_run(folder: Path, tmp_path: Path) -> None:
    want = torch_losses(folder, torch.float32)

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got, step = weft_losses(folder, "plan.json", torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert held(step) == planned(folder) and any(n.startswith("param.") for n in held(step))

    on_ranks(2, job, tmp_path)


def communication(program: Any) -> Counter[str]:
    return Counter(n.op.name for n in program.nodes if is_comm(n))


def test_other_types_settings_and_batches_run_the_layouts_of_the_plan(folder: Path) -> None:
    own, found = net(folder), planfile.follow(str(folder / "plan.json"))
    batches = [as_type(own.batch(0), torch.float64), {k: torch.cat([x, x]) for k, x in own.batch(0).items()}]
    for batch in batches:
        model = own.make()[0].to(batch["x"].dtype)
        captured = capture(model, batch, own.loss, adamw(model, betas=(0.5, 0.6), weight_decay=0.3))
        made = found.placed(captured, ())
        assert made is not None and same_erased(captured.program, made)
        assert communication(made) == communication(found.program) and made.text != found.program.text


def test_an_optimizer_set_otherwise_keeps_its_settings(folder: Path, tmp_path: Path) -> None:
    settings = {"betas": (0.5, 0.6), "weight_decay": 0.3}
    want = torch_losses(folder, torch.float64, **settings)

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            got, step = weft_losses(folder, "plan.json", torch.float64, settings, check=False)
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        assert held(step) == planned(folder)

    on_ranks(2, job, tmp_path)


def test_what_a_step_does_beyond_the_plan_is_placed_around_it_and_pins_are_refused(folder: Path, tmp_path: Path) -> None:
    clipped = torch_losses(folder, torch.float64, clip=0.1)

    def job(rank: int) -> None:
        got, step = weft_losses(folder, "plan.json", torch.float64, clip=0.1)
        torch.testing.assert_close(got, clipped, rtol=1e-8, atol=1e-8)
        assert held(step) == planned(folder)
        with pytest.raises(PlanError, match=r"(?s)fixes the layout of every tensor.*no pins next to it.*leave out pins="):
            weft_losses(folder, "plan.json", torch.float64, pins=["2=dp:R"])

    on_ranks(2, job, tmp_path)


def test_a_step_that_is_not_the_planned_one_is_refused(folder: Path) -> None:
    own, found = net(folder), planfile.follow(folder / "plan.json")
    model = own.make()[0]
    other = capture(model, own.batch(0), lambda m, b: (m(b["x"]) - b["y"]).abs().mean(), adamw(model))
    with pytest.raises(PlanError, match=r"(?s)is for another step.*the plan's \d nodes \(.*none that could be laid out so.*--save plan.json"):
        found.placed(other, ())
    odd = {k: x[:7] for k, x in own.batch(0).items()}
    captured = capture(model, odd, own.loss, adamw(model))
    if any("dp:S(0)" in str(x.layout) for n, x in found.program.input_names.items() if n.startswith("batch.")):
        with pytest.raises(PlanError, match="is for another step"):
            found.placed(captured, ())


def test_stages_hold_their_tensors_as_planned(folder: Path, tmp_path: Path) -> None:
    one = planfile.load(folder / "plan.json")
    replace(one, setting=replace(one.setting, pp=2, micro=2, splits=("2",))).save(folder / "stages.json")
    want = torch_losses(folder, torch.float64)

    def job(rank: int) -> None:
        got, step = weft_losses(folder, "stages.json", torch.float64)
        assert [{n.split(".")[1] for n in s.forward.input_names if n.startswith("param.")} for s in step.micro_batches.split.plain] == [{"0"}, {"2", "4"}]
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
        assert held(step) == planned(folder) and step.plan.pp == 2 and step.plan.micro_batches == 2

    on_ranks(4, job, tmp_path)


def test_another_model_is_refused(folder: Path) -> None:
    own = net(folder)
    model = own.make(256)[0]
    found = planfile.follow(str(folder / "plan.json"))
    captured = capture(model, own.batch(0), own.loss, adamw(model))
    with pytest.raises(PlanError, match=r"plan.json is for another model\n\n +needed +0.weight of \[512, 64\]\n +found +\[256, 64\]"):
        found.input_layouts(captured, Spec(dp=2))
