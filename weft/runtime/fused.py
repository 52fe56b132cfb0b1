"""Fused kernels bound to tensors: a table of rows, a list of scalars, one call.

A row is one tensor's slice: its length, which scalars it uses, and the address of every slot (of every rank's copy,
for spread slots). The table is built once; a call changes only the scalars.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.core import native
from weft.core.errors import KernelError
from weft.runtime.peers import HEADER, HostPeers

HEAD = 3  # columns of a row before its addresses
CACHE_BYTES = 16 << 20  # beyond this much per call, what is written for others goes past the caches


class SlotLike(Protocol):
    name: str
    spread: bool
    inside: str
    nbytes: int


class KernelLike(Protocol):
    """What codegen's Kernel offers."""

    name: str
    world: int
    source: str
    slots: tuple[Any, ...]
    scalar_count: int
    totals: int
    total_kinds: tuple[tuple[str, bool], ...]
    numbers: str
    phases: int
    bytes_per_element: int


@dataclass(frozen=True)
class Row:
    """One tensor of the list: this rank's part of it, as addresses by slot name."""

    length: int
    at: dict[str, int | Sequence[int]]
    scalars: int = 0
    first: int | None = None  # the first row of the same tensor, where a tensor has several


def flatten_rows(
    kernel: KernelLike, rows: Sequence[Row], rank: int, device: torch.device, made: Sequence[Tensor] | None = None
) -> tuple[list[list[int]], list[Tensor]]:
    """Rows as the kernel's table has them, and the memory for slots no row names: that of an earlier call, or new."""
    own = list(made) if made is not None else [_fresh(slot, row, device) for row in rows for slot in _unnamed(kernel, row)]
    left = iter(own)
    table = []
    for k, row in enumerate(rows):
        flat = [row.length, row.scalars, k if row.first is None else row.first]
        for slot in kernel.slots:
            unnamed = slot.name not in row.at and slot.name.startswith("stash") and not slot.inside
            flat += [next(left).data_ptr()] if unnamed else _addresses(kernel, slot, row, rank)
        table.append(flat)
    return table, own


def _unnamed(kernel: KernelLike, row: Row) -> list[SlotLike]:
    return [s for s in kernel.slots if s.name not in row.at and s.name.startswith("stash") and not s.inside]


def _fresh(slot: SlotLike, row: Row, device: torch.device) -> Tensor:
    return torch.empty(max(1, row.length * slot.nbytes), dtype=torch.uint8, device=device)


def columns_of(kernel: KernelLike) -> dict[str, int]:
    """The first column of each slot in a row of the table."""
    columns, at = {}, HEAD
    for slot in kernel.slots:
        columns[slot.name] = at
        at += kernel.world if slot.spread else 1
    return columns


def _addresses(kernel: KernelLike, slot: SlotLike, row: Row, rank: int) -> list[int]:
    if slot.inside:
        return [row.at[slot.inside][rank]]  # type: ignore[index]
    found = row.at.get(slot.name)
    given = list(found) if isinstance(found, Sequence) else [] if found is None else [found]
    if len(given) != (kernel.world if slot.spread else 1):
        raise KernelError(
            f"cannot bind {slot.name} of kernel {kernel.name}",
            needed=f"{kernel.world} addresses, one per rank" if slot.spread else "one address",
            found=f"{len(given)}",
        )
    return given


class HostKernel:
    """A compiled CPU kernel and the rows it works on. Made and called by all ranks together."""

    def __init__(self, kernel: KernelLike, rows: Sequence[Row], peers: HostPeers, name: str = "") -> None:
        self.peers, self.name = peers, name or kernel.name
        self._kernel = kernel
        table, self._made = flatten_rows(kernel, rows, peers.rank, peers.device)
        width = len(table[0]) if table else 0
        self._table = (ctypes.c_int64 * (width * len(table)))(*(x for row in table for x in row))
        self._columns = columns_of(kernel)
        groups = 1 + max((row.scalars for row in rows), default=0)
        self.scalars = (ctypes.c_double * max(1, groups * kernel.scalar_count))()
        sums = peers.empty(8 * max(1, kernel.totals * len(rows))) if kernel.totals else None
        self._sums = (ctypes.c_void_p * peers.world)(*(sums.addresses if sums else ()))
        self._keep = sums
        self.totals = (ctypes.c_double * max(1, kernel.totals * len(rows)))()
        touched = kernel.bytes_per_element * sum(row.length for row in rows)
        self._run = native.load(kernel.source, header=HEADER).run
        pointers = (self._table, len(rows), self.scalars, self._sums, self.totals)
        self._args = (
            ctypes.byref(peers.state), ctypes.c_uint32(peers.op(self.name)), pointers[0], ctypes.c_int64(pointers[1]),
            *pointers[2:], ctypes.c_int32(touched > CACHE_BYTES),
        )  # fmt: skip

    def move(self, slot: str, address: int) -> None:
        """Let a slot of the only row be somewhere else from the next call on."""
        self._table[self._columns[slot]] = address

    def place(self, rows: Sequence[Row]) -> None:
        """Let all rows be somewhere else; lengths and scalars stay."""
        table, _ = flatten_rows(self._kernel, rows, self.peers.rank, self.peers.device, self._made)
        self._table[:] = [x for row in table for x in row]

    def totals_of(self, row: int) -> list[float]:
        """The totals a row has seen in the last call."""
        count = len(self._kernel.total_kinds)
        return self.totals[row * count : (row + 1) * count]

    def meet(self) -> None:
        """Only meet: all ranks' writes so far are seen by all."""
        self.peers.barrier(self.name)

    def launch_phases(self, *, leave: bool = True) -> None:
        """Run with the scalars of the last call."""
        self()

    def __call__(self, scalars: Sequence[float] | None = None) -> None:
        """Run the kernel; `scalars` are those of all groups, one group after the other."""
        if scalars is not None:
            self.scalars[: len(scalars)] = scalars
        outcome = self._run(*self._args)
        if outcome:
            self.peers.check(outcome)


def bind(
    kernel: KernelLike, rows: Sequence[Row], peers: Any, spans: Sequence[int] | None = None, *, name: str = "", blocks: int = 0
) -> Any:
    """The kernel on these rows; call it with its scalars.

    `spans` are the longest lengths any rank has for each row; `name` is what to call it when a rank is missing; `blocks`
    bounds the device blocks it runs on.
    """
    if peers.target == "cpu":
        return HostKernel(kernel, rows, peers, name or kernel.name)
    from weft.runtime.launched import DeviceKernel, Launch, choose_launch

    lengths = list(spans or [row.length for row in rows])
    launch = choose_launch(lengths, kernel.phases, peers) if not blocks else Launch(4096, 4096, 16, blocks, False)
    return DeviceKernel(kernel, rows, peers, launch, lengths, name or kernel.name)
