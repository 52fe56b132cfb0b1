"""Any captured program: its roles, its time with and without overlap, its units and stages, and plans never worse than baselines."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from bench._graph.planner import make_plan
from bench._graph.roles import GRADS, PARAMS, RunRoles
from bench._graph.search import ALL, NOTHING, Candidate, GraphSearch
from bench._graph.stages import MIXED, NONE, Stager, pipelined
from bench._graph.task import CapturedTask
from bench._graph.timing import PlacedProgram
from bench._graph.units import Unit, Units
from weft.cluster.spec import cluster
from weft.core.errors import UnknownName
from weft.core.layout import Mesh, R, S
from weft.frontend.capture import Captured, capture
from weft.ops.comm import is_comm
from weft.plan.explain import explain
from weft.plan.named import input_layouts
from weft.plan.place import place
from weft.plan.plan import Plan, parse
from weft.plan.planner import Request
from weft.plan.planner import make_plan as plan_of
from weft.plan.space import Limits
from weft.plan.spec import Spec
from weft.report import html

FOUR = cluster("2x2xV100")


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench._graph.search.EFFORT", 1e7)


@cache
def task(model: str = "mlp") -> CapturedTask:
    sizes = {
        "mlp": (("layers", 4), ("hidden", 512), ("inputs", 512), ("classes", 512)),
        "dlrm": (("tables", (4000, 4000)), ("width", 64), ("bag", 2), ("dense", 16), ("bottom", (64, 64)), ("top", (64, 1))),
    }
    return CapturedTask(model, FOUR, 256, "fp32", "adam", sizes[model])


@cache
def data_parallel(model: str = "mlp") -> PlacedProgram:
    captured = task(model).captured()
    return PlacedProgram(place(captured.program, Mesh(dp=4), task(model).cut_samples("dp")), FOUR)


def test_samples_are_the_dim_that_grows() -> None:
    assert task("dlrm").samples == {"batch.dense": 0, "batch.sparse": 1, "batch.clicked": 0}


def test_gradients_are_reduced_for_updates_alone() -> None:
    roles = RunRoles(data_parallel().program)
    sums = [n for n in roles.order if n.op.name == "all_reduce" and n.shape]
    assert sums and all(roles.carried(n) == GRADS for n in sums)


def test_gathered_parameters_are_given() -> None:
    many = replace(task(), batch=8192)  # so that weights are smaller than what is computed with them
    captured = many.captured()
    held = {name: {"dp": S(0)} for name in captured.program.input_names if name.startswith("param.") and name.endswith("weight")}
    placed = place(captured.program, Mesh(dp=4), held | many.cut_samples("dp"))
    roles = RunRoles(placed)
    assert {roles.carried(n) for n in placed.nodes if n.op.name == "all_gather" and n not in roles.after} == {PARAMS}


def test_updates_come_last_and_backward_after_forward() -> None:
    roles = RunRoles(data_parallel().program)
    phases = [roles._phase(n) for n in roles.order]
    assert phases == sorted(phases)


def test_overlap_hides_and_never_costs() -> None:
    placed = data_parallel()
    plain, beside = placed.step(NOTHING), placed.step(ALL)
    assert beside.seconds < plain.seconds
    assert beside.causes["compute"] == pytest.approx(plain.causes["compute"])
    assert sum(beside.causes.values()) == pytest.approx(beside.seconds)


def test_micro_batches_reduce_gradients_once() -> None:
    placed = data_parallel()
    one, two = (placed.step(NOTHING, rounds=n).causes.get("dp", 0.0) for n in (1, 2))
    assert one <= two < 1.5 * one  # the loss is summed in every micro-batch, gradients once


def test_units_are_cut_where_one_value_goes_on() -> None:
    units = Units(data_parallel(), NOTHING)
    assert len(units.all) >= 4
    assert all(not is_comm(value) for _, value in units.cuts)
    step = data_parallel().step(NOTHING)
    total = sum(u.forward + u.backward + u.once for u in units.all)
    assert total == pytest.approx(step.seconds, rel=0.02)


def unit(seconds: float = 1.0, saved: float = 1e9) -> Unit:
    return Unit(forward=seconds, backward=2 * seconds, weight=seconds, state=1e9, saved=saved, work=1e8, sent=1e7)


def test_stages_are_balanced_and_early_ones_run_more_again() -> None:
    stages = Stager([unit() for _ in range(8)], 6e9, 16, MIXED).split(4)
    assert stages is not None
    again = [len(s.again) for s in stages]
    assert again[0] >= again[-1]
    assert [s.first for s in stages] == sorted(s.first for s in stages)
    assert Stager([unit() for _ in range(8)], 6e9, 16, NONE).split(4) is None


def test_a_step_is_as_long_as_its_slowest_stage_and_the_filling() -> None:
    stages = Stager([unit(1e-3, 1.0) for _ in range(4)], 1e11, 32, NONE).split(4)
    assert stages is not None
    seconds = pipelined(stages, cluster("4x1xH100"), 32, "1f1b", beside=True)
    assert 35 * 3e-3 < seconds < 42 * 3e-3
    assert pipelined(stages, cluster("4x1xH100"), 32, "zero-bubble", beside=True) < seconds


@pytest.mark.parametrize("model", ["mlp", "dlrm"])
def test_a_plan_is_never_worse_than_a_baseline(model: str) -> None:
    made = make_plan(task(model), Limits(), lambda _: None)
    assert isinstance(made, Plan)
    assert min(made.baselines_ms.values()) >= made.step_ms * (1 - 1e-9)
    assert {"data parallel", "zero3", "unity-like", "alpa-like"} <= set(made.baselines_ms)
    assert parse(made.text()).data() == made.data()


def test_the_same_task_gives_the_same_plan() -> None:
    texts = []
    for _ in range(2):
        made = make_plan(task(), Limits(), lambda _: None)
        assert isinstance(made, Plan)
        texts.append(made.text())
    assert texts[0] == texts[1]


def test_experts_cut_tables_by_columns() -> None:
    search = GraphSearch(task("dlrm"), FOUR.device.memory)
    assert search.tables == {"param.tables.0.weight": 64, "param.tables.1.weight": 64}
    way = search.baselines()["tables apart"]
    assert isinstance(way, Candidate)
    held = way.placed.program.input_names["param.tables.0.weight"].layout.placements
    assert held["tp"] == S(1)


def test_too_little_memory_is_told_by_name() -> None:
    made = make_plan(task(), Limits(memory=1.6e9), lambda _: None)
    assert isinstance(made, Plan) or "GB of 1.6 GB" in made["data parallel"]


OWN = """
import torch

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

