"""Mini-buckets prove bounds that see cycles, and never too much."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.plan.assignment.problems import brute_force, random_problem, tight_problem
from weft.plan.assignment import Problem, assemble
from weft.plan.assignment.bound import Dual, Relaxation, ascend, hopeless
from weft.plan.assignment.buckets import Elimination
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.reduce import reduce


@cache
def problems() -> list[tuple[Problem, float]]:
    """Random problems with forbidden entries, and such that want much memory; and what they cost at least."""
    some = [random_problem(seed, nodes=6) for seed in range(60)] + [tight_problem(seed, nodes=7) for seed in range(15)]
    return [(p, brute_force(p)) for p in some]


def raised(r: Relaxation, steps: int) -> Dual:
    return ascend(r, r.start(), r.c, np.inf, steps, Budget(1e12))


@pytest.mark.parametrize("entries", [1, 12, 50, 1e6])
@pytest.mark.parametrize("steps", [1, 40])
def test_a_bound_never_exceeds_the_optimum(entries: float, steps: int) -> None:
    assert sum(np.isfinite(truth) for _, truth in problems()) > 40
    for p, truth in problems():
        r = Relaxation(p)
        assert Elimination(r, r.c, raised(r, steps), entries).bound <= truth + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_in_one_bucket_for_each_node_it_is_exact(seed: int) -> None:
    p = replace(tight_problem(seed), limit=np.full(9, 1e6))
    r = Relaxation(p)
    done = Elimination(r, r.c, raised(r, 3), 1e9)
    assert done.bound == pytest.approx(brute_force(p))
    assert p.cost(done.decode()) == pytest.approx(done.bound)


def test_it_sees_what_messages_cannot() -> None:
    """Three nodes that all want to differ, with two strategies each: every edge alone can, not all of them."""
    p = assemble([[0, 0]] * 3, [(u, v, np.eye(2)) for u, v in [(0, 1), (1, 2), (0, 2)]])
    r = Relaxation(p)
    dual = raised(r, 100)
    assert dual.bound == pytest.approx(0.0)
    assert Elimination(r, r.c, dual).bound == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(30))
def test_hopeless_strategies_are_in_no_better_choice(seed: int) -> None:
    p = reduce(tight_problem(seed)).core
    r = Relaxation(p)
    ceiling = brute_force(p) + 20
    out = hopeless(r, r.c, raised(r, 40), ceiling)
    for x in np.ndindex(*p.k):
        if p.excess(x) == 0 and p.cost(x) < ceiling:
            assert not out[p.c_at[:-1] + np.array(x)].any()


@pytest.mark.parametrize("seed", range(30))
def test_a_part_of_a_problem_costs_and_uses_what_the_whole_does(seed: int) -> None:
    p = reduce(tight_problem(seed)).core
    rng = np.random.default_rng(seed)
    allowed = rng.random(len(p.c)) < 0.6
    allowed[p.c_at[:-1] + rng.integers(0, p.k)] = True
    r = Relaxation(p)
    part = r.within(allowed).p
    for x in np.ndindex(*part.k):
        whole = np.flatnonzero(allowed)[part.c_at[:-1] + np.array(x)] - p.c_at[:-1]
        assert part.cost(x) == p.cost(whole)
        assert part.profile(x).tolist() == p.profile(whole).tolist()
    dual = raised(r, 5)
    inner = dual.within(r, allowed, 0.1)
    again = dual.around(r, allowed, inner)
    assert again.messages.tobytes() == dual.messages.tobytes()
    assert (again.beliefs[allowed] == dual.beliefs[allowed]).all()
