"""Which vertices run together. A policy numbers the batches; a batch holds vertices of one class that do not wait
for each other.

The fewest batches possible: along any path each vertex needs its own batch, so class k needs at least
    d_k = max over paths of the number of class-k vertices on the path,      and all together at least  sum_k d_k.

depth      everything at the same longest path below it, class by class: one pass, optimal with a single class.
agenda     the ready class whose waiting vertices are shallowest on average (as DyNet does).
lookahead  the ready class of which the largest share of the next rank is ready. rank_k(v) counts class-k vertices on the
           longest path up to v; when all of the lowest rank left is ready, running it never costs an extra batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from weft.core.errors import UnknownName
from weft.dynamic import native
from weft.dynamic.native import Ints
from weft.dynamic.structure import Structure

Policy = Callable[[Structure, Ints], Ints]


def by_depth(s: Structure, klass: Ints) -> Ints:
    """Batch number of each vertex: classes of one depth after each other."""
    classes = int(klass.max(initial=0)) + 1
    return _compact(s.depth * classes + klass)


def by_agenda(s: Structure, klass: Ints) -> Ints:
    """Shallowest class first."""
    depth = s.depth
    return _simulate(s, klass, lambda ready: min(ready, key=lambda k: (depth[ready[k]].mean(), k)))


def by_lookahead(s: Structure, klass: Ints) -> Ints:
    """The class that is readiest for its next rank first; on a tie the one with more vertices."""
    rank = ranks(s, klass)[np.arange(s.vertices), klass]
    left: dict[int, Ints] = {int(k): np.bincount(rank[klass == k]) for k in np.unique(klass)}

    def share(k: int, vertices: Ints) -> tuple[float, int]:
        lowest = int(np.flatnonzero(left[k])[0])
        return float((rank[vertices] == lowest).sum() / left[k][lowest]), len(vertices)

    def choose(ready: dict[int, Ints]) -> int:
        k = max(ready, key=lambda k: (*share(k, ready[k]), -k))
        left[k] -= np.bincount(rank[ready[k]], minlength=len(left[k]))
        return k

    return _simulate(s, klass, choose)


def automatic(s: Structure, klass: Ints) -> Ints:
    """Depth where it needs one batch per level, which nothing can beat; else the best of the three."""
    shallow = by_depth(s, klass)
    levels = int(s.depth.max(initial=-1)) + 1
    if batches(shallow) == levels:
        return shallow
    return min((by_lookahead(s, klass), by_agenda(s, klass), shallow), key=batches)


POLICIES: dict[str, Policy] = {
    "auto": automatic,
    "depth": by_depth,
    "agenda": by_agenda,
    "lookahead": by_lookahead,
}


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise UnknownName(f"no batching policy is called {name!r}", needed=", ".join(POLICIES), found=name)
    return POLICIES[name]


def batches(batch: Ints) -> int:
    return int(batch.max(initial=-1)) + 1


def lower_bound(s: Structure, klass: Ints) -> int:
    """No policy can need fewer batches than this."""
    return int(ranks(s, klass).max(axis=0, initial=0).sum())


def ranks(s: Structure, klass: Ints) -> Ints:
    """rank[v, k]: the most class-k vertices on a path that ends in v."""
    depth = s.depth
    out = np.zeros((s.vertices + 1, int(klass.max(initial=0)) + 1), np.int64)  # the last row stands for absent children
    order = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[order], np.arange(int(depth.max(initial=-1)) + 2))
    for low, high in pairwise(bounds):
        here = order[low:high]
        arity = s.arity[here]
        some = here[arity > 0]
        if len(some):
            below = out[s.child[native.spans(s.first[some], s.arity[some])]]
            out[some] = np.maximum.reduceat(below, np.cumsum(s.arity[some]) - s.arity[some])
        out[here, klass[here]] += 1
    return out[:-1]


def _simulate(s: Structure, klass: Ints, choose: Callable[[dict[int, Ints]], int]) -> Ints:
    """Run batches of the chosen class until none is left; a step costs a few array operations, whatever its size."""
    above_first, above = native.parents(s.first, s.child)
    waiting = np.bincount(above, minlength=s.vertices)
    batch, done = np.full(s.vertices, -1, np.int64), 0
    ready = _split(np.flatnonzero(waiting == 0), klass)
    while ready:
        k = choose(ready)
        here = ready.pop(k)
        batch[here], done = done, done + 1
        parents = above[native.spans(above_first[here], above_first[here + 1] - above_first[here])]
        unique, counts = np.unique(parents, return_counts=True)
        waiting[unique] -= counts
        for other, vertices in _split(unique[waiting[unique] == 0], klass).items():
            ready[other] = np.concatenate((ready[other], vertices)) if other in ready else vertices
    return batch


def _split(vertices: Ints, klass: Ints) -> dict[int, Ints]:
    return {int(k): vertices[klass[vertices] == k] for k in np.unique(klass[vertices])}


def _compact(key: Ints) -> Ints:
    """The same order in the numbers 0, 1, 2, ... without gaps."""
    used = np.bincount(key) > 0 if len(key) else np.empty(0, bool)
    return (np.cumsum(used) - 1)[key] if len(key) else key
