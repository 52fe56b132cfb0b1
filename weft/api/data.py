"""Which samples of a data set are this rank's, batch by batch: the same order for every plan, and after every restart.

A step takes full batches, or on every rank its part of one. Where a shape is new, ranks ask each other which it is; those that bring parts say
at every call whether theirs is as before.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from weft import interp
from weft.api.documents import balanced
from weft.api.rank_sync import RankSync, one_process
from weft.core.errors import RuntimeFault
from weft.core.layout import Layout, Mesh, Placement, S
from weft.core.node import Type
from weft.frontend.capture.batches import named_batch

Shape = tuple[int, ...]


class Rows(Sampler[list[int]]):
    """The rows of every batch, from batch `start` on, epoch after epoch without end; for `DataLoader(..., batch_sampler=)`.

    Batch k of a run depends on the seed and k alone. What does not fill a batch at the end of an epoch is a smaller one, or left out with
    `drop_last`. `mine` gives this rank's rows of a batch of so many. Where the `work` of samples is given, those of a batch are in the order
    of `api.documents`.
    """

    def __init__(
        self, samples: int, batch: int, mine: Callable[[int], Tensor], *,
        shuffle: bool = True, seed: int = 0, start: int = 0, drop_last: bool = False, work: Tensor | None = None,
    ) -> None:  # fmt: skip
        if samples < (batch if drop_last else 1):
            needed = f"{batch} samples or more" if drop_last else "samples"
            raise RuntimeFault("the data set is smaller than a batch", needed=needed, found=str(samples), try_="a smaller batch")
        self.samples, self.batch, self.mine, self.drop_last = samples, batch, mine, drop_last
        self.shuffle, self.seed, self.start, self.work = shuffle, seed, start, work

    def __iter__(self) -> Iterator[list[int]]:
        per_epoch, k = self.samples // self.batch if self.drop_last else -(-self.samples // self.batch), self.start
        epoch, order = -1, torch.arange(self.samples)
        while True:
            if k // per_epoch != epoch:
                epoch = k // per_epoch
                order = self._order(epoch)
            at = k % per_epoch * self.batch
            rows = order[at : at + self.batch]
            rows = rows if self.work is None else rows[balanced(self.work[rows])]
            yield rows[self.mine(len(rows))].tolist()
            k += 1

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.samples)
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


def rows_of(type_: Type, coords: dict[str, int], size: int) -> torch.Tensor:
    """The rows of a batch of so many that a rank reads: all of one that leaves a rank none."""
    mesh = type_.layout.mesh
    layout = Layout.of(mesh, (size,), {a: p for a, p in type_.layout.placements.items() if isinstance(p, S) and p.dim == 0})
    few = any(layout.local_shape(mesh.coords(r)) == (0,) for r in range(mesh.ranks))
    return torch.arange(size) if few else interp.take_local(torch.arange(size), layout, coords)


def rows_of_rank(x: torch.Tensor, type_: Type, coords: dict[str, int]) -> torch.Tensor | None:
    """This rank's part of its own rows, which may be sharded along other dims too; None if it is not its rows."""
    local = type_.layout.local_shape(coords)
    if x.ndim == 0 or tuple(x.shape) != (local[0], *type_.shape[1:]):
        return None
    others = {a: p for a, p in type_.layout.placements.items() if isinstance(p, S) and p.dim}
    return interp.take_local(x, Layout.of(type_.layout.mesh, tuple(x.shape), others), coords)


def part_of_batch(x: torch.Tensor, type_: Type, coords: dict[str, int]) -> torch.Tensor | None:
    """This rank's part of a global batch, of its own rows of one, or what is its part already; None of anything else."""
    if tuple(x.shape) == type_.shape:
        return interp.take_local(x, type_.layout, coords)
    return x if tuple(x.shape) == type_.layout.local_shape(coords) else rows_of_rank(x, type_, coords)


# -- full batches and parts of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """What a full batch measures, and how what comes of it in parts is sharded."""

    full: dict[str, Shape]
    parts: dict[str, dict[str, Placement]] = field(default_factory=dict)

    @staticmethod
    def of(batch: Any) -> Shapes:
        return Shapes({n: tuple(x.shape) for n, x in named_batch(batch).items()})


