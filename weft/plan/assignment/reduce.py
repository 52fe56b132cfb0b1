"""Shrink an assignment problem without losing an optimum. Six steps, in passes until one brings little:

    prune     drop a when c_v[a], or w_uv[a, b] for every b of some neighbour, is infinite
    absorb    w_uv[a, b] = f[a] + g[b]:  add f to c_u and g to c_v, drop the edge
    follow    w_uv[a, b] finite for b = f(a) alone:  v follows u; merge it, its claims and its edges into u
    starve    drop a when its claims overrun M_t even next to the least usage of every other node
    dominate  drop a when some b uses no more at any time and
              c_v[b] - c_v[a] + sum_u max_y (w_vu[b, y] - w_vu[a, y]) <= 0
    eliminate v of one or two neighbours whose usage does not depend on its choice:
              w_yz[a, b] += min_x (c_v[x] + w_vy[x, a] + w_vz[x, b]), where that table is the smaller one

Claims then hold only what a strategy uses beyond the least of its node, the rest is taken off the limit,
and of all times those that can overrun and are not implied by a neighbour remain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.plan.assignment.graph import Graph, Mask
from weft.plan.assignment.problem import TOLERANCE, Floats, Ints, Problem, assemble

Span = tuple[Ints, Floats]  # times at which a node's usage changes; its usage from there on, by strategy

WORTHWHILE = 0.99  # a pass that leaves more than this part of the tables is the last


@dataclass(frozen=True, eq=False)
class Reduced:
    """A core problem, the cost already paid, and the way back. `reason` says why there is no solution."""

    core: Problem
    paid: float
    lift: Callable[[Ints], Ints]  # a choice for the core to a choice for the full problem
    reason: str | None = None


def reduce(problem: Problem) -> Reduced:
    """The smallest problem the six steps lead to."""
    done = _pass(problem)
    while done.reason is None and done.core.nodes:
        more = _pass(done.core)
        size = _size(done.core)
        done = Reduced(more.core, done.paid + more.paid, _after(done.lift, more.lift), more.reason)
        if _size(more.core) > WORTHWHILE * size:
            break
    return done


def _size(p: Problem) -> int:
    return len(p.w) + len(p.c) + len(p.m)


def _after(outer: Callable[[Ints], Ints], inner: Callable[[Ints], Ints]) -> Callable[[Ints], Ints]:
    return lambda x: outer(inner(x))


def _pass(problem: Problem) -> Reduced:
    """Each step once, where it applies."""
    g = Graph(problem)
    g.propagate(range(problem.nodes))
    if g.reason is None:
        usage = _Usage(g)
        if usage.reason is None:
            for step in (usage.starve, usage.dominate, usage.eliminate):
                step()
            g.propagate()
        g.reason = g.reason or usage.reason
    if g.reason is not None:
        return Reduced(assemble([]), 0.0, lambda x: x, g.reason)
    return _core(g)


class _Usage:
    """What the nodes of a propagated graph use beyond the least they can, at times that could overrun; and the steps it allows."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self.reason: str | None = None
        self.free = [v for v in g.live if len(g.cost[v]) > 1]
        spans, fixed = _spans(g)
        self.room = self._room(spans, fixed)
        self.spans = self._tight(spans)

    def _room(self, spans: dict[int, Span], fixed: Floats) -> Floats:
        """Limit less the least usage of every node, at every time."""
        limit = self.g.problem.limit
        room = limit - fixed - _total(spans, np.min, len(limit))
        if (room < -TOLERANCE * limit).any():
            t = int(room.argmin())
            self.reason = f"at time {t} the least that can be in use is {limit[t] - room[t]:.0f}, beyond the limit {limit[t]:.0f}"
        return np.maximum(room, 0.0)

    def _tight(self, spans: dict[int, Span]) -> dict[int, Span]:
        """Usage beyond the least of each node; zero where even the most of all nodes fits."""
        extra = {v: (times, usage - usage.min(1, keepdims=True)) for v, (times, usage) in spans.items()}
        tight = np.append(0, np.cumsum(_total(extra, np.max, len(self.room)) > self.room))
        for times, usage in extra.values():
            usage[:-1][tight[times[1:]] == tight[times[:-1]]] = 0.0
        return {v: span for v, span in extra.items() if span[1].any()}

    def starve(self) -> None:
        """Drop strategies that cannot fit."""
        padded = np.append(self.room * (1 + TOLERANCE), np.inf)
        for v, (times, usage) in self.spans.items():
            least = np.minimum.reduceat(padded, times)[:-1]
            self._keep(v, np.asarray((usage[:-1] <= least[:, None]).all(0)))

    def dominate(self) -> None:
        """Drop strategies that another does as well as in every company. Layers repeat, and so do nodes with all around them."""
        known: dict[object, Mask] = {}
        for v in self.free:
            neighbours = tuple((w.shape, w.tobytes()) for w in self.g.near[v].values())
            key = self.g.cost[v].tobytes(), neighbours, self.spans[v][1].tobytes() if v in self.spans else b""
            if key not in known:
                known[key] = self._undominated(v)
            self._keep(v, known[key])

    def eliminate(self) -> None:
        """Take out nodes that use the same whatever they choose, where the tables do not grow."""
        g = self.g
        for v in self.free:
            sizes = [len(g.cost[u]) for u in g.near[v]]
            pays = len(sizes) < 2 or (len(sizes) == 2 and sizes[0] * sizes[1] <= len(g.cost[v]) * sum(sizes))
            if pays and v not in self.spans:
                g.eliminate(v)

    def _keep(self, v: int, mask: Mask) -> None:
        if not mask.any():
            self.reason = f"no strategy of node {v} fits next to the least usage of the others"
        elif not mask.all():
            self.g.keep(v, mask)
            if v in self.spans:
                self.spans[v] = self.spans[v][0], self.spans[v][1][:, mask]

    def _undominated(self, v: int) -> Mask:
        worse = self.g.cost[v][:, None] - self.g.cost[v]  # worse[b, a]: what b costs beyond a, at most
        k = len(worse)
        if v in self.spans:
            usage = self.spans[v][1]
            worse = np.where((usage[:, :, None] <= usage[:, None, :]).all(0), worse, np.inf)
        np.fill_diagonal(worse, np.inf)
        for w in self.g.near[v].values():
            b, a = np.nonzero(np.isfinite(worse))
            if not len(b):
                return np.ones(k, bool)
            worse[b, a] += (w[b] - w[a]).max(1) if np.isfinite(w).all() else _most(w[b], w[a])
        beaten = worse <= 0
        beaten &= ~beaten.T | np.tri(k, k, -1, dtype=bool).T  # of equals the first stays
        return np.asarray(~beaten.any(0))


