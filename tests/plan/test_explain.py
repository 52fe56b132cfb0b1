"""Explanations are plans too: each next best decides otherwise and is no better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.core.errors import PlanError
from weft.plan.explain import _decision_words, changes, explain
from weft.plan.plan import Plan
from weft.plan.planner import Request, make_plan
from weft.plan.search import CLOSE


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(Request("gpt2", "1x2xA100", batch=8, fastest=True))
    assert isinstance(made, Plan)
    return made


def test_every_next_best_decides_otherwise_and_costs(plan: Plan) -> None:
    found = list(explain(plan))
    assert {"recompute", "zero", "micro_batch"} <= {r.decision for r in found}
    for r in found:
        assert r.ms >= -CLOSE * plan.step_ms and r.value == str(plan.setting.named(r.decision))
        assert r.why and r.flips
    again = next(r for r in found if r.decision == "recompute")
    assert "recompute" in again.other


def test_what_is_said_to_win_is_decided_so_when_planned_there(plan: Plan) -> None:
    """And where no change is said to flip a decision, none of those that were asked does."""
    found = {r.decision: r for r in explain(plan)}
    won = {d: r.flips.partition(" wins from ") for d, r in found.items() if r.factor and " wins from " in r.flips}
    assert won
    for decision, (words, _, at) in won.items():
        kind, _, size = at.partition(" ")
        asked = {"sequence": {"seq": int(size.replace(",", "")), "batch": 8}, "batch": {"batch": int(size.replace(",", ""))}}[kind]
        there = make_plan(Request("gpt2", "1x2xA100", **asked, fastest=True))
        assert isinstance(there, Plan) and _decision_words(decision, there.setting.named(decision)) == words
    assert all("unchanged for" in r.flips for r in found.values() if not r.factor)


def test_changes_are_problems_of_their_own() -> None:
    problem = Request("gpt2", "2x2xA100@400", batch=32).problem()
    made = {c.when: c for c in changes(problem)}
    assert made["from sequence 4,096"].problem.shape.seq == 4096 and made["from batch 128"].problem.batch == 128
    slow = made["on a network 4x slower"].problem.cluster
    assert slow.links[-1].get("bandwidth") == problem.cluster.links[-1].get("bandwidth") / 4 and slow.links[0] == problem.cluster.links[0]


def test_a_single_node_has_no_network_to_change() -> None:
    alone = [c.when for c in changes(Request("gpt2", "1x4xA100", batch=32).problem())]
    assert alone == ["from sequence 4,096", "from batch 128"]


def test_unequal_shares_are_explained_against_equal_ones() -> None:
    request = Request("gpt2", "1x2xA100+1x2xH100", batch=64)
    made = make_plan(request)
    assert isinstance(made, Plan) and made.setting.shares
    found = {r.decision: r for r in explain(made)}
    assert found["shares"].ms > 0 and found["shares"].other.startswith("equal shares")
    assert "A100" in found["shares"].value and "H100" in found["shares"].value
    assert all(r.ms >= -CLOSE * made.step_ms and r.why and r.flips for r in found.values())


def test_shares_of_another_setting_are_told(plan: Plan) -> None:
    with pytest.raises(PlanError, match="does not run on its own cluster"):
        list(explain(replace(plan, setting=replace(plan.setting, dp=1, pp=2, shares=(("A100", 1, 1, 1),)))))
