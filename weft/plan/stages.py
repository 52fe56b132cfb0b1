"""Layers to stages, and batch to unequal devices.

Stages: let c_i(n) be the time of one micro-batch on stage i with n layers, c_i(n) = a_i + n * l_i, where a_i is the embedding on
the first and the head on the last stage and l_i a layer on the devices of stage i. The step of a pipeline follows its slowest
stage, so `partition` minimises that over what fits. First and last stage may hold no layer.

Copies: a copy of speed v takes v / sum(v) of the samples; they are split so that the slowest copy is soonest done.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.cluster.spec import Cluster, Nodes
from weft.core.errors import ClusterError
from weft.plan.memory import stage_memory
from weft.plan.partition import even, partition
from weft.plan.phase import LayerRun
from weft.plan.plan import with_batch_shares
from weft.plan.search import Found, Search
from weft.plan.setting import Setting
from weft.plan.stage_partitioner import LAYER, Piece, by_kind, named_blocks


def uneven(search: Search, setting: Setting) -> Found | None:
    """A pipeline with its layers split by the time of each stage; None where the even split is as good or nothing fits."""
    if setting.pp == 1 or setting.chunks > 1:
        return None
    stages, depth, last = _Stages(search, setting), search.problem.depth, setting.pp - 1
    found = partition(depth, setting.pp, stages.cost, lambda i, a: range(a + (0 < i < last), depth + 1), even)
    return None if found is None else search.price(setting.with_layers([b - a for a, b in itertools.pairwise((0, *found))]))


@dataclass
class _Stages:
    search: Search
    setting: Setting

    def __post_init__(self) -> None:
        s = self.setting
        self.work, self.devices = self.search.work(s), self.search.devices(s)
        self.orders = s.pipeline.orders(s.pp, min(s.micro_batches, 2 * s.pp))
        self._fits: dict[tuple[int, int, int], bool] = {}

    def pieces(self, i: int, a: int, b: int) -> list[Piece]:
        again = self.setting.again or "none"
        made = [(LAYER, again, b - a)] if b > a else []
        ends = [("first", again, 1)] * (i == 0), [("last", again, 1)] * (i == self.setting.pp - 1)
        return list(by_kind(self.work, [*ends[0], *made, *ends[1]], a))

    def cost(self, i: int, a: int, b: int) -> float | None:
        times = self.search.times(self.setting, self.devices[i])
        return sum(times.of(name, mode) * n for name, mode, n in self.pieces(i, a, b)) if self.fits(i, a, b) else None

    def fits(self, i: int, a: int, b: int) -> bool:
        key = (i, a if self.work.others else 0, b - a)
        if key not in self._fits:
            named = named_blocks(self.work)
            runs = [LayerRun(named[name], n) for name, _, n in self.pieces(i, a, b)]
            self._fits[key] = stage_memory(self.setting, [runs], self.orders[i]).total <= self.search.memory
        return self._fits[key]


# --- copies of unequal speed


def split_batch(total: int, counts: Sequence[int], seconds: Callable[[int, int], float]) -> tuple[int, ...] | None:
    """How many of `total` each copy of every kind takes, at least one; `seconds(kind, n)` is what n take on that kind.

    All copies of a kind take the same, so one more for a kind is one more for each of its copies.
    """
    taken = [1] * len(counts)
    left = total - sum(counts)
    queue = [(seconds(k, 2), k) for k in range(len(counts))]
    heapq.heapify(queue)
    while left > 0 and queue:
        _, k = heapq.heappop(queue)
        if counts[k] > left:
            continue
        taken[k] += 1
        left -= counts[k]
        heapq.heappush(queue, (seconds(k, taken[k] + 1), k))
    return tuple(taken) if left == 0 else None


def as_if(cluster: Cluster, group: Nodes) -> Cluster:
    """The entire cluster made of one kind of device, on the links it has."""
    profile = replace(group.profile, links=cluster.links)
    if cluster.devices % cluster.node_size:
        raise ClusterError("nodes of unequal size", needed=f"full nodes of {cluster.node_size}", found=str(cluster.devices))
    return Cluster(f"{cluster.text} as {profile.name}", (Nodes(cluster.devices // cluster.node_size, cluster.node_size, profile),))


def shared(search: Search, setting: Setting) -> Found | None:
    """The setting with shares of the batch: copies that lie on one kind of device each take samples by its speed. Each kind is simulated as though
    all copies were of it, with the share its copies take: a copy meets the others in collectives alone, and those wait for the slowest."""
    cluster, s = search.cluster, replace(setting, shares=(), shards=0)
    per = s.tp * s.cp
    if s.pp > 1 or s.replicas == 1 or any(g.devices % per for g in cluster.groups):
        return None
    counts = [g.devices // per for g in cluster.groups]
    views = search.views
    if not views:
        views += [search.of(replace(search.problem, cluster=as_if(cluster, g))) for g in cluster.groups]
    best: Found | None = None
    for by_size in (True, False):
        made = _dealt(views, s, counts, by_size)
        if made is not None and (best is None or made.seconds < best.seconds):
            best = made
    return best


def _dealt(views: Sequence[Search], s: Setting, counts: Sequence[int], by_size: bool) -> Found | None:
    """`by_size`: copies take as many micro-batches of unequal size, which every sharding allows; else more or fewer of one size."""
    if not by_size and s.zero >= 2 and not s.gather_once:
        return None  # each micro-batch has its collectives, so all copies must have as many
    rounds = s.micro_batches if by_size else s.micro_batch
    if s.global_batch % rounds:
        return None

    def at(n: int) -> Setting:
        return replace(s, global_batch=s.replicas * rounds * n) if by_size else s.in_micro_batches(n)

    def seconds(kind: int, n: int) -> float:
        found = views[kind].price(at(n))
        return found.seconds if found is not None and found.memory <= views[kind].memory else math.inf

    taken = split_batch(s.global_batch // rounds, counts, seconds)
    if taken is None:
        return None
    found = [view.price(at(n)) for view, n in zip(views, taken, strict=True)]
    if any(f is None or f.memory > v.memory for f, v in zip(found, views, strict=True)):
        return None
    shares = [
        (v.cluster.device.name, copies, n if by_size else s.micro_batch, s.micro_batches if by_size else n)
        for v, copies, n in zip(views, counts, taken, strict=True)
    ]
    return Found(with_batch_shares(s, shares), max(f.seconds for f in found if f), max(f.memory for f in found if f))
