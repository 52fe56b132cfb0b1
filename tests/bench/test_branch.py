"""Boxes, their halves, and what no longer fits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench._assignment.branch import Box, Tree, _minima, split, starve
from tests.plan.assignment.problems import brute_force, tight_problem
from weft.plan.assignment import Problem
from weft.plan.assignment.bound import Relaxation, ascend
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.reduce import reduce


def core(seed: int) -> Problem:
    return reduce(tight_problem(seed)).core


@pytest.mark.parametrize("seed", range(20))
def test_the_tree_closes_on_the_optimum(seed: int) -> None:
    p = core(seed)
    r = Relaxation(p)
    root = ascend(r, r.start(), p.c, np.inf, 30, Budget(1e12))
    with ThreadPoolExecutor(2) as pool:
        tree = Tree(r, root, None, pool)
        best = tree.grow(Budget(1e9))
    truth = brute_force(p)
    assert (best.cost if best else np.inf) == pytest.approx(truth)
    assert tree.bound == pytest.approx(truth)


def test_halves_part_one_node_and_lose_nothing() -> None:
    r = Relaxation(core(4))
    dual = ascend(r, r.start(), r.p.c, np.inf, 30, Budget(1e12))
    box = Box(np.ones(len(r.p.c), bool), dual)
    low, high = split(r, box, dual.bound + 10)
    assert ((low | high) == box.allowed).all()
    assert len(np.unique(r.node[~(low & high)])) == 1


def test_a_point_has_no_halves() -> None:
    r = Relaxation(core(4))
    allowed = np.zeros(len(r.p.c), bool)
    allowed[r.p.c_at[:-1]] = True
    dual = ascend(r, r.start(), r.c, np.inf, 5, Budget(1e12))
    assert split(r, Box(allowed, dual), dual.bound + 10) == []


@pytest.mark.parametrize("seed", range(20))
def test_starving_forbids_only_what_no_choice_within_the_limits_takes(seed: int) -> None:
    p = core(seed)
    r = Relaxation(p)
    allowed = np.ones(len(p.c), bool)
    some = starve(r, allowed)
    fitting = [x for x in np.ndindex(*p.k) if p.excess(x) == 0]
    assert some or not fitting
    if some:
        assert all(allowed[p.c_at[:-1] + np.array(x)].all() for x in fitting)


def test_minima_over_intervals() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(size=37)
    start = rng.integers(0, 36, 200)
    stop = start + 1 + rng.integers(0, 37 - start)
    assert _minima(values, start, stop).tolist() == [values[a:b].min() for a, b in zip(start, stop, strict=True)]
