"""Products of float32 matrices on tensor cores, as exact as float32.

x = h + l: h the 11 leading bits of x, rounded, l the rest. Tensor cores multiply numbers of 11 bits and add in float32, so

    x w  =  l_x h_w + h_x l_w + h_x h_w  + l_x l_w          with |l_x l_w| <= 2^-22 |x w|, left out

are three such products. Matrices without rows (weights) are split once per run, rows when they are read. Which tile is used, or
whether torch multiplies after all, is measured once per size. Infinite factors give nan, not inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from typing import Any

import torch
from torch import Tensor

from weft.runtime import modules, replay

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


@triton.jit(do_not_specialize=["M"])
def w_rows(a, high, low, out, M, N, K, a_row, out_row, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr,
           EVEN: tl.constexpr):
    across = tl.cdiv(N, BN)
    i = (tl.program_id(0) // across).to(tl.int64) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    sums = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, K, BK, num_stages=DEPTH):
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
    tl.store(out + i[:, None] * out_row + j[None, :], sums, mask=(i[:, None] < M) & (j[None, :] < N))


@triton.jit(do_not_specialize=["R", "step"])
def w_over_rows(x, y, out, R, M, N, x_row, y_row, step, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DEPTH: tl.constexpr):
    across = tl.cdiv(N, BN)
    i = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    low = tl.program_id(1).to(tl.int64) * step
    high = tl.minimum(low + step, R)
    sums = tl.zeros([BM, BN], tl.float32)
    for r in tl.range(low, high, BK, num_stages=DEPTH):
        rr = r + tl.arange(0, BK)
        a = tl.load(x + rr[None, :] * x_row + i[:, None], mask=(rr[None, :] < high) & (i[:, None] < M), other=0.0)
        b = tl.load(y + rr[:, None] * y_row + j[None, :], mask=(rr[:, None] < high) & (j[None, :] < N), other=0.0)
        ah = w_high(a)
        bh = w_high(b)
        part = tl.dot(a - ah, bh, input_precision="tf32")
        part = tl.dot(ah, b - bh, part, input_precision="tf32")
        sums += tl.dot(ah, bh, part, input_precision="tf32")
    at = tl.program_id(1).to(tl.int64) * M * N + i[:, None] * N + j[None, :]
    tl.store(out + at, sums, mask=(i[:, None] < M) & (j[None, :] < N))
"""


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program makes, and how."""

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


# fewest rows a tile is tried for -> the tile
ROWS = {0: Tile(16, 32, 64, 4, 4), 48: Tile(64, 32, 64, 3, 4), 96: Tile(64, 64, 32, 4, 4), 400: Tile(64, 128, 32, 3, 4)}
OVER_ROWS = (Tile(128, 128, 32, 3, 8), Tile(64, 128, 32, 3, 4))
SHARE = 0.97  # of torch's time: what is not clearly faster is left to torch
_chosen: dict[tuple[Any, ...], Tile | None] = {}


@dataclass(frozen=True)
class Halves:
    """A matrix [K, N] as the sum of two, each with its columns in one piece, as tensor cores read them."""

    high: Tensor
    low: Tensor

    @staticmethod
    def of(matrix: Tensor) -> Halves:
        k, n = matrix.shape
        out = Halves(matrix.new_empty(n, k).t(), matrix.new_empty(n, k).t())
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
    known = [t for least, t in ROWS.items() if least <= m]

    def by(tile: Tile) -> None:
        whole = k % tile.BK == 0 and n % tile.BN == 0
        grid = (tile.count(m, n),)
        tile.launch(_module().w_rows, grid, a, halves.high, halves.low, out, m, n, k, a.stride(0), out.stride(0), EVEN=whole)

    tile = _best(("rows", _size(m), k, n, a.device), known[-2:], by, lambda: torch.mm(a, matrix, out=out), a.device)
    if tile is None:
        torch.mm(a, matrix, out=out)
    else:
        by(tile)


def over_rows(x: Tensor, y: Tensor) -> Tensor:
    """x' y, a sum over rows: a weight gradient. The rows are shared out among programs and the shares added up in order."""
    (r, m), n = x.shape, y.shape[1]

    def by(tile: Tile) -> Tensor:
        shares = max(1, min(2 * replay.processors(x.device) // tile.count(m, n), -(-r // (4 * tile.BK))))
        step = -(-r // (shares * tile.BK)) * tile.BK
        out = x.new_empty(-(-r // step), m, n)
        grid = tile.count(m, n), len(out)
        tile.launch(_module().w_over_rows, grid, x, y, out, r, m, n, x.stride(0), y.stride(0), step)
        return out[0] if len(out) == 1 else out.sum(0)

    tile = _best(("over rows", _size(r), m, n, x.device), OVER_ROWS, by, lambda: torch.mm(x.t(), y), x.device)
    return torch.mm(x.t(), y) if tile is None else by(tile)


def _best(key: tuple[Any, ...], tiles: Any, by: Callable[[Tile], Any], torchs: Callable[[], Any], device: torch.device) -> Tile | None:
    """The fastest tile for a size, None for torch. Where nothing can be timed: a tile."""
    if key not in _chosen:
        if not replay.is_accelerator(device) or replay.is_recording(device):
            return tiles[0]
        times = {tile: _time(lambda t=tile: by(t), device) for tile in tiles}
        found = min(times, key=times.__getitem__)
        _chosen[key] = found if times[found] < SHARE * _time(torchs, device) else None
    return _chosen[key]


def _time(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call when several are recorded; infinite where a kernel does not run on this device."""
    try:
        return replay.time_recorded(work, device)
    except Exception:  # no room for the tile, say; the compiler has its own words for it
        return float("inf")


def _size(rows: int) -> int:
    """Sizes that share a choice lie within a fifth of each other."""
    return round(4 * log2(max(rows, 1)))


@cache
def _module() -> Any:
    return modules.load(TEXT)
