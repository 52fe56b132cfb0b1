"""The contest's solver: exact on what can be enumerated, with HiGHS and without, the same every time, and ended by a deadline."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._assignment import solve
from tests.plan.assignment.problems import brute_force, random_problem, tight_problem


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([12.0, 20.0, 30.0, 60.0]))
def test_small_problems_are_solved_exactly(seed: int, limit: float) -> None:
    p = random_problem(seed, limit=limit)
    answer, truth = solve(p), brute_force(p)
    assert answer.feasible == np.isfinite(truth)
    if answer.feasible:
        assert answer.cost == p.cost(answer.x) == pytest.approx(truth)
        assert p.feasible(answer.x)
        assert answer.optimal
    else:
        assert answer.reason


@pytest.mark.parametrize("seed", range(8))
def test_without_highs_it_is_exact_too(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("bench._assignment.solve"), "has_highs", lambda: False)
    p = random_problem(seed, nodes=8, limit=40.0)
    answer, truth = solve(p, work=3e8), brute_force(p)
    assert answer.cost == pytest.approx(truth)


def test_the_same_work_gives_the_same_answer() -> None:
    p = tight_problem(3, nodes=40, k=6)
    first, second = (solve(p, work=5e7) for _ in range(2))
    assert first.x.tolist() == second.x.tolist()
    assert (first.cost, first.bound, first.work) == (second.cost, second.bound, second.work)
    assert p.feasible(first.x) and 0 < first.bound <= first.cost


def test_a_deadline_cuts() -> None:
    answer = solve(tight_problem(3, nodes=40, k=6), work=np.inf, seconds=1.0)
    assert answer.feasible
    assert answer.seconds < 60
