"""Collectives between ranks that can map each other's device memory: every one is a few launches on the current stream.

A rank copies its operand where the others can read it, all meet inside a kernel, each takes what it needs, all meet again: so
a recording of them can be replayed, alone or between others. They are torch ops, so a traced graph has each as one node. All
ranks call the same ones in the same order, on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime import faults
from weft.runtime.fused import KernelLike, Row, bind
from weft.runtime.launched import _peer_table, _power_of_two
from weft.runtime.library import define
from weft.runtime.near import Near, _fold
from weft.runtime.peers import PeerBuffer

ONE_SHOT = 1 << 18  # bytes up to which each rank sums everything itself rather than its share for all
Kernels = Callable[[str, torch.dtype, bool], KernelLike | None]  # of a reduction: its op, dtype, and whether all ranks get it


class DeviceNear(Near):
    """`kernels` gives the kernel of a reduction, or None where there is none for the dtype."""

    def __init__(self, group: Any, peers: Any, kernels: Kernels) -> None:
        super().__init__(group, peers)
        self._kernels = kernels
        self._bound: dict[Any, tuple[Any, Tensor]] = {}
        self._kept: list[PeerBuffer] = []  # what recordings may still use
        self._pads, self._pads_keep = _peer_table(peers, 4 * (peers.world + 1))
        self.number = len(_nears)
        _nears.append(self)

    # -- as generated code calls them ----------------------------------------------------------------------------------------

    def all_reduce_list(self, xs: Sequence[Tensor], op: str, own: Sequence[bool]) -> list[Tensor]:
        flat = _ops.near_reduce(list(xs), op, self.number)
        return [y.view(x.shape) for x, y in zip(xs, flat.split([x.numel() for x in xs]), strict=True)]

    def all_gather(self, mine: Tensor) -> Tensor:
        return _ops.near_gather(mine, self.number, self.world)  # type: ignore[no-any-return]

    def reduce_scatter(self, parts: Tensor, op: str = "sum") -> Tensor:
        return _ops.near_scatter(parts, op, self.number)  # type: ignore[no-any-return]

    def all_to_all(self, parts: Tensor) -> Tensor:
        return _ops.near_swap(parts, self.number)  # type: ignore[no-any-return]

    # -- what they do --------------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """All ranks' work on this stream so far is seen by all."""
        from weft.runtime.device_sync import meet_alone

        meta = {"RANK": self.rank, "WORLD": self.world, "LANES": _power_of_two(self.world)}
        meet_alone[(1,)](self._pads, int(faults.timeout_s() * 1e6), **meta, num_warps=1)

    def _put(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's operand, its parts laid end to end; the others' are there after a meeting."""
        count, dtype = sum(p.numel() for p in parts), parts[0].dtype
        place = self._at_least(count * dtype.itemsize)
        views = [place.view(0, (count,), dtype, r) for r in range(self.world)]
        mine = [v.view(p.shape) for p, v in zip(parts, views[self.rank].split([p.numel() for p in parts]), strict=True)]
        torch._foreach_copy_(mine, list(parts))
        return views

    def _at_least(self, nbytes: int) -> PeerBuffer:
        if self._places[0] is None or self._sizes[0] < nbytes:
            self._sizes[0] = max(nbytes, 2 * self._sizes[0], 1 << 16)
            self._places[0] = self.peers.empty(self._sizes[0])
            self._kept.append(self._places[0])
        return self._places[0]

    def reduced(self, xs: Sequence[Tensor], op: str) -> Tensor:
        """The operands laid end to end and reduced over the ranks."""
        terms = self._put(xs)
        spread = terms[0].numel() * terms[0].element_size() > ONE_SHOT
        out = self._by_kernel(terms, op, spread)
        return self._by_torch(terms, op) if out is None else out

    def gathered(self, mine: Tensor) -> Tensor:
        pieces = self._put([mine])
        self.meet()
        out = torch.cat(pieces).view(self.world, *mine.shape)
        self.meet()
        return out

    def scattered(self, parts: Tensor, op: str) -> Tensor:
        own = [t.view(parts.shape)[self.rank] for t in self._put([parts])]
        out = self._by_kernel(own, op, False)
        return (self._by_torch(own, op) if out is None else out).view(parts.shape[1:])

    def swapped(self, parts: Tensor) -> Tensor:
        own = [t.view(parts.shape)[self.rank] for t in self._put([parts])]
        self.meet()
        out = torch.stack(own)
        self.meet()
        return out

    def _by_torch(self, terms: Sequence[Tensor], op: str) -> Tensor:
        self.meet()
        out = _fold(terms, op, torch.empty_like(terms[0], memory_format=torch.contiguous_format)).view(-1)
        self.meet()
        return out

    def _by_kernel(self, terms: Sequence[Tensor], op: str, spread: bool) -> Tensor | None:
        """By one kernel that meets, reduces and meets; with `spread`, each rank reduces its share and writes it to all."""
        kernel = self._kernels(op, terms[0].dtype, spread) if terms[0].numel() else None
        if kernel is None:
            return None
        key = (op, terms[0].dtype, spread, tuple(t.data_ptr() for t in terms), terms[0].numel())
        if key not in self._bound:
            self._bound[key] = self._bind(kernel, terms, spread)
        run, out = self._bound[key]
        run.launch_phases()
        return out.clone()

    def _bind(self, kernel: KernelLike, terms: Sequence[Tensor], spread: bool) -> tuple[Any, Tensor]:
        count, dtype = terms[0].numel(), terms[0].dtype
        if not spread:
            out = torch.empty(count, dtype=dtype, device=self.peers.device)
            return bind(kernel, [Row(count, {"terms": [t.data_ptr() for t in terms], "out": out.data_ptr()})], self.peers), out
        buffer = self.peers.empty(count * dtype.itemsize)
        self._kept.append(buffer)
        share = -(-count // self.world // 16) * 16  # begins stay aligned
        lo, hi = min(self.rank * share, count), min((self.rank + 1) * share, count)
        shift = lo * dtype.itemsize
        at = {"terms": [t.data_ptr() + shift for t in terms], "out": [a + shift for a in buffer.addresses]}
        return bind(kernel, [Row(hi - lo, at)], self.peers, [share]), buffer.view(0, (count,), dtype)


_nears: list[DeviceNear] = []
_ops: Any = torch.ops.weft

define(
    "near_reduce(Tensor[] xs, str op, int near) -> Tensor",
    lambda xs, op, near: _nears[near].reduced(xs, op),
    lambda xs, op, near: xs[0].new_empty(sum(x.numel() for x in xs)),
)
define(
    "near_gather(Tensor mine, int near, int world) -> Tensor",
    lambda mine, near, world: _nears[near].gathered(mine),
    lambda mine, near, world: mine.new_empty((world, *mine.shape)),
)
define(
    "near_scatter(Tensor parts, str op, int near) -> Tensor",
    lambda parts, op, near: _nears[near].scattered(parts, op),
    lambda parts, op, near: parts.new_empty(parts.shape[1:]),
)
define(
    "near_swap(Tensor parts, int near) -> Tensor",
    lambda parts, near: _nears[near].swapped(parts),
    lambda parts, near: parts.new_empty(parts.shape),
)
