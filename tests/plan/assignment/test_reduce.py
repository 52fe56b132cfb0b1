"""Reductions keep the optimum and can be taken back."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tests.plan.assignment.problems import brute_force, random_problem
from weft.plan.assignment import Problem, assemble
from weft.plan.assignment.reduce import binding, reduce

INF = np.inf


@pytest.mark.parametrize("seed", range(120))
def test_the_optimum_stays_and_comes_back(seed: int) -> None:
    p = random_problem(seed)
    done = reduce(p)
    truth = brute_force(p)
    if done.reason is not None:
        assert truth == INF
        return
    assert brute_force(done.core) + done.paid == pytest.approx(truth)


@pytest.mark.parametrize("seed", range(40))
def test_every_choice_of_the_core_is_one_of_the_whole(seed: int) -> None:
    p = random_problem(seed, limit=45.0)
    done = reduce(p)
    if done.reason is not None or done.core.k.prod() > 4000:
        return
    for x in product(*(range(k) for k in done.core.k)):
        whole = done.lift(np.array(x, np.int64))
        assert p.cost(whole) == pytest.approx(done.core.cost(x) + done.paid)
        assert (p.excess(whole) == 0) == (done.core.excess(x) == 0)


def core(p: Problem) -> Problem:
    done = reduce(p)
    assert done.reason is None
    return done.core


TABLE = [[0, 5, 9], [7, 1, 3], [2, 8, 4]]  # nothing to prune, absorb, follow or dominate
OTHER = [[6, 0, 2], [1, 7, 4], [3, 2, 9]]
TIGHT = [(v, 0, 1, [0, 1, 2]) for v in range(3)]
TRIANGLE = [(0, 1, TABLE), (1, 2, OTHER), (0, 2, OTHER)]


def test_what_cannot_shrink_does_not() -> None:
    p = core(assemble([[3, 1, 0]] * 3, TRIANGLE, TIGHT, limit=3))
    assert (p.nodes, p.edges, p.k.tolist()) == (3, 3, [3, 3, 3])


def test_prune_forbidden_strategies() -> None:
    p = assemble([[3, 1, INF]] * 3, TRIANGLE, TIGHT, limit=3)
    assert core(p).k.max(initial=0) <= 2


def test_prune_what_a_neighbour_forbids() -> None:
    edges = [*TRIANGLE[1:], (0, 1, [[0, 5, 9], [7, 1, 3], [INF, INF, INF]])]
    assert core(assemble([[3, 1, 0]] * 3, edges, TIGHT, limit=3)).k.min() <= 2


def test_absorb_a_table_that_is_a_sum() -> None:
    edges = [*TRIANGLE[1:], (0, 1, np.add.outer([1, 2, 3], [4, 0, 9]))]
    assert core(assemble([[3, 1, 0]] * 3, edges, TIGHT, limit=3)).edges < 3


def test_follow_joins_costs_edges_and_claims() -> None:
    same = np.where(np.eye(3, dtype=bool), 0, INF)
    p = assemble([[3, 1, 0]] * 4, [*TRIANGLE, (2, 3, same)], [*TIGHT, (3, 0, 1, [0, 1, 2])], limit=3)
    assert core(p).nodes == 3
    assert core(p).m.max() == 2  # of 4 by two nodes together the limit allows 3: starved to one step


def test_starve_what_can_never_fit() -> None:
    claims = [(0, 0, 1, [0, 1, 9]), *TIGHT[1:]]
    assert core(assemble([[3, 1, 0]] * 3, TRIANGLE, claims, limit=3)).k[0] == 2


def test_dominate_the_costlier_of_two_with_equal_tables() -> None:
    edges = [(0, 1, [*TABLE, TABLE[0]]), (1, 2, OTHER), (0, 2, [*OTHER, OTHER[0]])]
    claims = [(0, 0, 1, [0, 1, 2, 1]), *TIGHT[1:]]
    assert core(assemble([[3, 1, 0, 4], [3, 1, 0], [3, 1, 0]], edges, claims, limit=3)).k[0] == 3


def test_more_usage_is_not_dominated_away_by_less_cost() -> None:
    p = assemble([[1, 0], [1, 0]], claims=[(0, 0, 1, [0, 2]), (1, 0, 1, [0, 2])], limit=3)
    assert core(p).k.tolist() == [2, 2]


def test_eliminate_nodes_that_use_nothing() -> None:
    p = assemble([[3, 1, 0]] * 3, TRIANGLE)
    done = reduce(p)
    assert done.core.nodes == 0
    assert done.paid == brute_force(p) == p.cost(done.lift(np.zeros(0, np.int64)))


def test_no_finite_strategy_is_a_reason() -> None:
    assert reduce(assemble([[1], [INF, INF]])).reason == "node 1 has no strategy of finite cost"


def test_too_little_memory_is_a_reason() -> None:
    done = reduce(assemble([[1, 2], [1]], claims=[(0, 0, 4, [3, 5]), (1, 2, 4, [4])], limit=6))
    assert done.reason == "at time 2 the least that can be in use is 7, beyond the limit 6"


def test_times_that_others_imply_go() -> None:
    claims = [(0, 0, 6, [0, 2]), (1, 2, 4, [0, 2]), (1, 5, 6, [0, 2])]
    p = binding(assemble([[1, 0], [1, 0]], claims=claims, limit=3))
    assert (p.times, p.start.tolist(), p.stop.tolist()) == (1, [0, 0], [1, 1])


def test_soft_limits_are_a_node_that_gives_room() -> None:
    room = (2, 0, 1, [0, -1, -2])
    p = assemble([[1, 0], [1, 0], [0, 0.25, 0.5]], claims=[(0, 0, 1, [0, 2]), (1, 0, 1, [0, 2]), room], limit=2)
    done = reduce(p)
    assert brute_force(done.core) + done.paid == brute_force(p) == 0.5
