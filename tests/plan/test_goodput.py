"""Progress per second, and the batch that has most of it."""

from __future__ import annotations

import math

import pytest

from bench._adaptive import pick
from bench._shares import pieces_by, slowest
from weft.core.errors import PlanError
from weft.plan.goodput import climb, efficiency, plan_goodput, progress
from weft.plan.plan import Plan, dealt, parse
from weft.plan.planner import Infeasible, Request
from weft.plan.space import Limits


def test_a_batch_as_large_as_the_noise_is_half_as_good() -> None:
    assert progress(64, 64) == 0.5 == efficiency(64, 64) and efficiency(1, math.inf) == 1.0


def test_pick_weighs_time_against_noise() -> None:
    seconds = {b: 1.0 + b / 64 for b in (8, 16, 32, 64, 128, 256)}  # a fixed cost, and one per sample
    assert max(seconds, key=lambda b: b / seconds[b]) == 256  # the most samples a second
    found = [pick(seconds, noise) for noise in (4.0, 64.0, 4096.0)]
    assert found == sorted(found) and found[0] < 64 and found[-1] == 256
    best = pick(seconds, 64.0)
    assert all(progress(best, 64) / seconds[best] >= progress(b, 64) / s for b, s in seconds.items())


@pytest.mark.parametrize("start", range(12))
def test_climb_finds_the_lowest(start: int) -> None:
    assert climb(start, lambda k: (k - 5) ** 2) == 5
    assert climb(start, lambda k: math.inf if k < 3 else k) == 3


def test_the_batch_of_a_plan_grows_with_the_noise() -> None:
    plans = [plan_goodput(Request("gpt2", "1x2xA100"), noise) for noise in (8.0, 128.0)]
    assert all(isinstance(p, Plan) and p.objective == "goodput" for p in plans)
    batches = [p.setting.global_batch for p in plans]
    assert batches[0] < batches[1]
    for p in plans:
        rate = {int(b): progress(int(b), p.predicted["noise"]) / ms for b, ms in p.predicted["batches_ms"].items()}
        assert max(rate, key=lambda b: rate[b]) == p.setting.global_batch
        assert parse(p.text()).text() == p.text()


def test_no_noise_and_no_memory() -> None:
    with pytest.raises(PlanError, match="no noise scale"):
        plan_goodput(Request("gpt2", "1x2xA100"), 0.0)
    assert isinstance(plan_goodput(Request("gpt2", "1x2xA100", limits=Limits(memory=1e8)), 8.0), Infeasible)


def test_pieces_follow_speed() -> None:
    assert dealt(3, 2) == [2, 1] and dealt(5, 3) == [2, 2, 1]
    assert pieces_by([2.0, 1.0], 24) == 3 and pieces_by([1.0, 1.0], 24) == 2 and pieces_by([1.5, 1.0], 20) == 5
    assert slowest(3, [2.0, 1.0]) == pytest.approx(1 / 3) and slowest(2, [2.0, 1.0]) == 0.5
    with pytest.raises(PlanError, match="no shares by speed"):
        pieces_by([1.0, 0.0], 24)
    with pytest.raises(PlanError, match="a sample for each of 4 ranks"):
        pieces_by([1.0] * 4, 3)
