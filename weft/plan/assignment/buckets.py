"""Lower bounds that see cycles, by mini-buckets; and a choice read off them.

Messages bound every edge on its own, so around a cycle the edges may count on different strategies of one node. Here nodes are taken
out one after another instead, each time the one whose neighbourhood has the smallest table. With the messages moved into the costs,

    theta_v[a] = c_v[a] + sum_{e at v} mu_ev[a],     w_e[a, b] - mu_eu[a] - mu_ev[b],

the tables at v are added up in buckets of at most `entries`, as few as can be, theta_v is shared among these so that all agree
on the least cost of every strategy of v, and v is minimised out of each. One bucket is exact. Several may each take another strategy
of v, which only lowers the sum of their minima.
"""

from __future__ import annotations

import heapq
from itertools import count
from math import prod

import numpy as np

from weft.plan.assignment.bound import Dual, Relaxation
from weft.plan.assignment.problem import Floats, Ints

ENTRIES = 4e7  # of all buckets together, were every one as large as it may be
MOST = 1 << 18  # of one
WORK_PER_ENTRY = 3  # reads and writes for each entry of a bucket, about
WORK_PER_NODE = 5e4  # to find its buckets

Nodes = tuple[int, ...]
Table = tuple[Nodes, Floats]  # with an axis for each of the nodes


class Elimination:
    """What is left of a problem while its nodes are taken out. `bound` holds when all are."""

    def __init__(self, r: Relaxation, c: Floats, dual: Dual, entries: float = 0) -> None:
        """Of node costs c, under the prices and messages of a dual."""
        self.k: list[int] = r.p.k.tolist()
        self.entries = entries or min(ENTRIES / max(len(self.k), 1), MOST)
        self.work = WORK_PER_NODE * len(self.k)
        self.tables: dict[int, Table] = {}
        self.near: list[set[int]] = [set() for _ in self.k]  # tables at each node
        self.number = count()
        self.theta = self._move(r, c + r.charge(dual.prices), dual.messages)
        self.bound = -r.rent(dual.prices)
        self.order: list[tuple[int, list[Table]]] = []  # nodes taken out, and their buckets just before
        self._run()

    def decode(self) -> Ints:
        """The best choice that the buckets know of, node after node, the last taken out first. Limits count by their prices alone."""
        x = np.zeros(len(self.k), np.int64)
        for v, buckets in reversed(self.order):
            x[v] = np.sum([w[tuple(slice(None) if u == v else x[u] for u in scope)] for scope, w in buckets], 0).argmin()
        return x

    def _move(self, r: Relaxation, theta: Floats, messages: Floats) -> list[Floats]:
        """Move the messages into the tables and the node costs."""
        p = r.p
        for e, (u, v) in enumerate(zip(p.tail.tolist(), p.head.tolist(), strict=True)):
            to_u = messages[r.kernel.tail_at[e] : r.kernel.tail_at[e + 1]]
            to_v = messages[r.kernel.head_at[e] : r.kernel.head_at[e + 1]]
            theta[p.c_at[u] : p.c_at[u + 1]] += to_u
            theta[p.c_at[v] : p.c_at[v + 1]] += to_v
            self._put((u, v), r.w[p.w_at[e] : p.w_at[e + 1]].reshape(len(to_u), -1) - to_u[:, None] - to_v)
        return np.split(theta, p.c_at[1:-1])

    def _run(self) -> None:
        sizes = [self._size(v) for v in range(len(self.k))]
        queue = [(size, v) for v, size in enumerate(sizes)]
        heapq.heapify(queue)
        while queue:
            size, v = heapq.heappop(queue)
            if size == sizes[v]:
                sizes[v] = -1.0
                for u in self._take_out(v):
                    sizes[u] = self._size(u)
                    heapq.heappush(queue, (sizes[u], u))

    def _size(self, v: int) -> float:
        """Entries of one table over v and all its neighbours."""
        return prod(float(self.k[u]) for u in {u for i in self.near[v] for u in self.tables[i][0]})

    def _take_out(self, v: int) -> Nodes:
        """Minimise v out; its neighbours."""
        buckets = self._buckets(v)
        own = [_least(bucket, v) for bucket in buckets]
        share = (self.theta[v] + sum(own)) / len(own)
        buckets = [(scope, w + _along(share - least, scope.index(v), len(scope))) for (scope, w), least in zip(buckets, own, strict=True)]
        self.order.append((v, buckets))
        for scope, w in buckets:
            self.work += WORK_PER_ENTRY * w.size
            rest = w.min(scope.index(v))
            self.bound += float(rest.min())
            self._put(tuple(u for u in scope if u != v), rest - rest.min())
        return tuple({u: None for scope, _ in buckets for u in scope if u != v})

    def _buckets(self, v: int) -> list[Table]:
        """The tables at v, taken away and added up in as few as they fit."""
        taken = sorted((self._take(i) for i in sorted(self.near[v])), key=lambda table: (-len(table[0]), -table[1].size))
        groups: list[tuple[set[int], list[Table]]] = []
        for scope, w in taken:
            for around, group in groups:
                if prod(self.k[u] for u in around.union(scope)) <= self.entries:
                    around.update(scope)
                    group.append((scope, w))
                    break
            else:
                groups.append((set(scope), [(scope, w)]))
        return [_sum(tuple(sorted(around)), group) for around, group in groups] or [((v,), np.zeros(self.k[v]))]

    def _take(self, i: int) -> Table:
        for u in self.tables[i][0]:
            self.near[u].discard(i)
        return self.tables.pop(i)

    def _put(self, scope: Nodes, w: Floats) -> None:
        """Add a table, to one that covers it if there is one."""
        if len(scope) < 2:
            for u in scope:
                self.theta[u] = self.theta[u] + w
            return
        covering = next((i for i in sorted(self.near[scope[0]]) if set(scope) <= set(self.tables[i][0])), None)
        if covering is not None:
            around = self.tables[covering][0]
            self.tables[covering] = _sum(around, [self.tables[covering], (scope, w)])
            return
        i = next(self.number)
        self.tables[i] = scope, w
        for u in scope:
            self.near[u].add(i)


def _sum(scope: Nodes, tables: list[Table]) -> Table:
    """Tables added up over all their nodes."""
    total = np.zeros(())
    for own, w in tables:
        order = sorted(range(len(own)), key=lambda i: scope.index(own[i]))
        places = {own[i]: w.shape[i] for i in order}
        total = total + w.transpose(order).reshape([places.get(u, 1) for u in scope])
    return scope, total


def _least(table: Table, v: int) -> Floats:
    """The least entry for each strategy of v."""
    scope, w = table
    return np.asarray(w.min(tuple(i for i, u in enumerate(scope) if u != v)))


def _along(values: Floats, axis: int, axes: int) -> Floats:
    return values.reshape([-1 if i == axis else 1 for i in range(axes)])
