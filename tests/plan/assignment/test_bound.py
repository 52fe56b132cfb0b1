"""Prices and messages prove bounds, and never too much."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plan.assignment.problems import brute_force, random_problem, tight_problem
from weft.plan.assignment import assemble
from weft.plan.assignment.bound import Relaxation, ascend
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.reduce import reduce


@pytest.mark.parametrize("seed", range(30))
def test_a_bound_never_exceeds_the_optimum(seed: int) -> None:
    p = reduce(tight_problem(seed)).core
    r = Relaxation(p)
    dual = ascend(r, r.start(), p.c, np.inf, 60, Budget(1e12))
    assert dual.bound <= brute_force(p) + 1e-6
    assert (dual.prices >= 0).all()


def test_more_steps_never_lower_it() -> None:
    p = reduce(tight_problem(5)).core
    r = Relaxation(p)
    dual = ascend(r, r.start(), p.c, np.inf, 10, Budget(1e12))
    again = ascend(r, dual, p.c, np.inf, 40, Budget(1e12))
    assert again.bound >= dual.bound - 1e-9


def test_on_a_tree_without_limits_it_is_exact() -> None:
    rng = np.random.default_rng(1)
    p = assemble([rng.uniform(0, 1, 4) for _ in range(12)], [(v // 2, v, rng.uniform(0, 1, (4, 4))) for v in range(1, 12)])
    r = Relaxation(p)
    dual = ascend(r, r.start(), p.c, np.inf, 200, Budget(1e12))
    assert dual.bound == pytest.approx(reduce(p).paid)


def test_prices_find_the_worth_of_memory() -> None:
    """Ten nodes would each pay 3 for 2 units; five units are there, so a unit is worth 1.5 and the relaxation pays for 15."""
    p = assemble([[3.0, 0.0]] * 10, claims=[(v, 0, 1, [0, 2]) for v in range(10)], limit=5)
    r = Relaxation(p)
    dual = ascend(r, r.start(), p.c, 24.0, 400, Budget(1e12))
    assert dual.bound == pytest.approx(30 - 7.5, rel=1e-3)


def test_work_is_counted_and_ends_it() -> None:
    p = random_problem(2, forbidden=0.0)
    r, budget = Relaxation(p), Budget(1.0)
    ascend(r, r.start(), p.c, np.inf, 50, budget)
    assert budget.over
    assert budget.spent == r.work
