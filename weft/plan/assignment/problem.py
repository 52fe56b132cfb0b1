"""Choose one strategy per node at least cost, within a limit on what is live at any time.

    minimise   sum_v c_v[x_v] + sum_(u,v) w_uv[x_u, x_v]        x_v in {0 .. k_v - 1}
    subject to sum_{q live at t} m_q[x_owner(q)] <= M_t         for every time t

A *claim* q is what its owner uses over a half-open interval [start, stop). Forbidden choices cost infinity.
Ragged tables lie end to end in flat arrays, so that full problems are evaluated in a few array operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TOLERANCE = 1e-12  # relative, so that integers of bytes below a terabyte are exact


def summed(places: Ints, values: Floats, length: int) -> Floats:
    """The sum of the values that fall on each place."""
    return np.bincount(places, values, length).astype(np.float64, copy=False)  # of nothing, bincount makes integers


def offsets(lengths: Ints) -> Ints:
    """Where each of several runs laid end to end begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True, eq=False)
class Problem:
    """One assignment problem. Nodes, edges, claims and times are numbered from zero."""

    name: str
    k: Ints  # strategies of each node
    c: Floats  # node costs, end to end
    tail: Ints  # u of each edge
    head: Ints  # v of each edge
    w: Floats  # edge costs, row by row of u, end to end
    owner: Ints  # node of each claim
    start: Ints
    stop: Ints
    m: Floats  # usage of each claim by its owner's strategy, end to end
    limit: Floats  # M_t for every time t

    @cached_property
    def c_at(self) -> Ints:
        return offsets(self.k)

    @cached_property
    def w_at(self) -> Ints:
        return offsets(self.k[self.tail] * self.k[self.head])

    @cached_property
    def m_at(self) -> Ints:
        return offsets(self.k[self.owner])

    @property
    def nodes(self) -> int:
        return len(self.k)

    @property
    def edges(self) -> int:
        return len(self.tail)

    @property
    def times(self) -> int:
        return len(self.limit)

    def costs(self, v: int) -> Floats:
        return self.c[self.c_at[v] : self.c_at[v + 1]]

    def table(self, e: int) -> Floats:
        """w of edge e: a row for each strategy of its tail, a column for each of its head."""
        return self.w[self.w_at[e] : self.w_at[e + 1]].reshape(self.k[self.tail[e]], self.k[self.head[e]])

    def usage(self, q: int) -> Floats:
        return self.m[self.m_at[q] : self.m_at[q + 1]]

    def cost(self, x: ArrayLike) -> float:
        """The objective at x; infinite where a forbidden choice was taken."""
        x = np.asarray(x, np.int64)
        on_nodes = self.c[self.c_at[:-1] + x]
        on_edges = self.w[self.w_at[:-1] + x[self.tail] * self.k[self.head] + x[self.head]]
        return float(on_nodes.sum() + on_edges.sum())

    def profile(self, x: ArrayLike) -> Floats:
        """What is in use at every time."""
        x = np.asarray(x, np.int64)
        return self.spread(self.m[self.m_at[:-1] + x[self.owner]])

    def spread(self, amounts: Floats) -> Floats:
        """One amount per claim, summed over the times at which it is live."""
        change = summed(self.start, amounts, self.times + 1) - summed(self.stop, amounts, self.times + 1)
        return np.asarray(np.cumsum(change)[: self.times])

    def excess(self, x: ArrayLike) -> float:
        """How far the worst time is beyond its limit; zero when x fits."""
        if not self.times:
            return 0.0
        over = self.profile(x) - self.limit * (1 + TOLERANCE)
        return float(max(over.max(), 0.0))

    def feasible(self, x: ArrayLike) -> bool:
        return self.excess(x) == 0.0 and bool(np.isfinite(self.cost(x)))


def assemble(
    costs: Sequence[ArrayLike],
    edges: Iterable[tuple[int, int, ArrayLike]] = (),
    claims: Iterable[tuple[int, int, int, ArrayLike]] = (),
    limit: float | ArrayLike = np.inf,
    name: str = "",
) -> Problem:
    """A problem from its parts: node costs, (u, v, table) and (owner, start, stop, usage)."""
    edges, claims = list(edges), list(claims)
    horizon = max((stop for _, _, stop, _ in claims), default=0)
    ceiling = np.asarray(limit, float)
    return Problem(
        name,
        np.array([np.size(c) for c in costs], np.int64),
        _end_to_end(costs),
        _column(edges, 0),
        _column(edges, 1),
        _end_to_end([w for _, _, w in edges]),
        _column(claims, 0),
        _column(claims, 1),
        _column(claims, 2),
        _end_to_end([m for *_, m in claims]),
        ceiling if ceiling.ndim else np.full(horizon, float(ceiling)),
    )


def _column(rows: Sequence[tuple[object, ...]], at: int) -> Ints:
    return np.array([row[at] for row in rows], np.int64)


def _end_to_end(tables: Sequence[ArrayLike]) -> Floats:
    return np.concatenate([np.zeros(0), *(np.asarray(t, float).ravel() for t in tables)])
