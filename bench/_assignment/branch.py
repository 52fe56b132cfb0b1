"""Branch and bound on what nodes use.

A box allows some strategies of each node. Its bound is L of bound.py on these alone, reached from its parent's messages and prices
in a few steps, or that of buckets.py where it is higher; strategies that then cannot be in a better choice go. The box of least bound
is split in two where most money for memory is in doubt: for node v, with weights p_a that fall off with the distance of a from v's
best under the prices lambda,

    min(p_low, p_high) * (mean charge of high - mean charge of low),     high = strategies that pay more than v's mean

and, where no usage is in doubt, between the most likely strategy of the most uncertain node and its others. In each half
strategies that no longer fit next to the least usage of the others go first. Every box also yields a solution, by decoding.
"""

from __future__ import annotations

import heapq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.plan.assignment.bound import Dual, Mask, Relaxation, ascend, hopeless
from weft.plan.assignment.buckets import Elimination
from weft.plan.assignment.budget import Budget
from weft.plan.assignment.problem import TOLERANCE, Floats
from weft.plan.assignment.search import Choice, better, decode, seeding, walk

STEPS = 30  # of ascent for each box, as often as it then shrinks
WORTHWHILE = 0.9  # a box that keeps more of its strategies is not looked at again
STEP = 0.05  # Polyak's factor to begin a box with
POLISH = 1.0  # work spent to improve what a box decodes to, as a part of the work for its bound


@dataclass(frozen=True, eq=False)
class Box:
    """Allowed strategies, and what is known of the best choice among them."""

    allowed: Mask
    dual: Dual


class Tree:
    """An unfinished search. `bound` holds for all that is not yet ruled out."""

    def __init__(self, r: Relaxation, root: Dual, best: Choice | None, pool: ThreadPoolExecutor) -> None:
        self.r, self.best, self.pool = r, best, pool
        self.made = 0
        self.open: list[tuple[float, int, Box]] = []
        self._push(Box(np.ones(len(r.p.c), bool), root))

    @property
    def ceiling(self) -> float:
        return self.best.cost if self.best else np.inf

    @property
    def bound(self) -> float:
        return min(self.open[0][0] if self.open else np.inf, self.ceiling)

    def grow(self, budget: Budget) -> Choice | None:
        """Split boxes while any could hold something better and the budget lasts; the best found so far."""
        while self.open and self.open[0][0] < self.ceiling and not budget.over:
            _, _, box = heapq.heappop(self.open)
            halves = split(self.r, box, self.ceiling)
            if not halves:
                self.best = better(self.best, self._point(box))
                continue
            tasks = [(half, box.dual, budget.share(1.0), self.made + i) for i, half in enumerate(halves)]
            for new, found in self.pool.map(lambda task: self._evaluate(*task), tasks):
                self.best = better(self.best, found)
                if new is not None and new.dual.bound < self.ceiling:
                    self._push(new)
            budget.spend(sum(part.spent for _, _, part, _ in tasks))
        return self.best

    def _point(self, box: Box) -> Choice | None:
        """The one choice left in a box that cannot be split, if it fits."""
        x = np.flatnonzero(box.allowed) - self.r.p.c_at[:-1]
        return Choice(self.r.p.cost(x), x) if self.r.p.excess(x) == 0 else None

    def _push(self, box: Box) -> None:
        self.made += 1
        heapq.heappush(self.open, (box.dual.bound, self.made, box))

    def _evaluate(self, allowed: Mask, dual: Dual, budget: Budget, seed: int) -> tuple[Box | None, Choice | None]:
        """A box made as small as is found without splitting it, and a choice in it; none if it holds nothing better than the best."""
        r, before = self.r, np.inf
        while allowed.sum() < WORTHWHILE * before:
            before = float(allowed.sum())
            if not starve(r, allowed):
                return None, None
            part = r.within(allowed)
            budget.spend(2 * r.work)
            inner = ascend(part, dual.within(r, allowed, STEP), part.c, self.ceiling, STEPS, budget)
            dual = dual.around(r, allowed, inner)
            if dual.bound >= self.ceiling:
                return None, None
            last, allowed = allowed, allowed.copy()
            allowed[last] = ~hopeless(part, part.c, inner, self.ceiling)
        done = Elimination(part, part.c, inner)
        budget.spend(done.work)
        dual = replace(dual, bound=max(dual.bound, done.bound))
        return (Box(allowed, dual), self._inside(part, last, inner, done, budget, seed)) if dual.bound < self.ceiling else (None, None)

    def _inside(self, part: Relaxation, allowed: Mask, dual: Dual, done: Elimination, budget: Budget, seed: int) -> Choice | None:
        """A choice among the allowed strategies, read off what is known of them and improved."""
        x = done.decode()
        found = Choice(part.p.cost(x), x) if part.p.excess(x) == 0 else decode(part, dual, part.c)
        if found is None:
            return None
        work = POLISH * STEPS * part.work
        found, _ = walk(part, part.charge(dual.prices), part.c, found.x, seeding(seed), 0.0, work)
        budget.spend(work)
        return Choice(found.cost, np.flatnonzero(allowed)[part.p.c_at[:-1] + found.x] - self.r.p.c_at[:-1])