def _most(w_b: Floats, w_a: Floats) -> Floats:
    """max_y (w_b[y] - w_a[y]), where what a may not take either does not count against b."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.fmax.reduce(w_b - w_a, axis=1, initial=-np.inf))  # where both are infinite the difference is none


def _spans(g: Graph) -> tuple[dict[int, Span], Floats]:
    """Usage over time of each node with a choice, followers included, and that of all nodes without."""
    p = g.problem
    root, strategy = g.origins()
    width = np.array([len(s) for s in strategy], np.int64)[p.owner]
    amounts = np.concatenate([np.zeros(0), *(p.usage(q)[strategy[v]] for q, v in enumerate(p.owner.tolist()))])
    at = np.cumsum(width) - width
    single = width == 1
    fixed = p.spread(np.where(single, amounts[at], 0.0)) if len(at) else np.zeros(p.times)
    order = np.flatnonzero(~single)[np.argsort(root[p.owner[~single]], kind="stable")]
    bounds = np.flatnonzero(np.diff(root[p.owner[order]], prepend=-1))
    spans = {}
    for claims in np.split(order, bounds[1:]) if len(order) else []:
        usage = amounts[at[claims][:, None] + np.arange(width[claims[0]])]
        spans[int(root[p.owner[claims[0]]])] = _over_time(p.start[claims], p.stop[claims], usage)
    return spans, fixed


def _over_time(start: Ints, stop: Ints, usage: Floats) -> Span:
    times, place = np.unique(np.concatenate([start, stop]), return_inverse=True)
    change = np.zeros((len(times), usage.shape[1]))
    np.add.at(change, place, np.concatenate([usage, -usage]))
    return times, np.cumsum(change, 0)


def _total(spans: dict[int, Span], of: Callable[..., Floats], length: int) -> Floats:
    """The sum over nodes of the least, or the most, that each can use, at every time."""
    change = np.zeros(length + 1)
    for times, usage in spans.values():
        level = of(usage, axis=1)
        change[times] += np.concatenate([level[:1], level[1:] - level[:-1]])
    return np.asarray(np.cumsum(change)[:length])


def _core(g: Graph) -> Reduced:
    """What is left as a problem of its own: nodes with a choice, excess usage, binding times."""
    usage = _Usage(g)
    if usage.reason is not None:
        return Reduced(assemble([]), 0.0, lambda x: x, usage.reason)
    live, number = g.live, {v: i for i, v in enumerate(usage.free)}
    edges = [(number[u], number[v], w) for u in usage.free for v, w in g.near[u].items() if u < v]
    claims = [(number[v], *claim) for v, span in usage.spans.items() if v in number for claim in _claims(*span)]
    core = assemble([g.cost[v] for v in usage.free], edges, claims, usage.room, g.problem.name)

    def lift(x: Ints) -> Ints:
        full = np.zeros(g.problem.nodes, np.int64)
        for v in live:
            full[v] = g.kept[v][x[number[v]] if v in number else 0]
        return g.complete(full)

    paid = g.paid + float(sum(g.cost[v][0] for v in live if v not in number))
    return Reduced(binding(core), paid, lift)


def _claims(times: Ints, usage: Floats) -> list[tuple[int, int, Floats]]:
    """A claim for every run of times at which usage is not zero and does not change."""
    new = np.flatnonzero(np.append(True, (usage[1:-1] != usage[:-2]).any(1)))
    ends = np.append(new[1:], len(times) - 1)
    return [(int(times[i]), int(times[j]), usage[i]) for i, j in zip(new, ends, strict=True) if usage[i].any()]


def binding(p: Problem) -> Problem:
    """The same problem over the times that can overrun and that no other time implies."""
    most = np.maximum.reduceat(p.m, p.m_at[:-1]) if len(p.m) else np.zeros(0)
    times = np.flatnonzero(p.spread(most) > p.limit)
    times = times[_distinct(_signatures(p)[times], p.limit[times])]
    while len(times) and not (kept := _unimplied(p, times)).all():
        times = times[kept]
    return _merged(_at_times(p, times))


def _signatures(p: Problem) -> NDArray[np.uint64]:
    """A number for each time, the same where every node uses the same: random ones summed over what is live."""
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(o.tobytes() + p.usage(q).tobytes(), len(numbers)) for q, o in enumerate(p.owner)]
    drawn = np.random.default_rng(0).integers(1, 1 << 63, len(numbers), np.uint64)[np.array(of, np.int64)]
    change = np.zeros(p.times + 1, np.uint64)
    np.add.at(change, p.start, drawn)
    np.subtract.at(change, p.stop, drawn)
    return np.cumsum(change)[: p.times]


def _distinct(signatures: NDArray[np.uint64], limit: Floats) -> Ints:
    """Of the times with one signature, the first of those with the least limit."""
    order = np.lexsort((limit, signatures))
    first = np.append(True, signatures[order][1:] != signatures[order][:-1])[: len(order)]
    return np.sort(order[first])


def _at_times(p: Problem, times: Ints) -> Problem:
    """The same problem, seen at some times only."""
    start, stop = np.searchsorted(times, p.start), np.searchsorted(times, p.stop)
    live = start < stop
    m = p.m[np.repeat(live, p.k[p.owner])]
    return replace(p, owner=p.owner[live], start=start[live], stop=stop[live], m=m, limit=p.limit[times])


def _merged(p: Problem) -> Problem:
    """Claims of one owner and one usage that have come to touch, made one. Claims of an owner lie in order of time."""
    touches = np.zeros(len(p.owner), bool)
    beside = (p.owner[1:] == p.owner[:-1]) & (p.start[1:] == p.stop[:-1])
    for q in (np.flatnonzero(beside) + 1).tolist():
        touches[q] = (p.usage(q) == p.usage(q - 1)).all()
    first = np.flatnonzero(~touches)
    m = p.m[np.repeat(~touches, p.k[p.owner])]
    stop = p.stop[np.append(first[1:], len(p.owner)) - 1] if len(first) else p.stop
    return replace(p, owner=p.owner[first], start=p.start[first], stop=stop, m=m)


def _unimplied(p: Problem, times: Ints) -> Mask:
    """Times not implied by the one before (only stops in between, no more room) or the one after."""
    start, stop = np.searchsorted(times, p.start), np.searchsorted(times, p.stop)
    live = start < stop
    begins = np.bincount(start[live], minlength=len(times) + 1)[: len(times)] > 0
    ends = np.bincount(stop[live], minlength=len(times) + 1)[: len(times)] > 0
    limit = p.limit[times]
    by_last = np.append(False, ~begins[1:] & (limit[1:] >= limit[:-1]))
    by_next = np.append(~ends[1:] & (limit[:-1] >= limit[1:]), False)
    by_next &= ~np.append(by_last[1:], False)  # two times that imply each other do not both go
    return np.asarray(~(by_last | by_next))
