"""How a matmul and its collective are run: plainly, one after the other, or in chunks at once; over the process group or
over peer memory. Which way is used is a choice per shape, made by measuring (`weft.tune`) or by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Strategy:
    """`over` is "group" (torch.distributed) or "peers" (memory all ranks can reach).

    One chunk means no overlap, but for a gather over peers: there a rank's own matmul always overlaps with the copies, and
    chunks are the matmuls in which it takes the others' rows. By `"matmul"`, each rank's matmul carries the rows of the next
    (half precision, GPUs), and chunks, blocks and streams do not matter.
    """

    over: str = "group"
    chunks: int = 1
    blocks: int = 16  # of a device kernel that moves data overlapped with the matmul
    by: str = "copy"  # the driver's "copy", a "kernel" for each piece, one "persistent" kernel for all, one in "flow", or the "matmul"
    taper: float = 1.0  # rows of a chunk for each row of the one before, where results are summed over a group
    packed: bool = False  # over a group, on CPUs: the weight is laid out once for all chunks, as the matmul would for each
    streams: int = 1  # for the matmuls of a gather, one after the other: with two, the next fills the device while one runs out

    def __str__(self) -> str:
        if self.by == "matmul":
            return f"{self.over}, carried by the matmul"
        chunks = f"{self.chunks} chunks" if self.chunks > 1 else "plain"
        chunks += f", each {self.taper:g} of the last" if self.taper != 1.0 else ""
        chunks += f", {self.streams} streams" if self.streams > 1 else ""
        chunks += ", packed" if self.packed else ""
        return f"{self.over}, {chunks}" + (f", {self.blocks} blocks, {self.by}" if self.over == "peers" else "")


PLAIN = Strategy()
_chosen: dict[tuple[Any, ...], Strategy] = {}


def key_of(op: str, m: int, n: int, k: int, dtype: Any, group: dist.ProcessGroup | None) -> tuple[Any, ...]:
    """What a choice depends on: the op, the local matmul, and who takes part."""
    return (op, m, n, k, str(dtype), tuple(dist.get_process_group_ranks(group)), dist.get_backend(group))


def choose(key: tuple[Any, ...]) -> Strategy:
    """The way set for this key; plainly if none was."""
    return _chosen.get(key, PLAIN)


def set_strategy(key: tuple[Any, ...], strategy: Strategy) -> None:
    """Use `strategy` for this key from now on. All ranks must set the same."""
    _chosen[key] = strategy


def divides(rows: int, world: int, strategy: Strategy) -> bool:
    """Whether the rows can be split into as many chunks on every rank."""
    return rows % (world * strategy.chunks) == 0