def split(r: Relaxation, box: Box, ceiling: float) -> list[Mask]:
    """Two halves of a box; none if every node has one strategy left."""
    beliefs = np.where(box.allowed, box.dual.beliefs, np.inf)
    gap = min(ceiling - box.dual.bound, max(abs(box.dual.bound), 1e-3 * r.typical))
    weights = r.soften(beliefs, gap / r.p.nodes)
    high = box.allowed & _dearer(r, weights, r.charge(box.dual.prices))
    doubt = _doubt(r, weights, high, r.charge(box.dual.prices))
    if doubt.max(initial=0.0) <= 0:
        first = _first(r, weights)
        several = np.add.reduceat(box.allowed, r.p.c_at[:-1], dtype=np.int64) > 1
        high, doubt = box.allowed & ~first, several * (1 + 1e-9 - np.maximum.reduceat(weights, r.p.c_at[:-1]))
        if not several.any():
            return []
    v = int(doubt.argmax())
    own = r.node == v
    return [box.allowed & ~(own & high), box.allowed & ~(own & ~high)]


def _dearer(r: Relaxation, weights: Floats, charge: Floats) -> Mask:
    """Strategies charged more than the mean of their node."""
    mean = np.add.reduceat(weights * charge, r.p.c_at[:-1])
    return np.asarray(charge > mean[r.node] * (1 + 1e-12))


def _doubt(r: Relaxation, weights: Floats, high: Mask, charge: Floats) -> Floats:
    """How much money is in doubt between the high and the low strategies of each node."""
    at = r.p.c_at[:-1]
    p_high, p_low = np.add.reduceat(weights * high, at), np.add.reduceat(weights * ~high, at)
    paid_high, paid_low = np.add.reduceat(weights * charge * high, at), np.add.reduceat(weights * charge * ~high, at)
    both = (p_high > 1e-12) & (p_low > 1e-12)
    price_gap = paid_high / np.where(both, p_high, 1) - paid_low / np.where(both, p_low, 1)
    return np.where(both, np.minimum(p_high, p_low) * price_gap, 0.0)


def _first(r: Relaxation, weights: Floats) -> Mask:
    """The most likely strategy of each node, the first of equals."""
    top = np.flatnonzero(weights == np.maximum.reduceat(weights, r.p.c_at[:-1])[r.node])
    _, at = np.unique(r.node[top], return_index=True)
    first = np.zeros(len(weights), bool)
    first[top[at]] = True
    return first


def starve(r: Relaxation, allowed: Mask) -> bool:
    """Forbid, in place, what cannot fit next to the least usage of the others; False if some node has nothing left."""
    p, before = r.p, -1
    while p.times and len(p.m) and before != (before := int(allowed.sum())):
        usage = np.where(allowed[r.strategy], p.m, np.inf)
        least = np.minimum.reduceat(usage, p.m_at[:-1])
        if np.isinf(least).any():
            return False
        room = p.limit * (1 + TOLERANCE) - p.spread(least)
        if room.min() < 0:
            return False
        spare = least + _minima(room, p.start, p.stop)
        allowed[r.strategy[usage > spare[r.claim]]] = False
    return bool(np.logical_or.reduceat(allowed, p.c_at[:-1]).all())


def _minima(values: Floats, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Floats:
    """The least value in each half-open interval, by a table of minima over powers of two."""
    rows = [values]
    while 2 ** len(rows) <= len(values):
        half = 2 ** (len(rows) - 1)
        rows.append(np.minimum(rows[-1][:-half], rows[-1][half:]))
    power = np.frexp(stop - start)[1] - 1
    out = np.empty(len(start))
    for i, row in enumerate(rows):
        here = power == i
        out[here] = np.minimum(row[start[here]], row[stop[here] - 2**i])
    return out
