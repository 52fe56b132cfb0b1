"""Explanations are plans too: each next best decides otherwise and is no better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.errors import PlanError
from weft.plan.explain import explain
from weft.plan.plan import Plan
from weft.plan.planner import Request, make_plan
from weft.plan.search import CLOSE


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(Request("gpt2", "1x2xA100", batch=8))
    assert isinstance(made, Plan)
    return made


def test_every_next_best_decides_otherwise_and_costs(plan: Plan) -> None:
    found = list(explain(plan))
    assert {"recompute", "zero", "micro_batch"} <= {r.decision for r in found}
    for r in found:
        assert r.ms >= -CLOSE * plan.step_ms and r.value == str(getattr(plan.setting, r.decision))
        assert r.why and r.flips
    again = next(r for r in found if r.decision == "recompute")
    assert "recompute" in again.other


def test_unequal_copies_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match="unequal copies are not explained"):
        list(explain(replace(plan, shares=({"kind": "A100"},))))
