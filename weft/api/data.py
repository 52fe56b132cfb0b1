"""Which samples of a data set are this rank's, batch by batch: the same order for every plan, and after every restart."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from weft import interp
from weft.core.errors import RuntimeFault
from weft.core.layout import Layout, S
from weft.core.node import Type


class Rows(Sampler[list[int]]):
    """The rows of every batch, from batch `start` on, epoch after epoch without end; for `DataLoader(..., batch_sampler=)`.

    Batch k of a run depends on the seed and k alone. What does not fill a batch at the end of an epoch is left out.
    """

    def __init__(self, samples: int, batch: int, mine: torch.Tensor, *, shuffle: bool = True, seed: int = 0, start: int = 0) -> None:
        if samples < batch:
            raise RuntimeFault(
                "the data set is smaller than a batch", needed=f"{batch} samples or more", found=str(samples), try_="a smaller batch"
            )
        self.samples, self.batch, self.mine = samples, batch, mine
        self.shuffle, self.seed, self.start = shuffle, seed, start

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch, k = self.samples // self.batch, self.start
        epoch, order = -1, torch.arange(self.samples)
        while True:
            if k // per_epoch != epoch:
                epoch = k // per_epoch
                order = self._order(epoch)
            at = k % per_epoch * self.batch
            yield order[at : at + self.batch][self.mine].tolist()
            k += 1

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


def rows_of(type_: Type, coords: dict[str, int]) -> torch.Tensor:
    """The rows of a batch that a rank reads."""
    size = type_.shape[0]
    along = {a: p for a, p in type_.layout.placements.items() if isinstance(p, S) and p.dim == 0}
    return interp.take_local(torch.arange(size), Layout.of(type_.layout.mesh, (size,), along), coords)


def beside_rows(x: torch.Tensor, type_: Type, coords: dict[str, int]) -> torch.Tensor | None:
    """This rank's part of its own rows, which may be cut along other dims too; None if it is not its rows."""
    local = type_.layout.local_shape(coords)
    if x.ndim == 0 or tuple(x.shape) != (local[0], *type_.shape[1:]):
        return None
    others = {a: p for a, p in type_.layout.placements.items() if isinstance(p, S) and p.dim}
    return interp.take_local(x, Layout.of(type_.layout.mesh, tuple(x.shape), others), coords)
