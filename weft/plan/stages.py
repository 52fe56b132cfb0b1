"""Layers by the time of stages, and the batch by the speed of unequal devices.

A copy of speed v takes v / sum(v) of the samples; they are split so that the slowest copy is soonest done.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.cluster.spec import Cluster, Nodes
from weft.core.errors import ClusterError
from weft.plan.plan import with_batch_shares
from weft.plan.search import Found, Search
from weft.plan.setting import Setting
from weft.plan.stage_partitioner import Measure


def uneven(search: Search, setting: Setting) -> Found | None:
    """A pipeline with its layers split by the time of each stage, all recomputing the same; None where nothing fits."""
    if setting.pp == 1 or setting.chunks > 1:
        return None
    return search.tailored(setting, Measure((setting.again or "none",), host=False))


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
