"""The contest's solver: that of plans, and where it leaves a gap, HiGHS while the core is small enough, then annealing and branch and bound by turns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import numpy as np

from bench._assignment import exact
from bench._assignment.branch import Tree
from weft.plan.assignment.bound import Dual, Relaxation
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.problem import Problem
from weft.plan.assignment.search import SLICE, Choice, better, seeding, walk
from weft.plan.assignment.solve import CLOSED, WORK, Anytime, Solution, solved

LOOSE = 1e-4  # a gap that branch and bound reaches sooner than HiGHS, and within a limit of work
EXACT_ENTRIES = 100_000  # edge table entries that HiGHS is trusted with
HEAT = 0.3  # T of `weft.plan.assignment.search` at first, as a part of the mean cost of a node


def solve(p: Problem, *, work: float = WORK, seconds: float = np.inf, gap: float = CLOSED, threads: int = 2, seed: int = 0) -> Solution:
    """The best choice found within `work` table entries read, or the first within `gap` of the optimum. `seconds` can only end it early."""
    with ThreadPoolExecutor(threads) as pool:
        return solved(p, Budget(work, seconds), partial(Proving, gap=gap, pool=pool, threads=threads, seed=seed))


@dataclass
class Proving(Anytime):
    """A search that goes on until the gap is closed."""

    pool: ThreadPoolExecutor = field(kw_only=True)
    threads: int = 2
    seed: int = 0
    turns: int = 0

    def finish(self, r: Relaxation, dual: Dual) -> None:
        if len(r.p.w) <= EXACT_ENTRIES and self.gap < LOOSE and has_highs():
            part = self.budget.share(0.5)
            outcome = exact.solve(r.p, self.best, part, self.gap)
            self.budget.spend(part.spent)
            self.best = better(self.best, outcome.best)
            self.bound = max(self.bound, min(outcome.bound, self.best.cost if self.best else np.inf))
        if not self.closed:
            self._improve(r, dual)

    def _improve(self, r: Relaxation, dual: Dual) -> None:
        tree = Tree(r, dual, self.best, self.pool)
        while not self.budget.over and not self.closed:
            self.turns += 1
            if self.best is not None:
                seeds = [self.seed + 100 * self.turns + i for i in range(self.threads)]
                tree.best = anneal(r, dual, self.best, seeds, 10 * self.turns, self.pool, self.budget)
            part = Budget(min(SLICE * 20 * self.turns * self.threads, self.budget.work - self.budget.spent), self.budget.left)
            self.best = tree.grow(part)
            self.budget.spend(part.spent)
            self.bound = max(self.bound, tree.bound)


def anneal(r: Relaxation, dual: Dual, start: Choice, seeds: Sequence[int], rounds: int, pool: ThreadPoolExecutor, budget: Budget) -> Choice:
    """One walker per seed, cooling over the rounds; the first stays cold. They meet after each round, where one that has
    fallen far behind joins the best."""
    charge, best = r.charge(dual.prices), start
    states = [seeding(s) for s in seeds]
    places = [start.x for _ in seeds]
    heat = HEAT * abs(start.cost) / max(r.p.nodes, 1)
    for i in range(rounds):
        warmth = [heat * (1 - i / rounds) ** 2 * (j > 0) for j in range(len(seeds))]
        results = list(pool.map(partial(walk, r, charge, r.c, work=SLICE), places, states, warmth))
        for found, _ in results:
            best = better(best, found) or best
        behind = 1 + 4 * heat * (1 - i / rounds) ** 2 * r.p.nodes**0.5 / abs(best.cost)
        places = [last if r.p.cost(last) <= best.cost * behind else best.x for _, last in results]
        if not budget.spend(SLICE * len(seeds)):
            break
    return best


def has_highs() -> bool:
    return find_spec("highspy") is not None
