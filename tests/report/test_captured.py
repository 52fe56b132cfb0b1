"""Pages of plans for a model of the user's own: layouts of every tensor and op, stages, the step and its memory, as the plan foresees them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from weft.cluster.spec import cluster
from weft.plan.graph.planner import record, task_of
from weft.plan.graph.search import GraphSearch
from weft.plan.plan import Plan, load
from weft.plan.space import Limits
from weft.report import facts_of, report
from weft.report.facts import Facts

MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=256, layers=6):
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def make():
    return Net(), loss, {"x": torch.randint(0, 512, (16, 32)), "y": torch.randint(0, 512, (16, 32))}
"""
WHERE = "2x2xV100"


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(MODULE)
    return f"{path}:make"


@cache
def planned(module: str, pp: int) -> Plan:
    """The plan of one mesh, without a search for the best: so many stages, each of data parallel devices."""
    task = task_of(module, cluster(WHERE), 64, "fp16")
    search = GraphSearch(task, 16e9)
    spot = next(s for s in search.spots(pp) if s.mesh.sizes == {"dp": 4 // pp})
    way = next(w for w in search._ways(spot, 1.0) if w.pp == pp)
    return record(task, Limits(), way, {}, {}, "time")


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.plan.graph.search.EFFORT", 1e6)


def facts(plan: Plan, folder: Path) -> Facts:
    plan.save(folder / "plan.json")
    return facts_of(folder / "plan.json")


def highest(f: Facts) -> float:
    """The most that all curves come to together, at any change of any."""
    times = sorted({t for c in f.memory for t, _ in c.points})
    found = 0.0
    for t in times:
        found = max(found, sum(max((b for at, b in c.points if at == t), default=_before(c.points, t)) for c in f.memory))
    return found


def _before(points: object, t: float) -> float:
    return next((b for at, b in reversed(list(points)) if at <= t), 0.0)  # type: ignore[call-overload]


def test_a_plan_in_one_stage_is_drawn_as_it_was_priced(module: str, tmp_path: Path) -> None:
    plan = planned(module, 1)
    f = facts(plan, tmp_path)
    assert f.views[0].lines["predicted"].seconds * 1e3 == pytest.approx(plan.step_ms, rel=1e-4)
    assert highest(f) / 1e9 == pytest.approx(plan.foreseen["memory_gb"], rel=0.02)
    held = {t["name"]: t["places"] for t in f.held if t["role"] == "param"}
    assert held == {n.removeprefix("param."): plan.layouts["inputs"].get(n, {}) for n in (f"param.{k}" for k in held)}
    assert [v["same"] for v in f.verbs] == [True] and f.says == ()


def test_stages_of_a_plan_are_told_tensor_by_tensor(module: str, tmp_path: Path) -> None:
    plan = planned(module, 2)
    f = facts(plan, tmp_path)
    line = f.views[0].lines["predicted"]
    assert line.seconds * 1e3 == pytest.approx(plan.step_ms, rel=1e-4)
    assert {"stage 0", "stage 1"} < {t.stream for t in line.tasks}
    at = {t["name"]: t["places"]["pp"] for t in f.held if t["role"] == "param"}
    assert at["words.weight"] == at["blocks.0.0.weight"] == "O(0)" and at["blocks.5.2.weight"] == "O(1)"
    assert list(at.values()) == sorted(at.values()) and f.mesh == {"pp": 2, "dp": 2}
    assert highest(f) / 1e9 <= plan.foreseen["memory_gb"] * 1.01
    page, trace = report(tmp_path / "plan.json")
    text = page.read_text()
    assert "stage 1" in text and "Op by op" in text and page.stat().st_size < 2_000_000
    assert {"stage 0", "stage 1"} < {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "M"}


def test_a_model_that_changed_since_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(MODULE)
    plan = planned(f"{own}:make", 2)
    gone = facts(load_with(plan, f"{tmp_path}/gone.py:make", tmp_path), tmp_path)
    assert gone.says[0].startswith("The plan is not compared with its model here") and gone.held
    other = tmp_path / "other.py"
    other.write_text(MODULE.replace("layers=6", "layers=5"))
    changed = facts(load_with(plan, f"{other}:make", tmp_path), tmp_path)
    assert "no longer the model that was planned" in changed.says[0] and changed.verbs == ()


def load_with(plan: Plan, model: str, folder: Path) -> Plan:
    data = plan.data() | {"model": model}
    (folder / "with.json").write_text(json.dumps(data))
    return load(folder / "with.json")


def test_a_plan_saved_without_its_program_says_so(module: str, tmp_path: Path) -> None:
    data = planned(module, 2).data()
    data["layouts"] = {k: v for k, v in data["layouts"].items() if k != "program"}
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert "plan again" in facts_of(tmp_path / "old.json").says[0]