class Brought:
    """How a step's calls bring the tensors of their batches, full or in parts, and what full ones measure."""

    def __init__(self, rank_sync: RankSync) -> None:
        self.rank_sync = rank_sync
        self.parts: set[str] = set()  # what comes in parts; the example came in full

    def fits(self, batch: Mapping[str, Tensor], types: Mapping[str, Type], coords: dict[str, int]) -> bool:
        """Whether a program of these types takes this batch, brought as those before. Where a rank has none of it, another's part is the full tensor:
        then all are asked."""
        known = [(n, x, types[n]) for n, x in batch.items() if n in types]
        if any(_leaves_none(t) for _, _, t in known):
            return False
        return all(_is_part(x, t, coords) if n in self.parts else tuple(x.shape) == t.shape for n, x, t in known)

    def all_fit(self, batch: Mapping[str, Tensor], types: Mapping[str, Type], coords: dict[str, int]) -> bool:
        """The same of every rank's batch. A part alone does not tell: four rows are half of eight, and of seven on the first of two ranks."""
        fits = self.fits(batch, types, coords)
        return self.rank_sync.all_say(fits, "the size of a batch") if self.parts else fits

    def full(self, batch: Mapping[str, Tensor], known: Sequence[Mapping[str, Type]], types: Mapping[str, Type], coords: dict[str, int]) -> dict[str, Shape]:
        """What the full batch measures: what the first of the known programs that takes every rank's batch is for, or what all ranks say."""
        fit = [i for i, its in enumerate(known) if self.fits(batch, its, coords)]
        if self.parts:
            fit = sorted(set(fit).intersection(*self.rank_sync.answers(fit, "the size of a batch")))
        if fit:
            return self.shapes(batch, known[fit[0]])
        return self.agreed(batch, types, {n for n, x in batch.items() if any(n in t and tuple(x.shape) == t[n].shape for t in known)})

    def shapes(self, batch: Mapping[str, Tensor], types: Mapping[str, Type]) -> dict[str, Shape]:
        """Of a batch that fits these types, the shapes of the full tensor."""
        own = {n: tuple(x.shape) for n, x in batch.items()}
        rows = {own[n][0]: types[n].shape[0] for n in own if n in types and n in self.parts}
        return {n: types[n].shape if n in types else (rows.get(s[0], s[0]), *s[1:]) if n in self.parts else s for n, s in own.items()}

    def agreed(self, batch: Mapping[str, Tensor], types: Mapping[str, Type], known: set[str]) -> dict[str, Shape]:
        """The same where the shape is new: all ranks say what they have. A tensor that is the same on all is a full one, unless it came in parts so far
        and is not among those `known` to have measured so when they were full, nor all others the same; any other is in parts."""
        own = {n: tuple(x.shape) for n, x in batch.items()}
        if one_process():
            return own
        answers = self.rank_sync.answers([[n, list(s), _digest(batch[n])] for n, s in own.items()], "the shapes of a batch")
        theirs = [{n: (tuple(shape), digest) for n, shape, digest in of_rank} for of_rank in answers]
        odd = [t for t in theirs if t.keys() != own.keys()]
        if odd:
            raise RuntimeFault("ranks were given other batches", needed=", ".join(own), found=", ".join(odd[0]))
        equal_names = {n for n in own if all(t[n] == theirs[0][n] for t in theirs)}
        self.parts = {n for n in own if n not in equal_names or (n in self.parts and n not in known and len(equal_names) < len(own))}
        shapes = [{n: t[n][0] for n in own} for t in theirs]
        return {n: _joined(n, [s[n] for s in shapes], self._axes(n, shapes, types), types) if n in self.parts else s for n, s in own.items()}

    def rows_sharded(self, types: Mapping[str, Type]) -> dict[str, dict[str, Placement]]:
        """How a program shards what comes in parts."""
        return {n: {a: S(0) for a in shard_rows(n, types[n])} for n in self.parts if n in types}

    def _axes(self, name: str, shapes: list[dict[str, Shape]], types: Mapping[str, Type]) -> tuple[str, ...]:
        """The axes that shard the rows of a tensor; of one that no program read yet, those that shard another of as many rows."""
        if name in types:
            return shard_rows(name, types[name])
        rows = [s[name][:1] for s in shapes]
        equal_names = (n for n in self.parts if n in types and [s[n][:1] for s in shapes] == rows)
        return next((shard_rows(n, types[n]) for n in equal_names), ())


@functools.cache
def _leaves_none(type_: Type) -> bool:
    """Whether some rank has no row of it."""
    mesh = type_.layout.mesh
    return bool(type_.shape and type_.shape[0]) and any(type_.layout.local_shape(mesh.coords(r))[0] == 0 for r in range(mesh.ranks))


def _is_part(x: Tensor, type_: Type, coords: dict[str, int]) -> bool:
    return tuple(x.shape) == type_.layout.local_shape(coords) or rows_of_rank(x, type_, coords) is not None


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _joined(name: str, parts: list[Shape], axes: tuple[str, ...], types: Mapping[str, Type]) -> Shape:
    """The shape of the tensor whose parts the ranks have."""
    mesh, key = next(iter(types.values())).layout.mesh, name.removeprefix("batch.")
    if not axes:
        raise RuntimeFault(
            f"ranks were given different batches: {key!r}",
            needed=f"the same on every rank: the plan does not shard it along {', '.join(mesh.axes)}",
            found=" and ".join(dict.fromkeys(str(list(p)) for p in parts)) + ", of other values",
            try_="load the data in the same order on every rank",
        )
    full = (_rows(parts, axes, mesh), *parts[0][1:])
    layout = Layout.of(mesh, full, {a: S(0) for a in axes})
    needed = [layout.local_shape(mesh.coords(r)) for r in range(mesh.ranks)]
    if needed != parts:
        raise RuntimeFault(
            f"batch {key!r} is sharded otherwise than the plan shards it",
            needed=f"{', '.join(str(list(s)) for s in needed)} on the ranks, of {list(full)}",
            found=", ".join(str(list(p)) for p in parts),
            try_="give every rank the full batch, or step.rows, which says which rows are a rank's",
        )
    return full


def _rows(shapes: list[Shape], axes: tuple[str, ...], mesh: Mesh) -> int:
    own = {tuple(mesh.coords(r)[a] for a in axes): shape[0] for r, shape in enumerate(shapes)}
    return sum(own.values())


def shard_rows(name: str, type_: Type) -> tuple[str, ...]:
    shards: dict[str, Any] = {a: p for a, p in type_.layout.placements.items() if isinstance(p, S)}
    if any(p.dim or p.within is not None for p in shards.values()):
        raise RuntimeFault(
            f"batch {name.removeprefix('batch.')!r} has another shape than before",
            needed="full batches, or parts that are rows",
            found=f"parts sharded as {type_.layout}",
            try_="give every rank the full batch",
        )
    return tuple(shards)
