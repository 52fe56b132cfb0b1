"""The inner loops in Python: what `native.cpp` does, step for step and to the last bit. Slow, and its judge."""

from __future__ import annotations

from math import exp, inf, log
from typing import TYPE_CHECKING

import numpy as np

from weft.plan.assignment.problem import Floats, Ints

if TYPE_CHECKING:
    from weft.plan.assignment.kernel import Kernel

CLAIM = 256  # the work of moving a claim, against reading one entry of a table
_MASK = (1 << 64) - 1


def sweep(p: Kernel, c: Floats, messages: Floats, beliefs: Floats, up: int) -> None:
    for v in range(p.nodes) if up else range(p.nodes - 1, -1, -1):
        theta = beliefs[_own(p, v)]
        theta[:] = c[_own(p, v)]
        ahead = []
        for e in _edges(p, v):
            u = _other(p, e, v)
            own = messages[_message(p, e, v)]
            if (u < v) == bool(up):
                own[:] = (_table(p, e, v) + -messages[_message(p, e, u)]).min(1)
            else:
                ahead.append(own)
            theta += own
        share = 1.0 / max(len(ahead), len(_edges(p, v)) - len(ahead), 1)
        for own in ahead:
            own -= share * theta


def bound(p: Kernel, c: Floats, messages: Floats) -> float:
    total = 0.0
    for e in range(p.edges):
        v = int(p.head[e])
        least = (_table(p, e, v) + -messages[_message(p, e, int(p.tail[e]))]).min(1)
        total += float((least - messages[_message(p, e, v)]).min())
    for v in range(p.nodes):
        theta = c[_own(p, v)].copy()
        for e in _edges(p, v):
            theta += messages[_message(p, e, v)]
        total += float(theta.min())
    return total


def decode(p: Kernel, c: Floats, messages: Floats, up: int, x: Ints) -> int:
    room = p.limit.copy()
    x[:] = -1
    for v in range(p.nodes) if up else range(p.nodes - 1, -1, -1):
        score = c[_own(p, v)].copy()
        for e in _edges(p, v):
            u = _other(p, e, v)
            score += _table(p, e, v)[:, x[u]] if x[u] >= 0 else messages[_message(p, e, v)]
        x[v] = _cheapest(p, room, v, score)
        if x[v] < 0:
            return 0
        _claim(p, room, v, int(x[v]), 1)
    return 1


def walk(p: Kernel, c: Floats, price: Floats, x: Ints, best: Ints, seed: Ints, heat: float, work: int) -> float:
    w = _TreeWalk(p, c, price, x, seed)
    gain = most = 0.0
    while w.work < work:
        gain -= w.move(heat)
        w.work += 1
        if gain > most:
            most = gain
            best[:] = x
    return most


