"""An assignment problem under reduction, node by node: prune, absorb, follow, eliminate, and the way back.

Strategies keep the numbers they had in the full problem, in `kept`. A node that is taken out leaves a table: its own choice
for each choice of the nodes that decide it. Read in reverse, the tables complete any solution of what remains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from weft.plan.assignment.problem import Floats, Ints, Problem

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Facts:
    """What there is to know about an edge's table, w[a, b] with a row for each strategy of u."""

    rows: Mask | None  # those with a finite entry, if not all
    columns: Mask | None
    parts: tuple[Floats, Floats] | None  # f and g with w[a, b] = f[a] + g[b]
    by_row: bool  # one finite entry in every row: u's choice decides v's
    by_column: bool


class Graph:
    """A problem that is being reduced. `reason` says why there is no solution."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cost = [problem.costs(v).copy() for v in range(problem.nodes)]
        self.kept = [np.arange(k) for k in problem.k]
        self.near: list[dict[int, Floats]] = [{} for _ in range(problem.nodes)]
        self.decided: dict[int, tuple[tuple[int, ...], Ints]] = {}
        self.follows: list[int] = []  # the decided that carry their claims to their decider
        self.paid = 0.0
        self.reason: str | None = None
        self.todo: deque[int] = deque()
        self.waiting: set[int] = set()
        self._facts = lru_cache(maxsize=1 << 14)(_facts)
        for e in range(problem.edges):
            self.link(int(problem.tail[e]), int(problem.head[e]), problem.table(e))

    @property
    def live(self) -> list[int]:
        return [v for v in range(self.problem.nodes) if v not in self.decided]

    def facts(self, w: Floats) -> Facts:
        """Layers repeat, and so do tables: most are known already."""
        return self._facts(w.shape, w.tobytes())

    def link(self, u: int, v: int, w: Floats) -> None:
        w = self.near[u][v] + w if v in self.near[u] else w
        self.near[u][v], self.near[v][u] = w, w.T

    def unlink(self, u: int, v: int) -> None:
        del self.near[u][v], self.near[v][u]

    def revisit(self, *nodes: int) -> None:
        for v in nodes:
            if v not in self.waiting:
                self.waiting.add(v)
                self.todo.append(v)

    def propagate(self, nodes: Iterable[int] = ()) -> None:
        """Prune, absorb and follow, from these nodes and those waiting, until nothing changes."""
        self.revisit(*nodes)
        while self.todo and self.reason is None:
            v = self.todo.popleft()
            self.waiting.discard(v)
            if v not in self.decided:
                self._prune(v)
                self._simplify(v)

    def keep(self, v: int, mask: Mask) -> None:
        """Drop the strategies of v that are not in the mask."""
        self.cost[v], self.kept[v] = self.cost[v][mask], self.kept[v][mask]
        for u, w in self.near[v].items():
            self.near[v][u] = w[mask]
            self.near[u][v] = self.near[v][u].T
        self.revisit(v, *self.near[v])

    def _prune(self, v: int) -> None:
        mask = np.isfinite(self.cost[v])
        for w in self.near[v].values():
            rows = self.facts(w).rows
            mask = mask if rows is None else mask & rows
        if not mask.any():
            self.reason = f"node {v} has no strategy of finite cost"
        elif not mask.all():
            self.keep(v, mask)

    def _simplify(self, v: int) -> None:
        for u in list(self.near[v]):
            facts = self.facts(self.near[v][u])
            if facts.rows is not None or facts.columns is not None:
                continue  # a prune is on its way
            if facts.parts is not None:
                self.unlink(v, u)
                self.cost[v], self.cost[u] = self.cost[v] + facts.parts[0], self.cost[u] + facts.parts[1]
                self.revisit(u)
            elif facts.by_row or facts.by_column:
                leader = self._leader(v, u, facts)
                self._follow(leader, v + u - leader)
                if leader == u:
                    return

    def _leader(self, u: int, v: int, facts: Facts) -> int:
        """Whom the other follows; if either may lead, the one with more edges, which then need not move."""
        if facts.by_row and facts.by_column:
            return u if len(self.near[u]) >= len(self.near[v]) else v
        return u if facts.by_row else v

    def _follow(self, u: int, v: int) -> None:
        """Merge v, which u's choice decides, into u."""
        w = self.near[u][v]
        f = np.isfinite(w).argmax(1)
        self.unlink(u, v)
        self.cost[u] = self.cost[u] + self.cost[v][f] + w[np.arange(len(f)), f]
        self._decide(v, (u,), f)
        self.follows.append(v)
        for y, table in list(self.near[v].items()):
            self.unlink(v, y)
            self.link(u, y, table[f])
            self.revisit(y)

    def eliminate(self, v: int) -> None:
        """Take out v, whose best choice is known for each choice of its neighbours, at most two."""
        by = tuple(self.near[v])
        total = self.cost[v].reshape(-1, *(1 for _ in by))
        for axis, u in enumerate(by):
            total = total + self.near[v][u].reshape(len(total), *(-1 if i == axis else 1 for i in range(len(by))))
            self.unlink(v, u)
        best = total.min(0)
        if len(by) == 2:
            self.link(*by, best)
        elif by:
            self.cost[by[0]] = self.cost[by[0]] + best
        else:
            self.paid += float(best)
        self._decide(v, by, total.argmin(0))

    def _decide(self, v: int, by: tuple[int, ...], choice: Ints) -> None:
        """Note that v takes its strategy choice[a, ..] when its deciders take theirs numbered a, .."""
        table = np.zeros(self.problem.k[list(by)], np.int64)
        table[np.ix_(*(self.kept[u] for u in by))] = self.kept[v][choice]
        self.decided[v] = by, table
        self.revisit(*by)

    def complete(self, x: Ints) -> Ints:
        """Choices for the full problem from those of the nodes that are not decided by others."""
        for v, (by, table) in reversed(self.decided.items()):
            x[v] = table[tuple(x[u] for u in by)]
        return x

    def origins(self) -> tuple[Ints, list[Ints]]:
        """For each node of the full problem: whom it follows in the end, and its strategy for each of that one's."""
        root, strategy = np.arange(self.problem.nodes), list(self.kept)
        for v in reversed(self.follows):
            (u,), table = self.decided[v]
            root[v], strategy[v] = root[u], table[strategy[u]]
        return root, strategy


def _facts(shape: tuple[int, int], data: bytes) -> Facts:
    w = np.frombuffer(data).reshape(shape)
    finite = np.isfinite(w)
    rows, columns = np.asarray(finite.any(1)), np.asarray(finite.any(0))
    return Facts(
        None if rows.all() else rows,
        None if columns.all() else columns,
        _separate(w) if finite.all() or 1 in shape else None,
        bool((finite.sum(1) == 1).all()),
        bool((finite.sum(0) == 1).all()),
    )


def _separate(w: Floats) -> tuple[Floats, Floats] | None:
    if w.shape[0] == 1:
        return np.zeros(1), w[0]
    f, g = w[:, 0], w[0] - w[0, 0] if w.shape[1] > 1 else np.zeros(1)
    return (f, g) if (w == f[:, None] + g).all() else None
