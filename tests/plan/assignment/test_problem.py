"""What a problem says about a choice."""

from __future__ import annotations

import numpy as np
import pytest

from weft.plan.assignment import assemble

CHAIN = assemble(
    costs=[[1, 2], [3, 5, 7]],
    edges=[(0, 1, [[10, 20, 30], [40, np.inf, 60]])],
    claims=[(0, 0, 2, [4, 1]), (1, 2, 4, [5, 6, 7])],
    limit=5,
)


def test_cost_is_of_nodes_and_edges() -> None:
    assert CHAIN.cost([0, 2]) == 1 + 7 + 30
    assert CHAIN.cost([1, 1]) == np.inf


def test_intervals_are_half_open() -> None:
    assert CHAIN.profile([0, 0]).tolist() == [4, 4, 5, 5]
    assert CHAIN.feasible([0, 0])


def test_excess_is_of_the_worst_time() -> None:
    assert CHAIN.excess([0, 2]) == pytest.approx(2)
    assert not CHAIN.feasible([0, 2])


def test_a_forbidden_choice_is_not_feasible() -> None:
    assert not CHAIN.feasible([1, 1])


def test_limits_may_differ_over_time() -> None:
    p = assemble([[1, 1]], claims=[(0, 0, 3, [2, 4])], limit=[5, 3, 5])
    assert p.feasible([0])
    assert not p.feasible([1])


def test_whole_bytes_are_held_exactly() -> None:
    limit = 179_269_173_248
    p = assemble([[1, 1]], claims=[(0, 0, 1, [limit, limit + 1])], limit=limit)
    assert p.feasible([0])
    assert not p.feasible([1])


def test_a_problem_without_nodes_costs_nothing() -> None:
    assert assemble([]).cost([]) == 0
    assert assemble([]).feasible([])