class _TreeWalk:
    """Local search by trees: see search.py."""

    def __init__(self, p: Kernel, c: Floats, price: Floats, x: Ints, seed: Ints) -> None:
        self.p, self.c, self.price, self.x, self.seed = p, c, price, x, seed
        self.work = 0
        self.room = p.limit.copy()
        self.score = np.zeros(len(c))
        for v in range(p.nodes):
            _claim(p, self.room, v, int(x[v]), 1)

    def move(self, heat: float) -> float:
        low, high = log(4.0), log(1.5 * self.p.nodes + 4.0)
        region = self._grow(min(self.p.nodes, int(exp(low + self._unit() * (high - low)))))
        scale = 1.25 * self._unit()
        patience = -log(1.0 - self._unit()) * heat if heat > 0 else 0.0
        forest = self._thin(region)
        above = self._orient(forest)
        was = self._held(forest)
        self._gather(forest, above, scale)
        before = [int(self.x[v]) for v in forest]
        done = self._propagate(forest, above)
        if len(done) == len(forest):
            change = self._held(forest) - was
            if change <= patience:
                return change
        self._undo(forest, before, done)
        return 0.0

    def _next(self) -> int:
        s = int(self.seed[0]) & _MASK
        s ^= s << 13 & _MASK
        s ^= s >> 7
        s ^= s << 17 & _MASK
        self.seed[0] = s - (1 << 64) if s >> 63 else s
        return s >> 11

    def _below(self, n: int) -> int:
        return self._next() % n

    def _unit(self) -> float:
        return self._next() / 9007199254740992.0

    def _grow(self, size: int) -> list[int]:
        p = self.p
        first = self._below(p.nodes)
        if p.edges and self._below(2):
            e = self._below(p.edges)
            first = int(p.tail[e] if self._below(2) else p.head[e])
        region, reached = [first], {first}
        for v in region:
            if len(region) >= size:
                break
            edges = _edges(p, v)
            turn = self._below(len(edges)) if edges else 0
            for e in edges[turn:] + edges[:turn]:
                u = _other(p, e, v)
                if len(region) < size and u not in reached:
                    reached.add(u)
                    region.append(u)
        if self._below(2):
            for i in range(len(region) - 1, 0, -1):
                j = self._below(i + 1)
                region[i], region[j] = region[j], region[i]
        return region

    def _thin(self, region: list[int]) -> dict[int, int]:
        up: dict[int, int] = {}  # the forest; each node points towards the root of its tree
        for v in region:
            roots = [_root(up, u) for e in _edges(self.p, v) if (u := _other(self.p, e, v)) in up]
            if len(set(roots)) == len(roots):
                up[v] = v
                up.update(dict.fromkeys(roots, v))
        return up

    def _orient(self, forest: dict[int, int]) -> dict[int, int]:
        above: dict[int, int] = {}  # node: edge to its parent, roots first
        for f in forest:
            if f in above:
                continue
            above[f] = -1
            queue = [f]
            for v in queue:
                for e in _edges(self.p, v):
                    u = _other(self.p, e, v)
                    if u in forest and u not in above:
                        above[u] = e
                        queue.append(u)
        return above

    def _held(self, forest: dict[int, int]) -> float:
        total = 0.0
        for v in forest:
            total += float(self.c[self.p.c_at[v] + self.x[v]])
            for e in _edges(self.p, v):
                u = _other(self.p, e, v)
                if u not in forest or self.p.tail[e] == v:
                    total += float(_table(self.p, e, v)[self.x[v], self.x[u]])
        return total

    def _gather(self, forest: dict[int, int], above: dict[int, int], scale: float) -> None:
        p = self.p
        for v in forest:
            out = self.score[_own(p, v)]
            out[:] = self.c[_own(p, v)] + scale * self.price[_own(p, v)]
            for e in _edges(p, v):
                u = _other(p, e, v)
                if u not in forest:
                    out += _table(p, e, v)[:, self.x[u]]
            self.work += int(p.k[v]) * (len(_edges(p, v)) + 1) + CLAIM * int(p.claim_at[v + 1] - p.claim_at[v])
        for v, e in reversed(above.items()):
            if e >= 0:
                u = _other(p, e, v)
                self.score[_own(p, u)] += (_table(p, e, u) + self.score[_own(p, v)]).min(1)
                self.work += int(p.k[u] * p.k[v])

    def _propagate(self, forest: dict[int, int], above: dict[int, int]) -> list[int]:
        p, done = self.p, []
        for v in forest:
            _claim(p, self.room, v, int(self.x[v]), -1)
        for v, e in above.items():
            score = self.score[_own(p, v)].copy()
            if e >= 0:
                score += _table(p, e, v)[:, self.x[_other(p, e, v)]]
            a = _cheapest(p, self.room, v, score)
            if a < 0:
                break
            self.x[v] = a
            _claim(p, self.room, v, a, 1)
            done.append(v)
        return done

    def _undo(self, forest: dict[int, int], before: list[int], done: list[int]) -> None:
        for v in done:
            _claim(self.p, self.room, v, int(self.x[v]), -1)
        for v, a in zip(forest, before, strict=True):
            self.x[v] = a
            _claim(self.p, self.room, v, a, 1)


def _root(up: dict[int, int], v: int) -> int:
    while up[v] != v:
        up[v] = v = up[up[v]]
    return v


def _own(p: Kernel, v: int) -> slice:
    return slice(p.c_at[v], p.c_at[v + 1])


def _edges(p: Kernel, v: int) -> list[int]:
    found: list[int] = p.near[p.near_at[v] : p.near_at[v + 1]].tolist()
    return found


def _other(p: Kernel, e: int, v: int) -> int:
    return int(p.head[e] if p.tail[e] == v else p.tail[e])


def _message(p: Kernel, e: int, v: int) -> slice:
    at = p.tail_at if p.tail[e] == v else p.head_at
    return slice(at[e], at[e + 1])


def _table(p: Kernel, e: int, v: int) -> Floats:
    """w of edge e with a row for each strategy of v."""
    table = p.w[p.w_at[e] : p.w_at[e + 1]].reshape(p.k[p.tail[e]], p.k[p.head[e]])
    return table if p.tail[e] == v else table.T


def _claim(p: Kernel, room: Floats, v: int, a: int, sign: int) -> None:
    for q in range(p.claim_at[v], p.claim_at[v + 1]):
        room[p.start[q] : p.stop[q]] -= sign * p.m[p.m_at[q] + a]


def _fits(p: Kernel, room: Floats, v: int, a: int) -> bool:
    for q in range(p.claim_at[v], p.claim_at[v + 1]):
        amount = p.m[p.m_at[q] + a]
        if amount > 0 and room[p.start[q] : p.stop[q]].min() < amount:
            return False
    return True


def _cheapest(p: Kernel, room: Floats, v: int, score: Floats) -> int:
    """The cheapest strategy of v that fits, or -1. Spoils the score."""
    for _ in score:
        a = int(score.argmin())
        if score[a] == inf:
            return -1
        if _fits(p, room, v, a):
            return a
        score[a] = inf
    return -1