def make():
    batch = {"x": torch.randn(8, 64), "y": torch.randn(8, 32)}
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32)), loss, batch
"""


def test_a_module_of_the_users_own_is_planned(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    made = plan_of(Request(f"{tmp_path / 'own.py'}:make", "1x2xV100"))
    assert isinstance(made, Plan)
    assert made.setting.global_batch == 16  # as many samples on each device as the example has
    assert made.setting.dp * made.setting.tp * made.setting.pp == 2
    reasons = {r.decision: r for r in explain(made, run_model=True)}
    assert {"mesh", "layouts"} & set(reasons)
    assert all(r.ms >= 0 and r.why and r.flips and r.value != r.other for r in reasons.values())
    page = html(made)
    assert "samples per second" in page and "tokens per second" not in page
    with pytest.raises(UnknownName, match="has no function 'other'"):
        plan_of(Request(f"{tmp_path / 'own.py'}:other", "1x2xV100"))


LIBRARY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def loss(model, batch):
    return model(input_ids=batch["words"], labels=batch["words"], use_cache=False).loss

def make():
    sizes = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    return LlamaForCausalLM(sizes), loss, {"words": torch.randint(64, (2, 16))}
"""


def test_a_model_of_the_library_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "library.py").write_text(LIBRARY)
    for seed in ("1", "2"):  # of Python's hashes, by which sets are walked
        command = [
            sys.executable,
            "-m",
            "weft",
            "plan",
            f"{tmp_path / 'library.py'}:make",
            "--cluster",
            "1x2xV100",
            "--out",
            str(tmp_path / seed),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONHASHSEED": seed})
        assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@cache
def normed() -> Captured:
    """A convolution and a batch norm, on few samples of a large picture."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16))
        batch = {"x": torch.empty(4, 16, 32, 32), "y": torch.empty(4, 16, 32, 32)}
        made = torch.optim.Adam(model.parameters())
        return capture(model, batch, lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), made)


def test_a_sum_is_done_before_it_is_repeated() -> None:
    samples = {f"batch.{k}": {"dp": S(0)} for k in "xy"}
    program = place(normed().program, Mesh(dp=4), samples)
    moved = [math.prod(n.args[0].shape) for n in program.nodes if is_comm(n) and n.op.name != "slice"]
    assert max(moved) <= 16 * 16 * 9  # a weight, never a picture


def test_zero3_gathers_parameters_however_small_the_batch_is() -> None:
    held, options = input_layouts(normed().program, Spec(dp=4, zero=3), normed().states)
    held |= {f"batch.{k}": {"dp": S(0)} for k in "xy"}
    program = place(normed().program, Mesh(dp=4), held, replace(options, gather=frozenset({"dp"})))
    conv = program.find("conv2d")
    assert conv.args[0].type.on("dp") == S(0) and conv.args[1].type.on("dp") == R
    update = next(n for n in program.nodes if n.op.name == "adam" and n.types[0].shape == (16, 16, 3, 3))
    assert all(a.type.on("dp") == S(0) for a in update.args if a.shape == (16, 16, 3, 3))
