"""Which vertices run together. A policy numbers the batches; a batch holds vertices of one class that do not wait
for each other.

The fewest batches possible: along any path each vertex needs its own batch, so class k needs at least
    d_k = max over paths of the number of class-k vertices on the path,      and all together at least  sum_k d_k.

depth      everything at the same longest path below it, class by class: one pass, optimal with a single class.
agenda     the ready class whose waiting vertices are shallowest on average (as DyNet does).
lookahead  rank_k(v) counts class-k vertices on the longest path up to v. A class of which all of the lowest rank left is ready
           runs: that never costs an extra batch. If there is none, the class runs that is nearest to it, or brings another near.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from weft.core.errors import UnknownName
from weft.dynamic import native
from weft.dynamic.native import Frontier, Ints, split
from weft.dynamic.structure import Structure

Policy = Callable[[Structure, Ints], Ints]


def by_depth(s: Structure, klass: Ints) -> Ints:
    """Batch number of each vertex: classes of one depth after each other."""
    classes = int(klass.max(initial=0)) + 1
    return _compact(s.depth * classes + klass)


def by_agenda(s: Structure, klass: Ints) -> Ints:
    """Shallowest class first."""
    depth = s.depth
    return Frontier(s.first, s.child, klass).run(lambda f: min(f.ready, key=lambda k: (depth[f.ready[k]].mean(), k)))


def by_lookahead(s: Structure, klass: Ints) -> Ints:
    """The class that is readiest for its next rank first, counting how ready it makes another."""
    rank = ranks(s, klass)[np.arange(s.vertices), klass]
    left: dict[int, Ints] = {int(k): np.bincount(rank[klass == k]) for k in np.unique(klass)}

    def share(k: int, vertices: Ints, done: int = -1, gone: Ints | None = None) -> float:
        """Of the lowest rank of class k that is left (after `gone` of class `done`), the part that is ready."""
        rest = left[k] - np.bincount(rank[gone], minlength=len(left[k])) if k == done and gone is not None else left[k]
        some = np.flatnonzero(rest)
        return float((rank[vertices] == some[0]).sum() / rest[some[0]]) if len(some) else 0.0

    def after(f: Frontier, k: int) -> float:
        """The largest share any class would have once class k has run."""
        new = f.woken_by(f.ready[k])
        then = {c: v for c, v in f.ready.items() if c != k}
        for c, v in split(new, klass).items():
            then[c] = np.concatenate((then[c], v)) if c in then else v
        return max((share(c, v, k, f.ready[k]) for c, v in then.items()), default=1.0)

    def choose(f: Frontier) -> int:
        now = {k: share(k, v) for k, v in f.ready.items()}
        full = [k for k, part in now.items() if part == 1.0]
        k = full[0] if full else max(now, key=lambda k: (now[k] + after(f, k), len(f.ready[k]), -k))
        left[k] = left[k] - np.bincount(rank[f.ready[k]], minlength=len(left[k]))
        return k

    return Frontier(s.first, s.child, klass).run(choose)


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


def _compact(key: Ints) -> Ints:
    """The same order in the numbers 0, 1, 2, ... without gaps."""
    used = np.bincount(key) > 0 if len(key) else np.empty(0, bool)
    return (np.cumsum(used) - 1)[key] if len(key) else key
