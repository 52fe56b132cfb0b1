"""Better solutions by moves on trees.

A move takes a random region of the graph, thins it to nodes F that close no cycle, and holds all others where they are.
On the forest F the best choice is exact, by dynamic programming from the leaves to the roots:

    s_v[a] = c_v[a] + sigma lambda(v, a) + sum_{u not in F} w_vu[a, x_u] + sum_{u below v} min_b (w_vu[a, b] + s_u[b])

with lambda(v, a) what the dual prices charge for the memory a uses, and sigma drawn between 0 and 5/4. From the roots
down each node then takes the cheapest strategy that still fits under the limits. The move stands if the cost rises by at
most -T ln U, U uniform: simulated annealing, T falling to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.plan.assignment.bound import Dual, Relaxation
from weft.plan.assignment.problem import Floats, Ints

SLICE = 2e7  # work between two looks at the clock


@dataclass(frozen=True, eq=False)
class Choice:
    """A choice within the limits, and its cost."""

    cost: float
    x: Ints


def better(a: Choice | None, b: Choice | None) -> Choice | None:
    """The cheaper of two; the first of equals. What takes a forbidden choice is none."""
    return b if b is not None and b.cost < (a.cost if a else np.inf) else a


def decode(r: Relaxation, dual: Dual, c: Floats) -> Choice | None:
    """The best choice within the limits read off the messages, up and down the nodes; it may be forbidden, and so cost infinity."""
    for dearer in (0.0, 1.0, 4.0, 16.0, 64.0):
        cost = c + r.charge(dual.prices * (1 + dearer) + dearer * r.going_rate)
        xs = [x for up in (True, False) if (x := r.kernel.decode(cost, dual.messages, up)) is not None]
        if xs:
            return min((Choice(r.p.cost(x), x) for x in xs), key=lambda found: found.cost)
    return None


def walk(r: Relaxation, charge: Floats, c: Floats, x: Ints, seed: Ints, heat: float, work: float) -> tuple[Choice, Ints]:
    """Walk from x; the best met and the last."""
    last = x.copy()
    _, best = r.kernel.walk(c, charge, last, seed, heat, int(work))
    return Choice(r.p.cost(best), best), last


def seeding(seed: int) -> Ints:
    """The state of a random generator, far from that of the next seed and never zero."""
    mixed = (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 63)
    return np.array([mixed | 1], np.int64)
