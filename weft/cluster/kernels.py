"""How long one kernel takes on one device.

A matmul of [m, k] and [k, n] is split into tiles of tm x tn that the units of the device take in waves, k in `s` pieces where few tiles are
left (then their sums are added up); the best tile and split win:

    t = launch + | waves * (tile + max(2 * (tm * tn + half) * k / (s * r), (tm + tn) * k * w / (s * unit))),
                   bytes / memory,  tiles * (tm + tn) * k * w / (s * cache) |  +  [s > 1] (split + 4 * m * n * (s + 1) / cache)
    r = peak * efficiency * sustained * a / units,     tiles = s * batch * ceil(m / tm) * ceil(n / tn)

|x, y, z| is the norm of exponent `joined` (their largest where none is given): how well computing, memory and cache overlap with each
other. A last wave that is not full costs a full one to the share `whole`. `half` says how much small tiles lose, `a` what rows cost that
no 16-byte load can take (measured for each number of missing factors of two, or a = misaligned ** (missing / 3)). A constant may have a
value of its own for a dtype (`gemm.half.fp8`). A device of one unit takes the matmul as one tile. All else is bytes over bandwidth, or flops
over a rate.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weft.cluster.profile import Device

TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (64, 32), (32, 64), (16, 64))
WIDE = 128  # rows and columns of the smallest tile that libraries offer in 8 bits for more than FEW rows
FEW = 64
SPLITS = (1, 2, 3, 4, 6, 8, 16)
SHORTEST = 128  # piece of k
WIDTH = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp8_block": 1, "int8": 1, "fp4": 0.5}
LIKE = {"fp4": "fp8"}  # constants of kernels that no table has, but for the peak
_CUTS = np.array([(tm, tn, s) for tm, tn in TILES for s in SPLITS], dtype=float).T
_WHOLE_K = np.array([(tm, tn, 1) for tm, tn in TILES], dtype=float).T


def matmul(device: Device, m: Any, n: Any, k: Any, batch: int, dtype: str, aligned: Any = None) -> Any:
    """Seconds of [m, k] x [k, n], `batch` times; of many matmuls at once where sizes are arrays. `aligned` are sizes its tensors are contiguous along."""
    rate = device.peak(dtype) * _of(device, "gemm", dtype, "efficiency") * _of(device, "gemm", dtype, "sustained", 1.0)
    rate = rate * _alignment(device, dtype, (n, k) if aligned is None else aligned)
    launch = _of(device, "gemm", dtype, "launch", device.get("kernel.launch"))
    memory = device.get("memory.bandwidth") * _of(device, "gemm", dtype, "memory", device.get("memory.efficiency"))
    width = WIDTH[dtype]
    if device.get("units") == 1:  # takes all of it and wastes no part of a tile
        moved = batch * (m * k + k * n + m * n) * width
        return launch + np.maximum(_of(device, "gemm", dtype, "tile") + 2 * batch * (m * n + _of(device, "gemm", dtype, "half")) * k / rate, moved / memory)
    wrote = batch * m * n * max(2, width) / (memory * _of(device, "gemm", dtype, "write", 1.0))
    return launch + _in_waves(device, "gemm", dtype, m, n, k, batch, rate, batch * (m * k + k * n) * width / memory + wrote)


def _in_waves(device: Device, kind: str, dtype: str, m: Any, n: Any, k: Any, batch: Any, rate: Any, moving: Any) -> Any:
    units, split = device.get("units"), _of(device, kind, dtype, "split", 0.0)
    m, n, k, batch, rate, moving = (np.asarray(x, dtype=float)[..., None] for x in (m, n, k, batch, rate, moving))
    tm, tn, s = _CUTS if split else _WHOLE_K
    piece = np.ceil(k / s / 64) * 64
    tiles = batch * np.ceil(m / tm) * np.ceil(n / tn) * s
    full = _of(device, kind, dtype, "whole", 1.0)
    waves = np.where(tiles < units, 1.0, (1 - full) * tiles / units + full * np.ceil(tiles / units))
    loaded = (tm + tn) * piece * WIDTH[dtype]
    cache = _of(device, kind, dtype, "cache", math.inf)
    each = np.maximum(2 * (tm * tn + _of(device, kind, dtype, "half")) * piece * units / rate, loaded / _of(device, kind, dtype, "unit", math.inf))
    times = _joined(_of(device, kind, dtype, "joined", 0.0), waves * (_of(device, kind, dtype, "tile") + each), moving, tiles * loaded / cache)
    times = times + np.where(s > 1, split + 4 * batch * m * n * (s + 1) / cache, 0.0)
    offered = ((s == 1) | (piece >= SHORTEST)) & ((m <= FEW) | (WIDTH[dtype] > 1) | (np.minimum(tm, tn) >= WIDE))
    return np.where(offered, times, np.inf).min(-1)


def _joined(exponent: float, *times: Any) -> Any:
    """The norm of some times; their largest where no exponent is known."""
    largest = np.maximum.reduce(np.broadcast_arrays(*times))
    return largest * sum((x / largest) ** exponent for x in times) ** (1 / exponent) if exponent else largest


def _of(device: Device, kind: str, dtype: str, name: str, default: float | None = None) -> float:
    """A constant of a kind of kernel, in a dtype where it has one of its own."""
    for d in (dtype, LIKE.get(dtype, dtype)):
        if (key := f"{kind}.{name}.{d}") in device.constants:
            return device.get(key)
    return device.get(f"{kind}.{name}", default)


def kept_width(dtype: str) -> float:
    """Bytes of an element of parameters and activations where matmuls are computed in a dtype: narrow ones are made for each matmul."""
    return max(2.0, WIDTH[dtype])


def quantise(device: Device, m: Any, k: Any) -> Any:
    """Seconds to bring [m, k] from 16 bits to 8 with a scale: bytes, rows that a unit takes one after the other, and the length of one."""
    moved = 3.0 * m * k / (device.get("memory.bandwidth") * device.get("quantise.memory", device.get("memory.efficiency")))
    return np.maximum(np.maximum(moved, m * device.get("quantise.row", 0.0)), k * device.get("quantise.length", 0.0))


def _alignment(device: Device, dtype: str, sizes: tuple[Any, ...]) -> Any:
    """Rows should be multiples of 16 bytes. Units that multiply single fp32 numbers do not mind, and tensors of one number have no rows."""
    if not sizes or dtype == "fp32" and device.get("units") > 1:
        return 1.0
    want = int(math.log2(16 / WIDTH[dtype]))
    missing = want - np.minimum(want, np.minimum.reduce([_twos(x) for x in sizes]))
    usual = [device.get("gemm.misaligned", 1.0) ** (i / 3) for i in range(want + 1)]
    return np.array([1.0] + [device.get(f"gemm.misaligned.{i}", usual[i]) for i in range(1, want + 1)])[missing]


def _twos(x: Any) -> Any:
    """How often 2 divides x: 0 more often than is ever asked, for no elements have no row that begins in a wrong place."""
    x = np.asarray(x, dtype=np.int64) | 1 << 62
    return np.log2(x & -x).astype(int)


TILE = 128  # queries and keys that attention takes at once


def attention(
    device: Device, batch: Any, heads: Any, queries: Any, keys: Any, head_dim: Any, size: Any, dtype: str, causal: bool = True,
    back: bool = False, launches: int = 1, window: Any = 0, kind: str = "attention", kept: str = "",
) -> Any:  # fmt: skip
    """Seconds of attention in one kernel that moves `size` bytes: units share out tiles of queries, and one of them meets the tiles of
    keys that its mask and window leave, one after the other. The backward has five matmuls for two. `kind` is "context" of kernels that
    read and fill a paged cache, of the dtype `kept`."""
    narrow, wide, head_dim = _of(device, kind, kept, "narrow", 0.3), _of(device, kind, kept, "wide", 0.0), np.maximum(1, head_dim)
    rate = device.peak(dtype) * _of(device, kind, kept, "backward" if back else "forward")
    rate = rate * np.where(head_dim < 128, (head_dim / 128) ** narrow, (128 / head_dim) ** wide)
    rows = batch * heads * np.ceil(queries / TILE)
    longest, mean = tiles_of_keys(device, queries, keys, causal, window, kind)
    each = 4.0 * TILE * TILE * np.maximum(64, head_dim) * (2.5 if back else 1.0) / (rate / device.get("units"))
    start = max(0.0, _of(device, kind, kept, "start", 0.0))
    busy = np.maximum(1.0, rows / device.get("units")) * (mean + start) * each
    alone = (longest + start) * np.maximum(each, _of(device, kind, kept, "latency", 0.0))
    moved = size / (device.get("memory.bandwidth") * _of(device, kind, kept, "memory", device.get("memory.efficiency")))
    launch = _of(device, kind, kept, "launch", device.get("kernel.launch"))
    return launches * launch + np.maximum(np.maximum(busy, alone), moved)


def tiles_of_keys(device: Device, queries: Any, keys: Any, causal: bool, window: Any, kind: str = "attention") -> tuple[Any, Any]:
    """The most tiles of keys that a tile of queries meets, and how many on average. Those on the diagonal count in full where the device
    tells what a tile of queries costs before its first; a device of one unit has no tiles, but reaches half of its rate over so many keys."""
    across = np.maximum(1.0, np.ceil(keys / TILE))
    if device.get("units") == 1:
        mean = (keys + device.get("attention.forward.half", 0.0)) / TILE * (0.5 if causal else 1.0)
        return mean, mean
    if not causal:
        return across, across
    if f"{kind}.start" not in device.constants:
        return across / 2, across / 2
    seen = np.where(window, np.minimum(across, np.ceil(window / TILE) + 1), across)
    return seen, (seen * (seen + 1) / 2 + (across - seen) * seen) / across


def decode(device: Device, batch: Any, heads: Any, shared: Any, keys: Any, head_dim: Any, kept: str) -> Any:
    """Seconds of attention of one new token in each sequence over keys and values of the dtype `kept`, which are read once: pieces of them
    by many units, the longest by one after the other, then summed up."""
    size = 2.0 * batch * shared * keys * head_dim * WIDTH[kept] + 4.0 * batch * heads * head_dim
    moved = size / (device.get("memory.bandwidth") * _of(device, "decode", kept, "memory", device.get("memory.efficiency")))
    alone = keys * _of(device, "decode", kept, "key", 0.0) * np.minimum(1.0, device.get("units") / (batch * shared))
    rows = batch * shared * head_dim / 128 * _of(device, "decode", kept, "row", 0.0)
    return _of(device, "decode", kept, "launch", device.get("kernel.launch")) + moved + alone + rows


def experts(device: Device, tokens: Any, hidden: Any, inner: Any, top: Any, count: Any, ranks: Any, dtype: str, gated: Any = True, skew: Any = 0.0) -> Any:
    """Seconds of one layer of experts on one of `ranks` ranks that share `count` experts out: routing, rows brought to their experts, both
    matmuls, the activation and the sum. `tokens` are those of all its ranks; `skew` the exponent of a power law of how experts are chosen."""
    own, chosen = np.maximum(1.0, count / ranks), tokens * top / ranks
    rows = chosen * np.where(np.asarray(skew) > 0, np.minimum(ranks, 1 + device.get("experts.skew", 0.0) * skew * np.minimum(ranks, 4)), 1.0)
    used = np.maximum(1.0, own * (1 - np.exp(-chosen / own)))  # experts that some row goes to
    each = np.maximum(1.0, rows / used)
    up = _grouped(device, each, inner * np.where(gated, 2, 1), hidden, used, dtype)
    down = _grouped(device, each, hidden, inner, used, dtype)
    memory = device.get("memory.bandwidth") * _of(device, "experts", dtype, "memory")
    passes = (rows * (4 * hidden + 6 * inner) + 4 * tokens * hidden) / memory
    return _of(device, "experts", dtype, "launch") + up + down + passes + tokens * _of(device, "experts", dtype, "row", 0.0) * np.sqrt(count)


def grouped(device: Device, m: Any, n: Any, k: Any, groups: Any, dtype: str) -> Any:
    """Seconds of a matmul for each of some groups whose rows the device counts, in one kernel: of a narrow dtype where that is the faster."""
    kinds = [d for d in (LIKE.get(dtype, dtype), "bf16") if f"experts.memory.{d}" in device.constants]  # runs in 4 bits gain nothing here
    return device.get("kernel.launch") + np.minimum.reduce([_grouped(device, m, n, k, groups, d) for d in kinds])


def _grouped(device: Device, m: Any, n: Any, k: Any, groups: Any, dtype: str) -> Any:
    """[m, k] x [k, n] for each of some groups, in one kernel."""
    rate = device.peak(dtype.removesuffix("_block")) * _of(device, "experts", dtype, "efficiency") * device.get("gemm.sustained", 1.0)
    memory = device.get("memory.bandwidth") * _of(device, "experts", dtype, "memory")
    moving = groups * (n * k * WIDTH[dtype] + 2 * m * (n + k)) / memory
    return _in_waves(device, "experts", dtype, m, n, k, groups, rate, moving)


def memory_bound(device: Device, size: float, launches: int) -> float:
    """Seconds of `launches` kernels that together move `size` bytes."""
    return launches * device.get("kernel.launch") + size / _bandwidth(device, size / max(1, launches))


def _bandwidth(device: Device, size: float) -> float:
    """What a kernel that touches `size` bytes gets, where the profile knows the cache: part from it, the rest from memory."""
    cache = device.get("cache.bytes", 0.0)
    if not cache:
        return device.bandwidth
    inside = min(1.0, cache / max(size, 1.0))
    return 1 / (inside / device.get("cache.bandwidth") + (1 - inside) / device.bandwidth)
