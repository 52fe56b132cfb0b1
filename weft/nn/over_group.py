"""The three products with a collective, over a process group: in chunks, each sent while the next is multiplied.

x is [rows, k] and w is [n, k], as torch.nn.Linear keeps it. A chunk takes the same share of every rank's slice of rows, so what
a rank receives chunk by chunk lies in its result in order.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.nn.ways import Way
from weft.runtime import comm
from weft.runtime.pipeline import Chunks, in_turn


def product_all_reduce(x: Tensor, w: Tensor, group: Any, way: Way) -> Tensor:
    """x @ w.T summed over the ranks."""

    def one(c: int) -> Generator[None, None, Tensor]:
        work = comm.all_reduce(Chunks(0).take(x, c, way.chunks) @ w.T, group)
        yield
        return work.wait()  # type: ignore[no-any-return]

    return torch.cat(in_turn([one(c) for c in range(way.chunks)]))


def product_reduce_scatter(x: Tensor, w: Tensor, group: Any, way: Way) -> Tensor:
    """x @ w.T summed over the ranks, each keeping its slice of the rows."""
    world = dist.get_world_size(group)
    each = Chunks(0, world)
    rows = x.shape[0] // (world * way.chunks)

    def one(c: int) -> Generator[None, None, Tensor]:
        part = each.take(x, c, way.chunks) @ w.T
        span = (1, rows * world, w.shape[0])
        work = comm.reduce_scatter(part, group, span=span, mine=rows, shape=(rows, w.shape[0]))
        yield
        return work.wait()  # type: ignore[no-any-return]

    return torch.cat(in_turn([one(c) for c in range(way.chunks)]))


def gather_product(x: Tensor, w: Tensor, group: Any, way: Way) -> tuple[Tensor, Tensor]:
    """All ranks' rows times w.T, and the rows themselves."""
    world = dist.get_world_size(group)
    rows, k = x.shape[0] // way.chunks, x.shape[1]

    def one(c: int) -> Generator[None, None, tuple[Tensor, Tensor]]:
        piece = Chunks(0).take(x, c, way.chunks)
        work = comm.all_gather(piece, group, span=(1, rows, k), whole=rows * world, shape=(rows * world, k))
        yield
        gathered = work.wait()
        return gathered @ w.T, gathered

    done = in_turn([one(c) for c in range(way.chunks)])
    each = Chunks(0, world)
    return each.join([y for y, _ in done]), each.join([g for _, g in done])
