"""A fused kernel as a function on tensors: inputs are found or put where peers can read them, outputs come back as tensors.

Terms of a reduction must lie in peer memory. A `matmul` is made there; anything else is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime.fused import KernelLike, Row, bind
from weft.runtime.host_numbers import host_function
from weft.runtime.peers import PeerBuffer, Peers

ALIGNED = 64  # bytes: each value begins on a cache line of its own, as one allocated by itself does


@dataclass
class PeerTensor:
    """Peer memory for one value: where each rank's is, and the tensor of this rank in it."""

    buffer: PeerBuffer  # the ranks' memory is mapped while this is kept
    addresses: tuple[int, ...]
    own: Tensor


def _peer_tensor(buffer: PeerBuffer, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> PeerTensor:
    return PeerTensor(buffer, tuple(a + at for a in buffer.addresses), buffer.view(at, shape, dtype))


@dataclass(frozen=True)
class Use:
    """One slot of one part: which argument or result it is, how ranks hold it, where its rows start."""

    slot: str
    # terms, full, own, out, gathered; shared: replicated, and its next value is written to all ranks' copies; index: no memory,
    # the offset is the number of the row's first element
    role: str
    value: int  # index among the arguments, or among the results
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What a call needs to know, in plain data."""

    kernel: KernelLike
    parts: tuple[tuple[tuple[int, ...], tuple[Use, ...], int], ...]  # lengths of its rows, its slots, which scalars it uses
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # local shape and dtype
    scalars: tuple[tuple[tuple[str, int], ...], ...]  # name in the kernel, index among the arguments
    spans: tuple[int, ...]  # of each row, the longest any rank has
    numbers: tuple[tuple[int, int, torch.dtype], ...] = ()  # handed back: part, which of the kernel's numbers, dtype
    written: tuple[int, ...] = ()  # arguments that are overwritten
    given: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()  # of the arguments, local shape and dtype


class FusedCall:
    """A plan bound to peers. Called by all ranks of the group together, with tensors of the same local shapes each time."""

    def __init__(self, plan: Plan, peers: Peers) -> None:
        self.plan, self.peers = plan, peers
        self._buffers: dict[tuple[str, int], PeerTensor] = {}
        self._expand = host_function(plan.kernel.scalars)  # type: ignore[attr-defined]
        self._number_of = host_function(plan.kernel.numbers)
        self._used: dict[int, PeerTensor] = {}  # of arguments updated in peer memory, where in this call
        self._adopted: set[int] = set()  # arguments whose memory the caller has taken over
        self._bound: Any = None
        self._placed: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        tensors = [a.contiguous() if isinstance(a, Tensor) and a.ndim else a for a in args]
        results = [torch.empty(shape, dtype=dtype, device=self.peers.device) for shape, dtype in self.plan.results]
        places = {
            (use.role, use.value): self._place(use, tensors, results)
            for _, uses, _ in self.plan.parts
            for use in uses
            if use.role != "index"
        }
        self._bind(places, tensors, results)
        numbers = [x for names in self.plan.scalars for x in self._expand(**{name: float(args[k]) for name, k in names})]
        self._bound(numbers)
        for value in self.plan.written:
            if tensors[value] is not args[value] and value not in self._used:
                args[value].copy_(tensors[value])  # it did not lie in one piece, and a copy of it was overwritten
        for value, buffer in self._used.items():
            if buffer is self._buffers.get(("spare", value)):
                args[value].copy_(buffer.own)
        return (*(self._result(k, r) for k, r in enumerate(results)), *self._numbers(args))

    def _numbers(self, args: Sequence[Any]) -> list[Tensor]:
        """Scalars worked out from the totals."""
        found = []
        for part, which, dtype in self.plan.numbers:
            row = sum(len(lengths) for lengths, _, _ in self.plan.parts[:part])
            names = self.plan.scalars[self.plan.parts[part][2]]
            given = {name: float(args[k]) for name, k in names}
            number = self._number_of(**given, totals=self._bound.totals_of(row))[which]
            found.append(torch.tensor(number, device=self.peers.device).to(dtype))
        return found

    def _place(self, use: Use, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[int, ...]:
        """Addresses of a value: one, or one per rank."""
        if use.role in ("terms", "shared"):
            buffer = self._hold(use.role, use.value, args[use.value])
            if use.role == "shared":
                if use.value in self._adopted and args[use.value].data_ptr() != buffer.own.data_ptr():
                    buffer = self._hold("spare", use.value, args[use.value])  # a copy of the state: what was adopted stays as it is
                self._used[use.value] = buffer
            if args[use.value].data_ptr() != buffer.own.data_ptr():
                buffer.own.copy_(args[use.value])
            return buffer.addresses
        if use.role == "gathered":
            return self._hold("gathered", use.value, results[use.value]).addresses
        return ((results if use.role == "out" else args)[use.value].data_ptr(),)

    def _hold(self, role: str, value: int, like: Tensor) -> PeerTensor:
        if not self._buffers:
            self._share_all()
        if (role, value) not in self._buffers:
            buffer = self.peers.empty(like.numel() * like.element_size())
            self._buffers[role, value] = _peer_tensor(buffer, 0, tuple(like.shape), like.dtype)
        return self._buffers[role, value]

    def _share_all(self) -> None:
        """One piece of peer memory for all that peers read or write: to share a piece takes two meetings of all ranks."""
        uses = {(use.role, use.value) for _, uses, _ in self.plan.parts for use in uses if use.role in ("terms", "shared", "gathered")}
        at, places = 0, list[tuple[tuple[str, int], int, tuple[int, ...], torch.dtype]]()
        for role, value in sorted(uses):
            shape, dtype = (self.plan.results if role == "gathered" else self.plan.given)[value]
            places.append(((role, value), at, shape, dtype))
            at += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        buffer = self.peers.empty(at)
        for key, start, shape, dtype in places:
            self._buffers[key] = _peer_tensor(buffer, start, shape, dtype)

    def home(self, argument: int, given: Tensor) -> Tensor:
        """Where an argument that was updated lives from now on: in peer memory, so that it need not be brought there again."""
        buffer = self._used.get(argument)
        if buffer is None or buffer is self._buffers.get(("spare", argument)):
            return given
        self._adopted.add(argument)
        return buffer.own

    @torch.no_grad()
    def matmul(self, argument: int, a: Tensor, b: Tensor) -> Tensor:
        """A term that is a matmul of two matrices, made in peer memory, so that nobody need bring it there. The room is free: every
        call ends when all ranks have read it."""
        room = self._hold("terms", argument, torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="meta")).own
        return torch.mm(a, b, out=room.view(a.shape[0], b.shape[1]))

    def _bind(self, places: dict[tuple[str, int], tuple[int, ...]], args: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Bound once, by all ranks together; after that only this rank's table follows its tensors."""
        where = tuple(a for at in places.values() for a in at)
        if where == self._placed:
            return
        self._placed = where
        rows = self._rows(places, args, results)
        if self._bound is None:
            self._bound = bind(self.plan.kernel, rows, self.peers, self.plan.spans)
        else:
            self._bound.place(rows)

    def _rows(self, places: dict[tuple[str, int], tuple[int, ...]], args: Sequence[Any], results: Sequence[Tensor]) -> list[Row]:
        rows: list[Row] = []
        for lengths, uses, scalars in self.plan.parts:
            first = len(rows)
            for k, length in enumerate(lengths):
                at: dict[str, Any] = {use.slot: use.offsets[k] for use in uses if use.role == "index"}
                for use in (use for use in uses if use.role != "index"):
                    source = results if use.role in ("out", "gathered") else args
                    shift = use.offsets[k] * source[use.value].element_size()
                    where = [a + shift for a in places[use.role, use.value]]
                    at[use.slot] = where if use.role in ("terms", "gathered", "shared") else where[0]
                rows.append(Row(length, at, scalars, first))
        return rows

    def _result(self, k: int, made: Tensor) -> Tensor:
        buffer = self._buffers.get(("gathered", k))
        return made if buffer is None else made.copy_(buffer.own)
