"""The three matmuls with a collective, over a process group: in chunks, each sent while the next is multiplied.

x is [rows, k] and w is [n, k], as torch.nn.Linear keeps it. A chunk takes the same share of every rank's slice of rows, so what
a rank receives chunk by chunk lies in its result in order. Results are written in place: no chunk is copied to be joined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.nn.strategies import Strategy
from weft.runtime.comm import scatter_natively
from weft.runtime.pipeline import run_staggered

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
UNEVEN = ("matmul_all_reduce",)  # which take chunks of any size


def matmul_all_reduce(x: Tensor, w: Tensor, group: Any, strategy: Strategy) -> Tensor:
    """x @ w.T summed over the ranks. Only the first matmul and the last sum have nothing to overlap with: where a sum is sooner done
    than a matmul chunks should shrink, where it is later they should grow, each by the ratio of the two."""
    sizes = _tapered(x.shape[0], strategy.chunks, strategy.taper)
    out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    matmul = packed_matmul(w, sizes[0]) if strategy.packed and _packable(w) else lambda rows, into: torch.mm(rows, w.T, out=into)
    sums = []
    for rows, into in zip(x.split(sizes), out.split(sizes), strict=True):
        matmul(rows, into)
        sums.append(dist.all_reduce(into, group=group, async_op=True))
    for one in sums:
        one.wait()
    return out


def _tapered(rows: int, chunks: int, ratio: float) -> list[int]:
    """So many parts of the rows, each larger than the one before by this factor; none is empty."""
    shares = [ratio**k for k in range(max(1, min(chunks, rows)))]
    edges = [min(k, rows) + round(max(0, rows - len(shares)) * sum(shares[:k]) / sum(shares)) for k in range(len(shares) + 1)]
    return [b - a for a, b in itertools.pairwise(edges)]


def _packable(w: Tensor) -> bool:
    return w.device.type == "cpu" and w.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def packed_matmul(w: Tensor, rows: int) -> Callable[[Tensor, Tensor], object]:
    """Matmuls with w.T that read it as laid out here, once: torch's would lay it out anew for every chunk."""
    ready = torch.ops.mkldnn._reorder_linear_weight(w, rows)
    return lambda x, into: into.copy_(torch.ops.mkldnn._linear_pointwise(x, ready, None, "none", [], ""))


def matmul_reduce_scatter(x: Tensor, w: Tensor, group: Any, strategy: Strategy) -> Tensor:
    """x @ w.T summed over the ranks, each keeping its slice of the rows."""
    world, n = dist.get_world_size(group), w.shape[0]
    rows = x.shape[0] // (world * strategy.chunks)
    taken = x.view(world, strategy.chunks, rows, x.shape[1])
    out = torch.empty(strategy.chunks, rows, n, dtype=x.dtype, device=x.device)

    def one(c: int) -> Generator[None, None, None]:
        part = torch.matmul(taken[:, c], w.T).contiguous()
        if scatter_natively(group):
            work = _scatter(out[c], part.view(world * rows, n), group=group, async_op=True)
            yield
            work.wait()
            return
        got = torch.empty_like(part)
        work = dist.all_to_all_single(got, part, group=group, async_op=True)
        yield
        work.wait()
        torch.sum(got, 0, out=out[c])

    run_staggered([one(c) for c in range(strategy.chunks)])
    return out.view(strategy.chunks * rows, n)


def gather_matmul(x: Tensor, w: Tensor, group: Any, strategy: Strategy, keep: bool = True) -> tuple[Tensor, Tensor | None]:
    """All ranks' rows times w.T and, with `keep`, the rows themselves."""
    world, k = dist.get_world_size(group), x.shape[1]
    rows = x.shape[0] // strategy.chunks
    gathered = torch.empty(strategy.chunks, world, rows, k, dtype=x.dtype, device=x.device)
    out = torch.empty(strategy.chunks, world, rows, w.shape[0], dtype=x.dtype, device=x.device)

    def one(c: int, piece: Tensor) -> Generator[None, None, None]:
        work = _gather(gathered[c].view(world * rows, k), piece, group=group, async_op=True)
        yield
        work.wait()
        torch.mm(gathered[c].view(world * rows, k), w.T, out=out[c].view(world * rows, -1))

    run_staggered([one(c, piece) for c, piece in enumerate(x.contiguous().chunk(strategy.chunks))])
    return _in_rank_order(out), _in_rank_order(gathered) if keep else None


def _in_rank_order(chunks: Tensor) -> Tensor:
    """[chunk, rank, row, ...] as rows of rank 0, rank 1, ..."""
    return chunks.transpose(0, 1).reshape(-1, chunks.shape[-1])
