"""How long one kernel takes on one device.

A product of [m, k] and [k, n] is cut into tiles that the units of the device take in waves; the best tile wins:

    t = launch + waves * (tile + 2 * (tm * tn + half) * k / r),     waves = 1 if tiles < units else ceil(tiles / units)
    r = peak * efficiency * sustained * a / units,     tiles = batch * ceil(m / tm) * ceil(n / tn)

and never less than its bytes take. A device of one unit takes the product as one tile. `half` says how much small tiles
lose, `a` what rows cost that no 16-byte load can take (measured for each number of missing factors of two, or
a = misaligned ** (missing / 3)). All else is bytes over bandwidth, or flops over a rate.
"""

from __future__ import annotations

import math

from weft.cluster.profile import Device

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


def product(device: Device, m: int, n: int, k: int, batch: int, dtype: str) -> float:
    """Seconds of [m, k] x [k, n], `batch` times."""
    units, half, tile = device.get("units"), device.get("gemm.half"), device.get("gemm.tile")
    rate = device.peak(dtype) * _efficiency(device, dtype) * _alignment(device, dtype, m, n, k) / units
    best = math.inf
    for tm, tn in TILES if units > 1 else ((m, n),):  # one unit takes the whole and wastes no part of a tile
        tiles = batch * math.ceil(m / tm) * math.ceil(n / tn)
        waves = 1 if tiles < units else math.ceil(tiles / units)
        best = min(best, waves * (tile + 2 * (tm * tn + half) * k / rate))
    size = batch * (m * k + k * n + m * n) * WIDTH[dtype]
    return device.get("gemm.launch", device.get("kernel.launch")) + max(best, size / device.bandwidth)


def _efficiency(device: Device, dtype: str) -> float:
    share = device.get(f"gemm.efficiency.{dtype}", device.get("gemm.efficiency"))
    return share * device.get("gemm.sustained", 1.0)


def _alignment(device: Device, dtype: str, *sizes: int) -> float:
    """Rows should be multiples of 16 bytes. Units that multiply single fp32 numbers do not mind."""
    if dtype == "fp32" and device.get("units") > 1:
        return 1.0
    want = int(math.log2(16 // WIDTH[dtype]))
    missing = want - min(want, *(_twos(x) for x in sizes))
    usual = float(device.get("gemm.misaligned", 1.0) ** (missing / 3))
    return device.get(f"gemm.misaligned.{missing}", usual) if missing else 1.0


def _twos(x: int) -> int:
    """How often 2 divides x."""
    return (x & -x).bit_length() - 1


def attention(device: Device, flops: float, size: float, rows: int, head_dim: int, dtype: str, back: bool, launches: int) -> float:
    """Seconds of attention in one kernel: `rows` are samples x heads x queries, which the units share out by 128."""
    rate = device.peak(dtype) * device.get("attention.backward" if back else "attention.forward")
    rate *= min(1.0, (head_dim / 128) ** device.get("attention.narrow", 0.3))
    rate *= min(1.0, math.ceil(rows / 128) / device.get("units"))
    return float(launches * device.get("kernel.launch") + max(flops / rate, size / device.bandwidth))


def in_tiles(device: Device, queries: int, keys: int, causal: bool, tile: int = 128) -> float:
    """What attention over whole tiles of queries and keys computes, over what it must. Under a causal mask the tiles on the diagonal
    count whole, and each tile of queries costs as much as `attention.start` tiles of keys before its first, where that was measured. A
    device of one unit has no tiles, but reaches half of its rate over so many keys."""
    if device.get("units") == 1:
        return 1 + device.get("attention.forward.half", 0.0) / keys
    start = device.get("attention.start", -1.0)
    across = math.ceil(keys / tile)
    met = across if start < 0 or not causal else (across + 1) / 2
    must = keys / tile if start < 0 or not causal else keys / tile / 2
    return float(math.ceil(queries / tile) * tile * (met + max(0.0, start)) / (queries * must))


def touch(device: Device, size: float, launches: int) -> float:
    """Seconds of `launches` kernels that together move `size` bytes."""
    return launches * device.get("kernel.launch") + size / _bandwidth(device, size / max(1, launches))


def _bandwidth(device: Device, size: float) -> float:
    """What a kernel that touches `size` bytes gets, where the profile knows the cache: part from it, the rest from memory."""
    cache = device.get("cache.bytes", 0.0)
    if not cache:
        return device.bandwidth
    inside = min(1.0, cache / max(size, 1.0))
    return 1 / (inside / device.get("cache.bandwidth") + (1 - inside) / device.bandwidth)
