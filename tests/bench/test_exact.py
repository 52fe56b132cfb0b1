"""HiGHS on the same problems."""

from __future__ import annotations

import numpy as np
import pytest

from bench._assignment import exact
from tests.plan.assignment.problems import brute_force, tight_problem
from weft.plan.assignment import assemble
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.reduce import reduce
from weft.plan.assignment.search import Choice

pytest.importorskip("highspy")


@pytest.mark.parametrize("seed", range(25))
def test_it_is_exact(seed: int) -> None:
    p = reduce(tight_problem(seed)).core
    truth = brute_force(p)
    outcome = exact.solve(p, None, Budget(1e12))
    assert outcome.bound == pytest.approx(truth)
    if np.isfinite(truth):
        assert outcome.best is not None
        assert p.excess(outcome.best.x) == 0
        assert outcome.best.cost == pytest.approx(truth)


def test_a_start_that_is_best_stays() -> None:
    p = reduce(tight_problem(1)).core
    x = np.array(min((x for x in np.ndindex(*p.k) if p.excess(x) == 0), key=p.cost))
    outcome = exact.solve(p, Choice(p.cost(x), x), Budget(1e12))
    assert outcome.best is not None
    assert outcome.best.cost == pytest.approx(p.cost(x))


def test_costs_of_very_different_size() -> None:
    p = assemble([[1e18, 3.0], [0.0, 1e18]], [(0, 1, [[0, 5], [7, 1e18]])], [(0, 0, 1, [0, 1]), (1, 0, 1, [1, 0])], 2)
    outcome = exact.solve(p, Choice(10.0, np.array([1, 0])), Budget(1e12))
    assert outcome.best is not None
    assert (outcome.best.x.tolist(), outcome.best.cost) == ([1, 0], 10.0)


def test_spent_work_ends_it_with_what_is_known() -> None:
    p = reduce(tight_problem(1)).core
    start = Choice(1e6, np.zeros(p.nodes, np.int64))
    budget = Budget(1.0)
    budget.spend(1.0)
    outcome = exact.solve(p, start, budget)
    assert outcome.best is start
    assert outcome.bound == -np.inf
