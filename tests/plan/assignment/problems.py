"""Small problems, and the slow truth about them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from weft.plan.assignment import Problem, assemble


def brute_force(p: Problem) -> float:
    """The least cost of any choice within the limits; infinite if there is none."""
    choices = (np.array(x) for x in product(*(range(k) for k in p.k)))
    return min((p.cost(x) for x in choices if p.excess(x) == 0), default=np.inf)


def random_problem(seed: int, nodes: int = 7, forbidden: float = 0.15, limit: float = 30.0, whole: bool = True) -> Problem:
    """Costs, tables with forbidden entries, some of them permutations or sums, and claims over a dozen times."""
    rng = np.random.default_rng(seed)
    k = rng.integers(1, 5, nodes)
    costs = [_costs(rng, k[v], whole) for v in range(nodes)]
    edges = [(u, v, _table(rng, k[u], k[v], forbidden, whole)) for u in range(nodes) for v in range(u + 1, nodes) if rng.random() < 0.35]
    claims = []
    for v in range(nodes):
        start = int(rng.integers(0, 8))
        claims.append((v, start, start + int(rng.integers(1, 6)), rng.integers(0, 20, k[v])))
    return assemble(costs, edges, claims, limit, name=f"random {seed}")


def tight_problem(seed: int, nodes: int = 8, k: int = 3) -> Problem:
    """Dense, with every node wanting memory at one time, so that no step of `reduce` takes much away."""
    rng = np.random.default_rng(seed)
    costs = [np.sort(rng.integers(0, 60, k))[::-1].astype(float) for _ in range(nodes)]
    pairs = [(u, v) for u in range(nodes) for v in range(u + 1, nodes) if v == u + 1 or rng.random() < 0.4]
    claims = [(v, v % 3, 4 + v % 2, np.arange(k) * rng.integers(2, 6)) for v in range(nodes)]
    return assemble(costs, [(u, v, rng.integers(0, 30, (k, k))) for u, v in pairs], claims, 3.0 * nodes, name=f"tight {seed}")


def _costs(rng: np.random.Generator, k: int, whole: bool) -> Any:
    return rng.integers(0, 40, k).astype(float) if whole else rng.uniform(0, 4, k)


def _table(rng: np.random.Generator, rows: int, columns: int, forbidden: float, whole: bool) -> Any:
    kind = rng.integers(0, 5)
    w = np.stack([_costs(rng, columns, whole) for _ in range(rows)])
    if kind == 0:  # one follows the other
        w[np.arange(columns) != rng.integers(0, columns, rows)[:, None]] = np.inf
    elif kind == 1:  # a sum
        w = w[:, :1] + w[:1]
    else:
        w[rng.random(w.shape) < forbidden] = np.inf
    return w
