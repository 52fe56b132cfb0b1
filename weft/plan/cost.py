"""How long one op takes on one device, and one collective on its ranks.

A product of [m, k] and [k, n] is cut into tiles that the units of the device take in waves; the best tile wins:

    t = launch + waves * (tile + 2 * tm * tn * k / r),     waves = 1 if tiles < units else ceil(tiles / units)
    r = peak * efficiency * a / units * tm * tn / (tm * tn + half),     tiles = batch * ceil(m / tm) * ceil(n / tn)

and never less than its bytes take. `half` says how much small tiles lose, `a` how much rows that no 16-byte load can take
(a = misaligned ** (missing factors of two / 3)). All else is bytes over bandwidth, or flops over a rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weft.cluster import collectives
from weft.cluster.collectives import Ranks
from weft.cluster.profile import Device
from weft.cluster.spec import Cluster
from weft.plan.setting import Setting
from weft.plan.workload import WIDTH, Attention, Collective, Gemm, Op, Touch

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@dataclass
class Costs:
    """Prices ops for one device of a cluster under one setting; remembers what it has priced."""

    cluster: Cluster
    setting: Setting
    device: Device
    _known: dict[Op, float] = field(default_factory=dict)
    _ranks: dict[str, Ranks] = field(default_factory=dict)

    def seconds(self, op: Op) -> float:
        if op not in self._known:
            self._known[op] = self._price(op)
        return self._known[op]

    def _price(self, op: Op) -> float:
        if isinstance(op, Collective):
            return collectives.seconds(self.cluster, op.kind, op.bytes, self.ranks(op.axis))
        return device_seconds(self.device, op)

    def host(self, op: Op) -> float:
        """What the host needs to issue it."""
        return op.launches * self.device.get("host.launch")

    def ranks(self, axis: str) -> Ranks:
        if axis not in self._ranks:
            stride, size = self.setting.stride(axis), self.setting.size(axis)
            self._ranks[axis] = Ranks(self.cluster.members(stride, size))
        return self._ranks[axis]

    def send(self, size: float) -> float:
        """From one pipeline stage to the next."""
        return collectives.send_seconds(self.cluster, size, self.setting.stride("pp"))


def device_seconds(device: Device, op: Op) -> float:
    """Time on the device of anything but a collective."""
    if isinstance(op, Gemm):
        return gemm_seconds(device, op)
    if isinstance(op, Attention):
        return attention_seconds(device, op)
    if isinstance(op, Touch):
        return op.launches * device.get("kernel.launch") + op.bytes / device.bandwidth
    raise TypeError(f"{type(op).__name__} runs on links, not on a device")


def gemm_seconds(device: Device, op: Gemm) -> float:
    units, half = device.get("units"), device.get("gemm.half")
    rate = device.peak(op.dtype) * _efficiency(device, op) / units * _alignment(device, op)
    best = math.inf
    for tm, tn in TILES:
        tiles = op.batch * math.ceil(op.m / tm) * math.ceil(op.n / tn)
        waves = 1 if tiles < units else math.ceil(tiles / units)
        area = tm * tn
        best = min(best, waves * (device.get("gemm.tile") + 2 * (area + half) * op.k / rate))
    return device.get("gemm.launch") + max(best, op.bytes / device.bandwidth)


def _efficiency(device: Device, op: Gemm) -> float:
    return device.get(f"gemm.efficiency.{op.dtype}", device.get("gemm.efficiency"))


def _alignment(device: Device, op: Gemm) -> float:
    """Rows are k or n long in memory; both should be multiples of 16 bytes."""
    want = int(math.log2(16 // WIDTH[op.dtype]))
    have = min(want, *(_twos(x) for x in (op.n, op.k, op.m)))
    return float(device.get("gemm.misaligned", 1.0) ** ((want - have) / 3))


def _twos(x: int) -> int:
    """How often 2 divides x."""
    return (x & -x).bit_length() - 1


def attention_seconds(device: Device, op: Attention) -> float:
    rate = device.peak(op.dtype) * device.get("attention.backward" if op.back else "attention.forward")
    rate *= min(1.0, (op.head_dim / 128) ** device.get("attention.narrow", 0.3))
    parallel = op.batch * op.heads * math.ceil(op.queries / 128)
    rate *= min(1.0, parallel / device.get("units"))
    return float(op.launches * device.get("kernel.launch") + max(op.flops / rate, op.bytes / device.bandwidth))
