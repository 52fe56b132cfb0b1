"""Lower bounds by messages on edges and prices on memory.

For any messages mu and any prices lambda >= 0 every feasible x costs at least

    L(mu, lambda) = sum_v min_a theta_v[a] + sum_e min_ab (w_e[a, b] - mu_eu[a] - mu_ev[b]) - sum_t lambda_t M_t
    theta_v[a]    = c_v[a] + sum_{q of v} lambda(q) m_q[a] + sum_{e at v} mu_ev[a],     lambda(q) = sum_{t in q} lambda_t

A sweep visits the nodes in order. At v it first pulls all it can out of each edge, mu_ev[b] = min_a (w_e[a, b] - mu_eu[a]),
then hands equal shares of theta_v to the edges ahead (sequential tree-reweighted message passing). Neither step lowers L.
Prices follow the gradient of L softened over near-best strategies, with momentum and Polyak's step length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.plan.assignment.budget import Budget
from weft.plan.assignment.kernel import Kernel, kernel
from weft.plan.assignment.problem import Floats, Ints, Problem, offsets, summed

Mask = NDArray[np.bool_]

MOMENTUM = 0.7
PATIENCE = 6  # steps without progress before the step length shrinks
SHRINK = 0.7
PROGRESS = 3e-3  # of what a step is to bring; a smaller rise of the bound is none


@dataclass(frozen=True, eq=False)
class Dual:
    """Prices and messages, the bound they prove, and what each node believes of its strategies under them."""

    bound: float
    prices: Floats
    messages: Floats
    beliefs: Floats
    step: float = 0.3  # Polyak's factor, less as it converges

    def within(self, r: Relaxation, allowed: Mask, step: float) -> Dual:
        """What there is of it for the allowed strategies alone."""
        return Dual(self.bound, self.prices, self.messages[allowed[r.subject]], self.beliefs[allowed], step)

    def around(self, r: Relaxation, allowed: Mask, inner: Dual) -> Dual:
        """With what became known of the allowed strategies put back; none of the others is believed in."""
        messages, beliefs = self.messages.copy(), np.full(len(allowed), np.inf)
        messages[allowed[r.subject]], beliefs[allowed] = inner.messages, inner.beliefs
        return Dual(max(self.bound, inner.bound), inner.prices, messages, beliefs)


class Relaxation:
    """A problem with its kernel and the maps between strategies, claims and times. `c` and `w` are its costs, all finite."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.c, self.w = _finite(p)
        self.kernel: Kernel = kernel(replace(p, c=self.c, w=self.w))
        self.work = 3 * len(p.w) + 20 * (len(p.c) + len(p.m) + p.times)  # of one step

    @cached_property
    def typical(self) -> float:
        """About what a choice made blindly would cost."""
        c, w = (costs[np.isfinite(costs)] for costs in (self.p.c, self.p.w))
        return float(np.abs(c).mean() * self.p.nodes + (np.abs(w).mean() * self.p.edges if len(w) else 0.0)) or 1.0

    @cached_property
    def going_rate(self) -> Floats:
        """A price that makes memory matter about as much as all else."""
        return np.asarray(self.typical / max(self.p.times, 1) / np.maximum(self.p.limit, self.p.limit.max(initial=1.0) * 1e-6))

    @cached_property
    def node(self) -> Ints:
        """The node of each strategy."""
        return np.repeat(np.arange(self.p.nodes), self.p.k)

    @cached_property
    def claim(self) -> Ints:
        """The claim of each entry of m."""
        return np.repeat(np.arange(len(self.p.owner)), self.p.k[self.p.owner])

    @cached_property
    def strategy(self) -> Ints:
        """The strategy that makes use of each entry of m, counted through all nodes."""
        first = self.p.c_at[self.p.owner] - self.p.m_at[:-1]
        return np.repeat(first, self.p.k[self.p.owner]) + np.arange(len(self.p.m))

    @cached_property
    def subject(self) -> Ints:
        """The strategy that each entry of the messages speaks of, counted through all nodes."""
        ends = np.concatenate([self.p.tail, self.p.head])
        at = offsets(self.p.k[ends])
        return np.repeat(self.p.c_at[ends] - at[:-1], self.p.k[ends]) + np.arange(at[-1])

    @cached_property
    def pair(self) -> tuple[Ints, Ints]:
        """The strategies of tail and head that each entry of w is for."""
        p = self.p
        edge = np.repeat(np.arange(p.edges), np.diff(p.w_at))
        a, b = np.divmod(np.arange(len(p.w)) - p.w_at[edge], p.k[p.head][edge])
        return p.c_at[p.tail[edge]] + a, p.c_at[p.head[edge]] + b

    def within(self, allowed: Mask) -> Relaxation:
        """The same problem with the allowed strategies alone, some of every node."""
        p, (tail, head) = self.p, self.pair
        k = np.add.reduceat(allowed, p.c_at[:-1], dtype=np.int64)
        return Relaxation(replace(p, k=k, c=p.c[allowed], w=p.w[allowed[tail] & allowed[head]], m=p.m[allowed[self.strategy]]))

    def charge(self, prices: Floats) -> Floats:
        """What each strategy pays for what it uses."""
        running = np.concatenate([np.zeros(1), np.cumsum(prices)])
        per_claim = running[self.p.stop] - running[self.p.start]
        return summed(self.strategy, self.p.m * per_claim[self.claim], len(self.p.c))

    def rent(self, prices: Floats) -> float:
        """What the limits themselves would pay."""
        return float((prices * self.p.limit).sum())

    def usage(self, weights: Floats) -> Floats:
        """What is in use at every time when strategies are taken by weight."""
        return self.p.spread(summed(self.claim, self.p.m * weights[self.strategy], len(self.p.owner)))

    def least(self, values: Floats) -> Floats:
        """The least of each node's values."""
        return np.minimum.reduceat(values, self.p.c_at[:-1]) if len(values) else values

    def soften(self, beliefs: Floats, temperature: float) -> Floats:
        """Weights that fall off with how far a strategy is from its node's best."""
        weights = np.exp((self.least(beliefs)[self.node] - beliefs) / temperature)
        return np.asarray(weights / np.add.reduceat(weights, self.p.c_at[:-1])[self.node])

    def start(self) -> Dual:
        return Dual(-np.inf, np.zeros(self.p.times), self.kernel.silence(), self.c.copy())


