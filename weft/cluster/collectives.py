"""Time of a collective over ranks that lie in nodes.

Each level l of links moves the wire bytes W of the collective out of every block of the level below, m_{l-1} ranks of which
send side by side; the levels work as one pipeline. A level offers some ways p to send (low, mid, bulk), as NCCL's protocols do:

    t_l = min over p of  wait_lp + steps_l * step_lp + W / (m_{l-1} * B_l * share_lp)
    B_l = bandwidth_l * efficiency_l * (1 - small_l / n_l),     t = launch + max_l (bytes part) + sum_l (waiting part)

Few ranks fill fewer channels, hence `small`; `share` is what a way with less waiting reaches of the bandwidth. A library may run one kind
of collective at another rate than others, hence `cost.KIND`, and start all_to_all, whose messages do not wait for each other, in a time of its own.
Tokens of experts are sent by kernels of their own, which need `tokens` to begin and reach `tokens.share` of the bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.cluster.profile import Device, Link
from weft.cluster.spec import Cluster
from weft.core.errors import ClusterError

PROTOCOLS = ("low", "mid", "bulk")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send")


@dataclass(frozen=True)
class Ranks:
    """The ranks of a collective: how many lie within one block of each level, innermost first."""

    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.members[-1]


def wire(kind: str, size: int) -> float:
    """Bytes a rank sends for each byte of the full tensor (of its own part, for all_to_all and send)."""
    share = (size - 1) / size
    factors = {"all_reduce": 2 * share, "reduce_scatter": share, "all_gather": share, "all_to_all": share}
    if kind not in KINDS:
        raise ClusterError(f"no collective named {kind!r}", needed=", ".join(KINDS), found=kind)
    return factors.get(kind, 1.0)


def seconds(cluster: Cluster, kind: str, size: float, ranks: Ranks, copies: int = 1) -> float:
    """Time of one collective of `size` bytes: the full tensor, or one rank's part for all_to_all and send. Of an all_to_all `copies` of each
    row go to as many ranks by chance, and one into each block that has some of them."""
    if ranks.size == 1 or size == 0:
        return 0.0
    used = _levels(cluster.links, ranks.members)
    launch = max(link.get("launch") for link, _, _ in used)
    return launch + min(_ring(kind, size, ranks.size, used, protocol, copies) for protocol in PROTOCOLS)


def send_seconds(cluster: Cluster, size: float, stride: int) -> float:
    """Time to send `size` bytes to the rank `stride` further on."""
    level = next((link for link in cluster.links if link.span > stride), cluster.links[-1])
    bulk = level.get("bulk") + size / _bandwidth(level, 2)
    low = level.get("low") + size / (_bandwidth(level, 2) * level.get("low_share"))
    return level.get("launch") + min(bulk, low)


def peer_seconds(cluster: Cluster, device: Device, kind: str, size: float, ranks: Ranks) -> float:
    """Time a kernel spends on bytes of its peers, whose memory it reaches by itself: over their link, or over the memory that
    processes of one machine have in common. Nothing is launched for it."""
    moved = size * wire(kind, ranks.size)
    shared = "cores" in device.constants
    return moved / (device.bandwidth * device.get("memory.in_place", 1.0) if shared else _bandwidth(cluster.links[0], ranks.size))


Level = tuple[Link, int, int]  # the link, ranks below that send side by side, blocks that it joins


def _levels(links: Sequence[Link], members: tuple[int, ...]) -> list[Level]:
    """The levels that this group crosses."""
    below = (1, *members[:-1])
    return [(link, b, -(-m // b)) for link, m, b in zip(links, members, below, strict=True) if m > b]


def _ring(kind: str, size: float, ranks: int, used: list[Level], asked: str, copies: int) -> float:
    waiting, moving = 0.0, 0.0
    for link, below, blocks in used:
        protocol = asked if asked in link.constants else "low"
        step = link.get(f"{protocol}_step")
        if kind == "all_to_all":
            waiting += link.get("all_to_all", 0.0)
            step = link.get("all_to_all_step", step)
        waiting += link.get(protocol) + step * _steps(kind, blocks)
        speed = _bandwidth(link, blocks * below) * link.get(f"{protocol}_share", 1.0) * _in_switch(kind, link, blocks)
        if copies > 1:  # by kernels that look up where each token goes
            waiting, speed = waiting + link.get("tokens", 0.0), speed * link.get("tokens.share", 1.0)
        moving = max(moving, _out_of_block(kind, size, ranks, below, copies) * link.get(f"cost.{kind}", 1.0) / speed)
    return waiting + moving


def _out_of_block(kind: str, size: float, ranks: int, below: int, copies: int) -> float:
    """Bytes each rank's own link carries out of a block of `below` ranks."""
    if kind == "all_to_all":
        others = ranks / below - 1
        return size / copies * others * (1 - (others / (others + 1)) ** copies)
    return size * wire(kind, ranks) / below


def _steps(kind: str, blocks: int) -> float:
    """Hops one byte waits for: around the ring, or up and down a tree where that is shorter."""
    rounds = 2 if kind == "all_reduce" else 1
    if kind == "all_to_all":
        return math.log2(blocks)
    ring = rounds * (blocks - 1)
    return min(ring, rounds * 2 * math.log2(blocks)) if kind in ("all_reduce", "broadcast", "reduce") else ring


def _bandwidth(link: Link, ranks: int) -> float:
    return link.get("bandwidth") * link.get("efficiency") * (1 - link.get("small", 0.0) / ranks)


def _in_switch(kind: str, link: Link, blocks: int) -> float:
    """What summing inside the switch gains, where all devices of the level take part."""
    return link.get("in_switch", 1.0) if kind == "all_reduce" and blocks == link.span else 1.0
