"""Fused Triton kernels bound to tensors: on GPUs, and on CPU tensors under the Triton interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime import faults, modules
from weft.runtime.fused import HEAD, KernelLike, Row, columns_of, flatten_rows
from weft.runtime.peers import Peers


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched. `inside`: ranks meet within the kernel, so all its blocks must be resident at once."""

    block: int = 4096
    chunk: int = 16384
    warps: int = 16
    blocks: int = 32
    inside: bool = True


def choose_launch(lengths: Sequence[int], phases: int, peers: Peers) -> Launch:
    """What was fastest on an H200 that four ranks shared: small work, and work with totals of some size, meets inside one launch of
    long-lived blocks; large work runs as many small blocks as it likes between two meetings."""
    resident = peers.resident_blocks() if hasattr(peers, "resident_blocks") else 8
    full, few = sum(lengths), len(lengths) <= 16
    if phases == 1 and full > 1 << 19:
        return Launch(1024, 1024, 4, 1 << 20, False)
    if phases > 1 and not few:
        return Launch(2048, 4096, 4, 1 << 20, False)
    if full > 1 << 23:
        return Launch(4096, 16384, 8, 1 << 20, False)
    block = 2048 if full <= 1 << 18 else 8192
    chunk = max(block, min(4 * block, -(-full // resident // block) * block))
    return Launch(block, chunk, min(32, block // 128), resident, True)


class DeviceKernel:
    """A compiled Triton kernel and the rows it works on. Made and called by all ranks together."""

    def __init__(
        self,
        kernel: KernelLike,
        rows: Sequence[Row],
        peers: Peers,
        launch: Launch | None = None,
        spans: Sequence[int] | None = None,
        name: str = "",
    ) -> None:
        self.peers, self.name = peers, name or kernel.name
        self.launch = launch or Launch()
        self._module = modules.load(kernel.source)
        self._kernel = kernel
        table, self._made = flatten_rows(kernel, rows, peers.rank, peers.device)
        self._table = torch.tensor(table, dtype=torch.int64, device=peers.device)
        self._columns, self._places = columns_of(kernel), dict[str, int]()
        firsts = [k if row.first is None else row.first for k, row in enumerate(rows)]
        work = _work(spans or [row.length for row in rows], firsts, self.launch.chunk)
        self.pieces, self._pieces = len(work), work
        self._work = torch.tensor(work, dtype=torch.int64, device=peers.device)
        groups = 1 + max((row.scalars for row in rows), default=0)
        real = torch.float64 if any(slot.nbytes == 8 for slot in kernel.slots) else torch.float32
        self.scalars = torch.zeros(max(1, groups * kernel.scalar_count), dtype=real, device=peers.device)
        self._sums, self._sums_keep = _peer_table(peers, max(1, self.pieces * kernel.totals) * real.itemsize)
        blocks = min(self.launch.blocks, self.pieces) if self.launch.inside else 1
        self._pads, self._pads_keep = _peer_table(peers, 4 * blocks * (peers.world + 1))
        self._blocks = min(self.launch.blocks, self.pieces)
        self._phases = [getattr(self._module, f"phase{p}") for p in range(kernel.phases)]
        numbered = {columns_of(kernel)[slot.name] for slot in kernel.slots if slot.index}
        aligned = all(a % 16 == 0 for row in table for c, a in enumerate(row) if c >= HEAD and c not in numbered)
        self._meta = {"RANK": peers.rank, "WORLD": peers.world, "LANES": _power_of_two(peers.world)}
        self._tiles = {"CHUNK": self.launch.chunk, "BLOCK": self.launch.block, "ALIGN": 16 if aligned else 4}
        self._limit = int(faults.timeout_s() * 1e6)
        self._crowded = getattr(peers, "sharing", 1) > 1  # many blocks that wait leave no room for what a rank does before it comes

    def __call__(self, scalars: Sequence[float] | None = None) -> None:
        """Run the kernel on the current stream; `scalars` are those of all groups, one group after the other."""
        if scalars is not None:
            numbers = torch.tensor(scalars, dtype=self.scalars.dtype)  # not pinned, so it is read before the copy returns
            self.scalars[: len(scalars)].copy_(numbers, non_blocking=True)
        self.launch_phases()

    def launch_phases(self, *, leave: bool = True) -> None:
        """The launches alone, with the scalars of the last call: what a graph records. Without `leave`, peers may still
        be reading when this returns."""
        inside = self.launch.inside
        for number, phase in enumerate(self._phases):
            separate = not inside or number == 0 and self._crowded
            if separate:
                self.meet()
            last = number == len(self._phases) - 1
            phase[(self._blocks,)](
                self._table, self._work, self.pieces, self.scalars, self._sums, self._pads, self._limit,
                **self._meta, **self._tiles, ENTER=not separate, LEAVE=inside and last, num_warps=self.launch.warps,
            )  # fmt: skip
        if not inside and leave:
            self.meet()

    def totals_of(self, row: int) -> list[float]:
        """The totals a row has seen in the last call; waits for it."""
        self.peers.barrier("totals")
        real = self.scalars.dtype
        parts = torch.stack([part.view(real)[: self.pieces * len(self._kernel.total_kinds)] for part in self._sums_keep.parts])
        mine = next(piece for piece in self._pieces if piece[0] == row)
        found = []
        for k, (op, over_rows) in enumerate(self._kernel.total_kinds):
            first, count = (0, self.pieces) if over_rows else (mine[2], mine[3])
            values = parts[:, k * self.pieces + first : k * self.pieces + first + count]
            found.append(float({"sum": values.sum, "max": values.max, "min": values.min}[op]()))
        return found

    def meet(self) -> None:
        """Only meet: all ranks' work on this line so far is seen by all."""
        if self.peers.world > 1:
            self._module.meet_alone[(1,)](self._pads, self._limit, **self._meta, num_warps=1)

    def place(self, rows: Sequence[Row]) -> None:
        """Let all rows be somewhere else; lengths and scalars stay."""
        table, _ = flatten_rows(self._kernel, rows, self.peers.rank, self.peers.device, self._made)
        self._table.copy_(torch.tensor(table, dtype=torch.int64), non_blocking=True)
        self._places.clear()

    def move(self, slot: str, address: int) -> None:
        """Let a slot of the only row be somewhere else from the next call on."""
        column = self._columns[slot]
        if self._places.get(slot) != address:
            self._places[slot] = address
            self._table[0, column].fill_(address)  # a kernel, so that a graph can record it

    def check(self) -> None:
        """Fail if in some call a rank never came."""
        words, width = self._pads_keep.parts[self.peers.rank].view(torch.int32), self.peers.world + 1
        counts = words[: len(words) // width * width].view(-1, width)
        if bool((counts[:, -1] < 0).any()):
            newest = counts[:, : self.peers.world].max()
            late = (counts[:, : self.peers.world] < newest).any(dim=0).nonzero().flatten().tolist()
            raise faults.late(late, self.name)


def _work(lengths: Sequence[int], firsts: Sequence[int], chunk: int) -> list[list[int]]:
    """Pieces of at most `chunk` elements: row, first element, first piece of the tensor, pieces of the tensor."""
    pieces = [max(1, -(-length // chunk)) for length in lengths]
    begins = [sum(pieces[:k]) for k in range(len(pieces))]
    tensors: dict[int, int] = {}
    for k, first in enumerate(firsts):
        tensors[first] = tensors.get(first, 0) + pieces[k]
    return [[k, j * chunk, begins[firsts[k]], tensors[firsts[k]]] for k in range(len(lengths)) for j in range(pieces[k])]


def _peer_table(peers: Peers, nbytes: int) -> tuple[Tensor, Any]:
    """A zeroed buffer on every rank and the table of their addresses."""
    buffer = peers.empty(nbytes)
    buffer.parts[peers.rank].zero_()
    peers.barrier("zero pads")
    return torch.tensor(buffer.addresses, dtype=torch.int64, device=peers.device), buffer


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