def ascend(r: Relaxation, dual: Dual, c: Floats, ceiling: float, steps: int, budget: Budget) -> Dual:
    """Raise the bound for node costs c, until it reaches the ceiling or `steps` are done. Never returns a lower one."""
    scale = np.maximum(r.p.limit, r.p.limit.max(initial=1.0) * 1e-6)
    best, prices, messages, step = replace(dual, bound=-np.inf), dual.prices, dual.messages.copy(), dual.step
    velocity, stalled = np.zeros(r.p.times), 0
    for _ in range(steps):
        cost = c + r.charge(prices)
        r.kernel.sweep(cost, messages, up=True)
        beliefs = r.kernel.sweep(cost, messages, up=False)
        bound = r.kernel.bound(cost, messages) - r.rent(prices)
        size = max(abs(bound), 1e-3 * r.typical)
        gap = min(max(ceiling - bound, 1e-9 * size), size)
        stalled = 0 if bound > best.bound + PROGRESS * step * gap else stalled + 1
        if bound > best.bound:
            best = Dual(bound, prices, messages.copy(), beliefs, step)
        if best.bound >= ceiling or not budget.spend(r.work):
            break
        over = r.usage(r.soften(beliefs, 0.3 * gap / r.p.nodes)) / scale - r.p.limit / scale
        velocity = _ahead(MOMENTUM * velocity + _ahead(over, prices), prices)
        if stalled > PATIENCE:
            step, stalled, prices, velocity = step * SHRINK, 0, best.prices, np.zeros(r.p.times)
        prices = np.maximum(prices + step * gap / max(float((velocity * velocity).sum()), 1e-12) * velocity / scale, 0.0)
    return replace(best, step=step)


def hopeless(r: Relaxation, c: Floats, dual: Dual, ceiling: float) -> Mask:
    """The strategies that no choice cheaper than the ceiling takes."""
    cost, messages = c + r.charge(dual.prices), dual.messages.copy()
    bound = r.kernel.bound(cost, messages) - r.rent(dual.prices)
    beliefs = r.kernel.sweep(cost, messages, up=True)  # the bound only rises along the sweep, so it holds at every visit
    return np.asarray(bound + beliefs - r.least(beliefs)[r.node] >= ceiling + 1e-9 * abs(ceiling))


def _finite(p: Problem) -> tuple[Floats, Floats]:
    """Costs with infinity replaced by more than any choice that does without can cost."""
    tables = [(np.where(np.isfinite(v), np.abs(v), 0.0), at[:-1]) for v, at in ((p.c, p.c_at), (p.w, p.w_at)) if len(v)]
    beyond = 1.0 + 2.0 * float(sum(np.maximum.reduceat(v, at).sum() for v, at in tables))
    return np.where(np.isfinite(p.c), p.c, beyond), np.where(np.isfinite(p.w), p.w, beyond)


def _ahead(direction: Floats, prices: Floats) -> Floats:
    """The part of a direction that does not push a price below zero."""
    return np.where((prices <= 0) & (direction < 0), 0.0, direction)
