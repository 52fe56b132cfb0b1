"""Explanations are plans too: each next best decides otherwise and is no better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.errors import PlanError
from weft.plan.explain import _flips, explain
from weft.plan.plan import Plan
from weft.plan.planner import Request, make_plan
from weft.plan.search import CLOSE, Search
from weft.plan.setting import Setting


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


def test_what_flips_a_decision_does() -> None:
    """Two settings, one better: asked anew at the sequence that is said to flip them the other is, and at half of it not yet."""
    copies = Setting(global_batch=32, micro_batch=8, dp=4, zero=1)
    stages = Setting(global_batch=32, micro_batch=4, pp=4)
    search = _search(1024)
    ours, theirs = search.price(copies), search.price(stages)
    assert ours is not None and theirs is not None and ours.seconds < theirs.seconds
    when, factor = _flips(search, ours, theirs)
    at = int(1024 * factor)
    assert when == f"from sequence {at:,}"
    assert _cost(at, stages) < _cost(at, copies) and _cost(at // 2, stages) >= _cost(at // 2, copies)


def _search(seq: int) -> Search:
    return Search(Request("gpt2", "2x2xA100@400", batch=32, seq=seq).problem())


def _cost(seq: int, setting: Setting) -> float:
    """Seconds of a setting, endless where it does not fit."""
    search = _search(seq)
    found = search.price(setting)
    return found.seconds if found is not None and found.memory <= search.memory else float("inf")


def test_unequal_shares_are_explained_against_equal_ones() -> None:
    request = Request("gpt2", "1x2xA100+1x2xH100", batch=64)
    made = make_plan(request)
    assert isinstance(made, Plan) and made.shares
    found = {r.decision: r for r in explain(made)}
    assert found["shares"].ms > 0 and found["shares"].other.startswith("equal shares")
    assert "A100" in found["shares"].value and "H100" in found["shares"].value
    assert all(r.ms >= -CLOSE * made.step_ms and r.why and r.flips for r in found.values())


def test_shares_of_another_setting_are_told(plan: Plan) -> None:
    with pytest.raises(PlanError, match="does not run on its own cluster"):
        list(explain(replace(plan, shares=({"kind": "A100"},), setting=replace(plan.setting, dp=1, pp=2))))
