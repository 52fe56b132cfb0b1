"""What an op costs: kernels on a device by `cluster.kernels`, collectives on links by `cluster.collectives`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.cluster import collectives, kernels
from weft.cluster.collectives import Ranks
from weft.cluster.profile import Device
from weft.cluster.spec import Cluster
from weft.core.layout import Mesh
from weft.cost.work import Attention, Collective, Gemm, MemoryBound, Op

Place = Callable[[str], tuple[int, int]]  # of an axis: the ranks between neighbours along it, and how many it has


@dataclass
class Costs:
    """Prices ops for one device of a cluster whose axes lie as `place` says; remembers what it has priced."""

    cluster: Cluster
    device: Device
    place: Place
    _known: dict[Op, float] = field(default_factory=dict)
    _ranks: dict[str, Ranks] = field(default_factory=dict)

    def seconds(self, op: Op) -> float:
        known: dict[Op, float] = self._known if isinstance(op, Collective) else self.device.priced
        found = known.get(op)
        if found is None:
            found = known[op] = self._link_seconds(op) if isinstance(op, Collective) else device_seconds(self.device, op)
        return found

    def _link_seconds(self, op: Collective) -> float:
        ranks = self.ranks(op.axis)
        if op.peer and ranks.members[0] == ranks.size:
            return collectives.peer_seconds(self.cluster, self.device, op.kind, op.bytes, ranks)
        return collectives.seconds(self.cluster, op.kind, op.bytes, ranks, op.copies)

    def host(self, op: Op) -> float:
        """What the host needs to issue it."""
        return op.launches * self.device.get("host.launch")

    def alone(self, op: Op) -> float:
        """What it takes in a row of ops whose host never runs ahead: a small one is done before the next is issued."""
        return max(self.seconds(op), self.host(op))

    def ranks(self, axis: str) -> Ranks:
        if axis not in self._ranks:
            self._ranks[axis] = Ranks(self.cluster.members(*self.place(axis)))
        return self._ranks[axis]

    def link(self, axis: str) -> str:
        """The outermost link a collective of this axis crosses; two on one link take turns."""
        members = self.ranks(axis).members
        below = (1, *members[:-1])
        used = [link.name for link, m, b in zip(self.cluster.links, members, below, strict=True) if m > b]
        return used[-1] if used else "none"

    def send(self, size: float) -> float:
        """From one pipeline stage to the next."""
        return collectives.send_seconds(self.cluster, size, self.place("pp")[0])


def compiles(device: Device) -> bool:
    """Whether pointwise ops in a row become one kernel: steps are compiled for accelerators, and run node by node on a processor."""
    return device.get("units") > 1


def on_mesh(cluster: Cluster, mesh: Mesh) -> Costs:
    """Prices for the axes of a mesh whose ranks fill the cluster in order, the last axis innermost."""
    return Costs(cluster, cluster.device, lambda axis: (math.prod(mesh.sizes[a] for a in mesh.axes[mesh.axes.index(axis) + 1 :]), mesh.sizes[axis]))


def device_seconds(device: Device, op: Op) -> float:
    """Time on the device of anything but a collective."""
    if isinstance(op, Gemm):
        if op.grouped and "experts.memory.bf16" in device.constants:
            return float(kernels.grouped(device, op.m, op.n, op.k, op.batch, op.dtype))
        return float(kernels.matmul(device, op.m, op.n, op.k, op.batch, op.dtype, op.aligned))
    if isinstance(op, Attention):
        return float(kernels.attention(device, op.batch, op.heads, op.queries, op.keys, op.head_dim, op.bytes, op.dtype, op.causal, op.back, op.launches))
    if isinstance(op, MemoryBound):
        size = op.bytes / (device.get(op.walk, 1.0) if op.walk else 1.0)
        return max(kernels.memory_bound(device, size, op.launches), _work(device, op), _by_element(device, op))
    raise TypeError(f"{type(op).__name__} runs on links, not on a device")


def _work(device: Device, op: MemoryBound) -> float:
    """Flops of an op kept in one piece; over few keys attention is slower where that was measured."""
    short = 1 + device.get(f"{op.share}.half", 0.0) / op.keys if op.keys else 1.0
    return op.flops * short / (device.peak(op.dtype) * device.get(op.share)) if op.flops else 0.0


def _by_element(device: Device, op: MemoryBound) -> float:
    """What elements cost that need more than to be moved: at a rate of the op's own where it was measured."""
    own = device.get(f"rate.{op.kind}", 0.0) if op.kind else 0.0
    return op.elements / own if own else op.math / device.get("math.rate", math.inf)
