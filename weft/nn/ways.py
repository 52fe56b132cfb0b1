"""How a product and its collective are run: plainly, one after the other, or in chunks at once; over the process group or
over peer memory. Which way is used is a choice per shape, made by measuring (`weft.tune`) or by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Way:
    """`over` is "group" (torch.distributed) or "peers" (memory all ranks can reach).

    One chunk means no overlap, but for a gather over peers: there a rank's own product runs beside the moving always, and
    chunks are the products in which it takes the others' rows.
    """

    over: str = "group"
    chunks: int = 1
    blocks: int = 16  # of a device kernel that moves data beside the product
    by: str = "copy"  # what moves it: the driver's "copy", a "kernel" for each piece, or one "mover" for all
    taper: float = 1.0  # rows of a chunk for each row of the one before, where results are summed over a group

    def __str__(self) -> str:
        chunks = f"{self.chunks} chunks" if self.chunks > 1 else "plain"
        chunks += f", each {self.taper:g} of the last" if self.taper != 1.0 else ""
        return f"{self.over}, {chunks}" + (f", {self.blocks} blocks, {self.by}" if self.over == "peers" else "")


PLAIN = Way()
_chosen: dict[tuple[Any, ...], Way] = {}


def key_of(op: str, m: int, n: int, k: int, dtype: Any, group: dist.ProcessGroup | None) -> tuple[Any, ...]:
    """What a choice depends on: the op, the local product, and who takes part."""
    return (op, m, n, k, str(dtype), tuple(dist.get_process_group_ranks(group)), dist.get_backend(group))


def choose(key: tuple[Any, ...]) -> Way:
    """The way set for this key; plainly if none was."""
    return _chosen.get(key, PLAIN)


def set_way(key: tuple[Any, ...], way: Way) -> None:
    """Use `way` for this key from now on. All ranks must set the same."""
    _chosen[key] = way


def divides(rows: int, world: int, way: Way) -> bool:
    """Whether the rows can be cut into as many chunks on every rank."""
    return rows % (world * way.chunks) == 0
