"""The plan record: the same for the same inputs, read back strictly, told in words."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.core.errors import PlanError
from weft.cost.interval import equal_within
from weft.plan.plan import Plan, load, parse
from weft.plan.planner import Request, make_plan, usual_batch
from weft.plan.setting import Setting
from weft.plan.summaries import differences, plan_text, rows

MOVE = {"rule": "stack_columns", "op": "concat", "at": 0, "way": 0, "places": 1, "forward": True}


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(Request("gpt2", "1x4xA100", batch=32))
    assert isinstance(made, Plan)
    return made


def test_the_same_request_gives_the_same_bytes(plan: Plan) -> None:
    again = make_plan(Request("gpt2", "1x4xA100", batch=32))
    assert isinstance(again, Plan) and again.text() == plan.text()


def test_no_baseline_is_better(plan: Plan) -> None:
    """But by what predictions are off against each other, where a simpler plan is taken; those are named."""
    best = min(plan.baselines_ms.values())
    assert plan.step_ms <= best * math.exp(equal_within()) and min([plan.step_ms, *plan.predicted["equal_ms"].values()]) <= best
    fastest = make_plan(Request("gpt2", "1x4xA100", batch=32, fastest=True))
    assert isinstance(fastest, Plan) and fastest.step_ms <= min(fastest.baselines_ms.values())


def test_saved_and_loaded(plan: Plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == parse(plan.text()) and load(tmp_path / "plan.json").setting == plan.setting
    assert load(tmp_path / "plan.json").text() == plan.text()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weft_plan": 3}, "another version"), ({"extra": 1}, "unknown extra"), ({"seq": "long"}, "seq of plan is of the wrong kind"),
        ({"spec": {"stages": [1.5]}}, r"spec.stages\[0\] of plan is of the wrong kind"), ({"given": {"dtype": "bf16"}}, "given of plan cannot be read"),
        ({"spec": {"tp": 2, "open": ["dp"]}}, "leaves decisions open"), ({"spec": {"schedule": "odd"}}, "a schedule of 1f1b"),
        ({"spec": {"dp": 7}}, "the batch does not divide"), ({"spec": {"pp": 2, "splits": ["a", "b"]}}, "1 words with split:"),
        ({"predicted": {}}, r"predicted of plan cannot be read\n\n +needed +step_ms"), ({"layouts": {"rool": []}}, "unknown rool"),
        ({"layouts": {"rules": "x"}}, "layouts.rules of plan is of the wrong kind"),
        ({"layouts": {"moves": [{"rule": "x"}]}}, r"layouts.moves\[0\] of plan cannot be read\n\n +needed +op, at, way, places, forward"),
        ({"layouts": {"moves": [{**MOVE, "at": "0"}]}}, r"layouts.moves\[0\].at of plan is of the wrong kind"),
        ({"layouts": {"moves": [{**MOVE, "at": -1}]}}, r"layouts.moves\[0\].at of plan is of the wrong kind"),
        ({"layouts": {"moves": [{**MOVE, "forward": 1}]}}, r"layouts.moves\[0\].forward of plan is of the wrong kind"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(plan: Plan, change: dict, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        parse(json.dumps({**plan.data(), **change}))


def test_a_bad_setting_is_refused(plan: Plan) -> None:
    data = plan.data()
    with pytest.raises(PlanError, match="recompute of activation, ffn"):
        parse(json.dumps({**data, "spec": {**data["spec"], "recompute": "some"}}))
    with pytest.raises(PlanError, match="not JSON"):
        parse("{")
    with pytest.raises(PlanError, match="cannot read the plan"):
        load("nowhere.json")


def test_moves_are_read_and_told_and_files_without_them_too(plan: Plan) -> None:
    data = plan.data()
    moved, rules = {**data["spec"], "moves": [MOVE]}, {"rules": ["stack_columns"]}
    new, old = (parse(json.dumps({**data, "spec": spec, "layouts": rules})) for spec in (moved, data["spec"]))
    assert new.layouts["moves"] == [MOVE] and parse(new.text()) == new
    assert [next(r for r in rows(p) if r[0] == "rules")[2] for p in (new, old)] == [
        "algebraic rewrites of the step, also by parallelize", "algebraic rewrites of the step; the file does not record where",
    ]  # fmt: skip
    assert ("rules", "none", "stack_columns") in list(differences(plan, new))
    assert parse(json.dumps({**data, "layouts": {"moves": None}})).layouts["moves"] is None


def test_rows_tell_every_degree(plan: Plan) -> None:
    told = {name: value for name, value, _ in rows(plan)}
    assert told["micro-batch"] == str(plan.setting.micro_batch) and told["recompute"] == plan.setting.named("recompute")


def test_differences(plan: Plan) -> None:
    assert not list(differences(plan, plan))
    other = parse(json.dumps({**plan.data(), "spec": {**plan.data()["spec"], "pp": 2, "micro": 8, "dp": 2, "virtual": 2, "schedule": "interleaved"}}))
    assert ("virtual", "1", "2") in list(differences(plan, other))


def test_named_words(plan: Plan) -> None:
    from dataclasses import replace

    made = replace(plan, setting=Setting.counted(global_batch=8, dp=2, tp=2, zero=1, sequence_parallel=True))
    assert str(made.spec) == "dp2,tp2,zero1,micro4,sp"
    assert str(replace(plan, setting=Setting.counted(global_batch=8, pp=4)).spec) == "pp4,micro8"


def test_usual_batch() -> None:
    assert usual_batch(8e9, 8192) == 512 and usual_batch(4e11, 8192) == 2048


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def test_what_waits_for_the_host_is_planned_plain(tmp_path) -> None:
    """Stages of a tiny model share its launches, by less than such times are known to."""
    model = nn.Sequential(*(Residual() for _ in range(6)), nn.Linear(32, 8))
    batch = {"x": torch.rand(64, 32), "y": torch.rand(64, 8)}
    made = weft.plan(model, lambda m, b: F.mse_loss(m(b["x"]), b["y"]), torch.optim.AdamW(model.parameters()), batch, cluster="1x8xA100")
    causes = made.predicted["causes_ms"]
    assert causes["host"] > causes["compute"] and (made.setting.dp, made.setting.pp, made.setting.zero) == (8, 1, 0)
    made.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").predicted == made.predicted
    assert any("pp" in other for other in made.predicted["equal_ms"]) and "the error of a step that waits for the host" in plan_text(made)
