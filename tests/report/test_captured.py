"""Pages of plans that are more than degrees: a model of the user's own, layouts and stages; stages cut to measure."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.conftest import OWN, planned
from weft.core.errors import PlanError
from weft.plan.explain import Reason, explain
from weft.plan.plan import Plan, load
from weft.plan.planner import Request
from weft.plan.search import Search
from weft.plan.setting import Setting
from weft.plan.space import Limits
from weft.report import facts_of, html, report
from weft.report.facts import Facts

pytestmark = pytest.mark.timeout(400)  # a search takes a while on a busy machine


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"{path}:make"


def facts(plan: Plan, folder: Path) -> Facts:
    plan.save(folder / "plan.json")
    return facts_of(folder / "plan.json", explained=False, run_model=True)


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
    assert highest(f) / 1e9 == pytest.approx(plan.predicted["memory_gb"], rel=0.02)
    held = {t["name"]: t["places"] for t in f.tensors if t["role"] == "param"}
    assert held == {n.removeprefix("param."): plan.layouts["inputs"].get(n, {}) for n in (f"param.{k}" for k in held)}
    assert [v["same"] for v in f.verbs] == [True] and f.says == ()


def test_stages_of_a_plan_are_told_tensor_by_tensor(module: str, tmp_path: Path) -> None:
    plan = planned(module, 2)
    f = facts(plan, tmp_path)
    line = f.views[0].lines["predicted"]
    assert line.seconds * 1e3 == pytest.approx(plan.step_ms, rel=1e-4)
    assert {"stage 0", "stage 1"} < {t.stream for t in line.tasks}
    at = {t["name"]: t["places"]["pp"] for t in f.tensors if t["role"] == "param"}
    assert at["words.weight"] == at["blocks.0.0.weight"] == "O(0)" and at["blocks.5.2.weight"] == "O(1)"
    assert list(at.values()) == sorted(at.values()) and f.mesh == {"pp": 2, "dp": 2}
    assert highest(f) / 1e9 <= plan.predicted["memory_gb"] * 1.01
    page, trace = report(tmp_path / "plan.json", explained=False, run_model=True)
    text = page.read_text()
    assert "stage 1" in text and "Op by op" in text and page.stat().st_size < 2_000_000
    assert {"stage 0", "stage 1"} < {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "M"}


def test_a_model_that_changed_since_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    plan = planned(f"{own}:make", 1)
    gone = facts(load_with(plan, f"{tmp_path}/gone.py:make", tmp_path), tmp_path)
    assert gone.says[0].startswith("The plan is not compared with its model here") and gone.tensors
    other = tmp_path / "other.py"
    other.write_text(OWN.replace("layers=6", "layers=5"))
    changed = facts(load_with(plan, f"{other}:make", tmp_path), tmp_path)
    assert "no longer the model that was planned" in changed.says[0] and changed.verbs == ()


def test_the_command_knows_the_ops_of_a_plan_made_elsewhere(module: str, tmp_path: Path) -> None:
    planned(module, 2).save(tmp_path / "plan.json")
    done = subprocess.run([sys.executable, "-m", "weft", "report", "--no-explain", str(tmp_path / "plan.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.html").is_file()


def test_a_captured_plan_is_explained_by_a_search(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Reason("mesh", "dp2", "dp1 tp2", 0.25, -0.5, "tp +0.3 ms", "no change found")
    monkeypatch.setattr("weft.api.plan_program.explain_program", lambda plan, say: iter([told]))
    planned(module, 2).save(tmp_path / "plan.json")
    text = report(tmp_path / "plan.json", run_model=True)[0].read_text()
    assert "Each decision and its runner-up" in text and "+0.25 ms" in text and "−500.0 MB" in text


def test_the_file_that_a_foreign_plan_names_is_not_run(tmp_path: Path) -> None:
    """Opening a plan is not running what it names, unless the user says so."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    data = planned(f"{own}:make", 1).data()
    trap, touched = tmp_path / "trap.py", tmp_path / "touched"
    trap.write_text(f"open({str(touched)!r}, 'w')\n" + OWN)
    plan = tmp_path / "plan.json"
    for model in (f"{trap}:make", f"{trap}:"):  # of hf:FOLDER only config.json is read
        plan.write_text(json.dumps(data | {"model": model}))
        says = facts_of(plan).says
        assert f"the plan names {model}, which is code that runs only if you allow it" in says[0] and "--run-model" in says[0]
        with pytest.raises(PlanError, match="code that runs only if you allow it") as e:
            list(explain(load(plan)))
        assert "--run-model, if you know that file and the plan" in str(e.value)
        html(load(plan))
    assert not touched.exists()
    plan.write_text(json.dumps(data | {"model": f"{trap}:make"}))
    assert facts_of(plan, explained=False, run_model=True).verbs
    assert touched.exists()


def load_with(plan: Plan, model: str, folder: Path) -> Plan:
    data = plan.data() | {"model": model}
    (folder / "with.json").write_text(json.dumps(data))
    return load(folder / "with.json")


def test_stages_are_drawn_only_where_the_model_may_be_run(module: str, tmp_path: Path) -> None:
    planned(module, 2).save(tmp_path / "plan.json")
    assert "--run-model" in facts_of(tmp_path / "plan.json").says[0]


def test_stages_cut_to_measure_are_drawn_as_they_were_priced(tmp_path: Path) -> None:
    first = (("first", "none", 1), ("layer", "none", 5), ("attention", "full", 1))
    last = (("ffn", "none", 1), ("layer", "activation", 6), ("last", "none", 1))
    setting = Setting.counted(global_batch=16, micro_batch=1, dp=2, pp=2, zero=1, recompute="mixed", dtype="fp16", grad_dtype="fp32")
    setting = replace(setting, stages=(first, last))
    step = Search(Request("gpt2", "4xV100", 16, 256).problem(), Limits()).step(setting)
    predicted = {"step_ms": step.seconds * 1e3, "tokens_per_s": 1.0, "mfu": 0.1, "memory_gb": step.peak_memory.total / 1e9, "gap": 0.0}
    none = {"max_tp": 0, "memory_gb": 0.0, "pins": {}}
    f = facts(Plan("gpt2", "4xV100", 256, "time", "weft", setting, none, predicted), tmp_path)
    assert f.views[0].lines["predicted"].seconds == pytest.approx(step.seconds)
    assert highest(f) == pytest.approx(step.peak_memory.total, rel=0.01)
    assert list(f.stages) == [5.5, 6.5]
