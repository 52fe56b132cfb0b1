"""Matmuls of float32 matrices on tensor cores, as exact as float32.

x = h + l: h the 11 leading bits of x, rounded, l the rest. Tensor cores multiply numbers of 11 bits and add in float32, so

    x w  =  l_x h_w + h_x l_w + h_x h_w  + l_x l_w          with |l_x l_w| <= 2^-22 |x w|, left out

are three such matmuls. Matrices without rows (weights) are split once per run, rows when they are read. Sums over rows (weight
gradients) are split into three numbers of 8 bits, in six matmuls, which may be read in any order. Tensor cores truncate what they add, so
a sum longer than one tile is added up outside of them. Which tile is used, or whether torch multiplies after all, is measured
once per size. Infinite factors give nan, not inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.runtime import modules, replay

P = TypeVar("P")
HIGH = """\
@triton.jit
def w_high(x):
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
"""
TEXT = f"""\
import triton
import triton.language as tl


{HIGH}

@triton.jit
def w_split(w, high, low, K, N, k_step, n_step, BLOCK: tl.constexpr):
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(w + k[:, None] * k_step + n[None, :] * n_step, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    x = tl.trans(x)
    h = w_high(x)
    at, inside = n[:, None] * K + k[None, :], (n[:, None] < N) & (k[None, :] < K)
    tl.store(high + at, h, mask=inside)
    tl.store(low + at, x - h, mask=inside)


@triton.jit(do_not_specialize=["M", "blocks"])
def w_rows(a, high, low, out, parts, counts, M, N, K, blocks, a_row, out_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           DEPTH: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr):
    tile = tl.program_id(0)
    across = tl.cdiv(N, BN)
    i = (tile // across).to(tl.int64) * BM + tl.arange(0, BM)
    j = (tile % across) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * blocks * BK  # a multiple of BK, which tells the compiler that rows are read from aligned places
    sums = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(first, tl.minimum(first + blocks * BK, K), BK, num_stages=DEPTH):
        kk = k + tl.arange(0, BK)
        if EVEN:
            x = tl.load(a + i[:, None] * a_row + kk[None, :], mask=i[:, None] < M, other=0.0)
            h = tl.load(high + j[None, :] * K + kk[:, None])
            l = tl.load(low + j[None, :] * K + kk[:, None])
        else:
            x = tl.load(a + i[:, None] * a_row + kk[None, :], mask=(i[:, None] < M) & (kk[None, :] < K), other=0.0)
            h = tl.load(high + j[None, :] * K + kk[:, None], mask=(j[None, :] < N) & (kk[:, None] < K), other=0.0)
            l = tl.load(low + j[None, :] * K + kk[:, None], mask=(j[None, :] < N) & (kk[:, None] < K), other=0.0)
        xh = w_high(x)
        part = tl.dot(x - xh, h, input_precision="tf32")
        part = tl.dot(xh, l, part, input_precision="tf32")
        sums += tl.dot(xh, h, part, input_precision="tf32")
    inside = (i[:, None] < M) & (j[None, :] < N)
    if SHARED:
        mine = parts + i[:, None] * N + j[None, :]
        tl.store(mine + tl.program_id(1).to(tl.int64) * M * N, sums, mask=inside)
        tl.debug_barrier()
        if tl.atomic_add(counts + tile, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:  # the last one adds up, in order
            sums = tl.zeros([BM, BN], tl.float32)
            for _ in range(0, tl.num_programs(1)):
                sums += tl.load(mine, mask=inside, other=0.0, cache_modifier=".cg")
                mine += M * N
            tl.store(out + i[:, None] * out_row + j[None, :], sums, mask=inside)
            tl.store(counts + tile, 0)
    else:
        tl.store(out + i[:, None] * out_row + j[None, :], sums, mask=inside)


@triton.jit(do_not_specialize=["R", "blocks"])
def w_over_rows(x, y, out, R, M, N, x_row, y_row, blocks, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr,
                PRECISION: tl.constexpr):
    across = tl.cdiv(N, BN)
    i = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    low = tl.program_id(1).to(tl.int64) * blocks * BK
    high = tl.minimum(low + blocks * BK, R)
    sums = tl.zeros([BM, BN], tl.float32)
    for r in tl.range(low, high, BK, num_stages=DEPTH):
        rr = r + tl.arange(0, BK)
        a = tl.load(x + rr[None, :] * x_row + i[:, None], mask=(rr[None, :] < high) & (i[:, None] < M), other=0.0)
        b = tl.load(y + rr[:, None] * y_row + j[None, :], mask=(rr[:, None] < high) & (j[None, :] < N), other=0.0)
        sums += tl.dot(a, b, input_precision=PRECISION)
    at = tl.program_id(1).to(tl.int64) * M * N + i[:, None] * N + j[None, :]
    tl.store(out + at, sums, mask=(i[:, None] < M) & (j[None, :] < N))
"""


@dataclass(frozen=True)
class Tile:
    """The part of a matmul that one program makes, and how."""

    BM: int
    BN: int
    BK: int
    DEPTH: int
    warps: int

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        sizes = {k: v for k, v in asdict(self).items() if k != "warps"}
        kernel[grid](*args, **sizes, **constants, num_warps=self.warps)

    def count(self, rows: int, columns: int) -> int:
        return -(-rows // self.BM) * -(-columns // self.BN)


@dataclass(frozen=True)
class SplitK:
    """A tile, and how many programs share the sum behind it."""

    tile: Tile
    shares: int = 1

    def blocks(self, inner: int) -> int:
        """How many blocks of the inner dim each of them adds up."""
        return -(-inner // (self.shares * self.tile.BK))


COUNTS = 1024  # most tiles that are shared
# (fewest rows it is tried for, most rows, tile)
ROWS = (
    (0, 72, Tile(16, 32, 64, 4, 4)), (33, 800, Tile(64, 32, 64, 3, 4)), (150, 3000, Tile(64, 64, 32, 4, 4)), (500, 1 << 40, Tile(64, 128, 32, 3, 4)),
)  # fmt: skip
OVER_ROWS = (Tile(128, 128, 32, 3, 8),)
SHARE = 0.97  # of torch's time: what is not clearly faster is left to torch
_chosen: dict[tuple[Any, ...], Any] = {}  # by kind of matmul, size and device


@dataclass(frozen=True)
class Halves:
    """A matrix [K, N] as the sum of two, each with its columns in one piece, as tensor cores read them."""

    high: Tensor
    low: Tensor
    counts: Tensor  # of programs that are done, by tile, where several share one

    @staticmethod
    def of(matrix: Tensor) -> Halves:
        k, n = matrix.shape
        counts = torch.zeros(COUNTS, dtype=torch.int32, device=matrix.device)
        out = Halves(matrix.new_empty(n, k).t(), matrix.new_empty(n, k).t(), counts)
        out.fill(matrix)
        return out

    def fill(self, matrix: Tensor) -> None:
        k, n = matrix.shape
        grid = -(-k // 32), -(-n // 32)
        _module().w_split[grid](matrix, self.high, self.low, k, n, *matrix.stride(), BLOCK=32, num_warps=4)


def fits(*tensors: Tensor) -> bool:
    """Whether kernels here can read or write them: float32 rows in one piece."""
    return all(t.dtype is torch.float32 and t.dim() == 2 and t.stride(1) == 1 and t.numel() for t in tensors)


def rows(a: Tensor, matrix: Tensor, halves: Halves, out: Tensor) -> None:
    """out = a @ matrix, where `halves` are those of the matrix."""
    (m, k), n = a.shape, matrix.shape[1]

    def by(plan: SplitK) -> None:
        tile, blocks = plan.tile, plan.blocks(k)
        grid, even = (tile.count(m, n), -(-k // (blocks * tile.BK))), k % tile.BK == 0 and n % tile.BN == 0
        shared = grid[1] > 1
        parts = a.new_empty(grid[1], m, n) if shared else out
        sizes = m, n, k, blocks, a.stride(0), out.stride(0)
        tile.launch(_module().w_rows, grid, a, halves.high, halves.low, out, parts, halves.counts, *sizes, EVEN=even, SHARED=shared)

    plan = best(
        _chosen, ("rows", size_of(m), k, n, a.device), lambda: _for_rows(m, k, n, a.device), by, lambda: torch.mm(a, matrix, out=out)
    )
    if plan is None:
        torch.mm(a, matrix, out=out)
    else:
        by(plan)


def over_rows(x: Tensor, y: Tensor) -> Tensor:
    """x' y, a sum over rows: a weight gradient. The rows are shared out among programs and the shares added up in order."""
    (r, m), n = x.shape, y.shape[1]

    def by(plan: SplitK) -> Tensor:
        tile, blocks = plan.tile, plan.blocks(r)
        out = x.new_empty(-(-r // (blocks * tile.BK)), m, n)
        grid, sizes = (tile.count(m, n), len(out)), (r, m, n, x.stride(0), y.stride(0), blocks)
        tile.launch(_module().w_over_rows, grid, x, y, out, *sizes, PRECISION="bf16x6" if replay.is_accelerator(x.device) else "ieee")
        return out[0] if len(out) == 1 else out.sum(0)

    plan = best(_chosen, ("over rows", size_of(r), m, n, x.device), lambda: _for_sums(r, m, n, x.device), by, lambda: torch.mm(x.t(), y))
    return torch.mm(x.t(), y) if plan is None else by(plan)


def _for_rows(m: int, k: int, n: int, device: torch.device) -> list[SplitK]:
    """Tiles for so many rows, each matmul made by one program or by as many as the device runs at once."""
    out: list[SplitK] = []
    for tile in (t for least, most, t in ROWS if least <= m <= most):
        count = tile.count(m, n)
        shares = min(2 * replay.processors(device) // count, k // (2 * tile.BK))
        out += [SplitK(tile, s) for s in (1, shares) if s == 1 or (s > 1 and count <= COUNTS)]
    return out


def _for_sums(r: int, m: int, n: int, device: torch.device) -> list[SplitK]:
    full = 2 * replay.processors(device)
    return [SplitK(t, max(1, min(waves * full // t.count(m, n), r // (4 * t.BK)))) for t in OVER_ROWS for waves in (1, 2)]


def best(
    known: dict[tuple[Any, ...], Any],
    key: tuple[Any, ...],
    plans: Callable[[], list[P]],
    by: Callable[[P], Any],
    otherwise: Callable[[], Any],
) -> P | None:
    """The fastest plan for a size, None where none is faster than what else there is; timed once and kept in `known`.

    A key ends with the device. Where nothing can be timed: the last plan.
    """
    if key not in known:
        found, device = plans(), key[-1]
        if not replay.is_accelerator(device) or replay.is_recording(device):
            return found[-1]
        times = {plan: _time(lambda p=plan: by(p), device) for plan in found}
        fastest = min(times, key=times.__getitem__)
        known[key] = fastest if times[fastest] < SHARE * _time(otherwise, device) else None
    return known[key]


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call when several are recorded; infinite where a kernel does not run on this device."""
    try:
        return replay.time_recorded(work, device)
    except Exception:  # no room for the tile, say; the compiler has its own words for it
        return float("inf")


def size_of(rows: int) -> int:
    """Sizes that share a choice lie within a fifth of each other."""
    return round(4 * log2(max(rows, 1)))


@cache
def _module() -> Any:
    return modules.load(TEXT)
