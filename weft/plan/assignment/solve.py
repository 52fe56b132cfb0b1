"""The anytime solver: shrink, bound, search, in turns until the gap is closed or the budget spent.

    1. reduce       the steps of reduce.py, exact
    2. ascend       messages and prices, with a solution decoded and improved every few steps; then mini-buckets
    3. fix          drop a where L - min theta_v + theta_v[a] reaches the best cost known, reduce again, and solve what is left

A solution is checked against the full problem before it is returned. No solution is an answer too, with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from weft.plan.assignment.bound import Dual, Relaxation, ascend, hopeless
from weft.plan.assignment.buckets import Elimination
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.problem import Ints, Problem
from weft.plan.assignment.reduce import Reduced, reduce
from weft.plan.assignment.search import SLICE, Choice, better, decode, seeding, walk

CLOSED = 1e-9  # relative gap at which a solution counts as optimal
WORK = 4e9  # of a solve that was given no limit


@dataclass(frozen=True, eq=False)
class Solution:
    """A choice for every node with its cost, and the bound below which no choice can be. None, and a reason, if there is none."""

    x: Ints | None
    cost: float
    bound: float
    reason: str | None = None
    work: float = 0.0
    seconds: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.x is not None

    @property
    def gap(self) -> float:
        """How far the cost may be above the optimum, as a part of it; infinite without a solution."""
        if self.x is None:
            return np.inf
        return max(self.cost - self.bound, 0.0) / max(abs(self.cost), 1e-30)

    @property
    def optimal(self) -> bool:
        return self.gap <= CLOSED


def solve(p: Problem, *, work: float = WORK, seconds: float = np.inf, gap: float = CLOSED) -> Solution:
    """The best choice found within `work` table entries read, or the first within `gap` of the optimum. `seconds` can only end it early."""
    return solved(p, Budget(work, seconds), partial(Anytime, gap=gap))


def solved(p: Problem, budget: Budget, search: Callable[..., Anytime]) -> Solution:
    """What a search, made of a core problem, a budget and what is paid already, finds within the budget."""
    reduced = reduce(p)
    if reduced.reason is not None:
        return Solution(None, np.inf, np.inf, reduced.reason, budget.spent, time.monotonic() - budget.begun)
    state = search(reduced.core, budget, paid=reduced.paid)
    state.run()
    bound, spent, took = reduced.paid + state.bound, budget.spent, time.monotonic() - budget.begun
    if state.best is None:
        proved = np.isinf(state.bound)
        reason = "no choice fits under the limits" if proved else "no choice that fits under the limits was found in time"
        return Solution(None, np.inf, bound, reason, spent, took)
    x = reduced.lift(state.best.x)
    cost = p.cost(x)
    assert p.feasible(x), "a solution of the core must be one of the full problem"
    return Solution(x, cost, min(_rounded(p, bound), cost), None, spent, took)


def _rounded(p: Problem, bound: float) -> float:
    """A bound on integral costs may be rounded up, with some room for rounding errors."""
    finite = np.concatenate([p.c, p.w])
    finite = finite[np.isfinite(finite)]
    full = bool((finite == np.floor(finite)).all())
    return float(np.ceil(bound - 1e-6 - 1e-10 * abs(bound))) if full and np.isfinite(bound) else bound


@dataclass
class Anytime:
    """What is known of a core problem while it is solved."""

    p: Problem
    budget: Budget
    gap: float = CLOSED
    paid: float = 0.0  # outside this core, but part of what the gap is of
    best: Choice | None = None
    bound: float = -np.inf

    def run(self) -> None:
        if not self.p.nodes:
            self._prove(Choice(0.0, np.zeros(0, np.int64)))
            return
        r = Relaxation(self.p)
        dual = self._root(r)
        if self.closed or self.budget.over:
            return
        smaller = fix(r, dual, self.best)
        if smaller is not None:
            self._inside(smaller)
        else:
            self.finish(r, dual)

    def _prove(self, best: Choice) -> None:
        self.best, self.bound = best, best.cost

    def finish(self, r: Relaxation, dual: Dual) -> None:
        """What is done where the gap is not closed and fixing takes nothing away: nothing, since a plan is good enough by then."""

    @property
    def closed(self) -> bool:
        return self.best is not None and self.best.cost - self.bound <= self.gap * abs(self.best.cost + self.paid)

    def _root(self, r: Relaxation) -> Dual:
        """Raise the bound in rounds, each with a solution; until a round brings little."""
        dual, seed = r.start(), seeding(0)
        for round_ in range(12):
            before, ceiling = dual.bound, self.best.cost if self.best else np.inf
            dual = ascend(r, dual, r.c, ceiling, 20 + 10 * round_, self.budget)
            found = decode(r, dual, r.c)
            if found is not None:
                work = min(30 * r.work, 2 * SLICE)
                found, _ = walk(r, r.charge(dual.prices), r.c, found.x, seed, 0.0, work)
                self.budget.spend(work)
            self.best, self.bound = better(self.best, found), max(self.bound, dual.bound)
            if self.closed or self.budget.over or dual.bound - before < 1e-4 * abs(dual.bound):
                break
        return dual if self.closed or self.budget.over else self._around_cycles(r, dual, seed)

    def _around_cycles(self, r: Relaxation, dual: Dual, seed: Ints) -> Dual:
        """Raise the bound by mini-buckets, and improve the choice read off them."""
        done = Elimination(r, r.c, dual)
        self.budget.spend(done.work)
        x = done.decode()
        if r.p.excess(x) == 0:
            found, _ = walk(r, r.charge(dual.prices), r.c, x, seed, 0.0, SLICE)
            self.budget.spend(SLICE)
            self.best = better(self.best, found)
        self.bound = max(self.bound, done.bound)
        return replace(dual, bound=max(dual.bound, done.bound))

    def _inside(self, smaller: Reduced) -> None:
        """Solve what is left after fixing. If nothing is, the best known is optimal."""
        if smaller.reason is not None:
            assert self.best is not None
            self._prove(self.best)
            return
        inner = replace(self, p=smaller.core, paid=self.paid + smaller.paid, best=None, bound=-np.inf)
        inner.run()
        if inner.best is not None:
            x = smaller.lift(inner.best.x)
            self.best = better(self.best, Choice(self.p.cost(x), x))
        assert self.best is not None
        self.bound = max(self.bound, min(smaller.paid + inner.bound, self.best.cost))


def fix(r: Relaxation, dual: Dual, best: Choice | None) -> Reduced | None:
    """The problem without strategies that cannot be in a better choice, reduced; None if that takes too little away."""
    if best is None:
        return None
    out = hopeless(r, r.c, dual, best.cost)
    if out.mean() < 0.1:
        return None
    p = r.p
    return reduce(replace(p, c=np.where(out, np.inf, p.c)))
