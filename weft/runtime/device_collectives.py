"""Collectives between ranks that can map each other's device memory: every one is a few launches on the current stream.

A rank copies its operand where the others can read it, all meet inside a kernel, each takes what it needs, all meet again: so
a recording of them can be replayed, alone or between others. Slices of parameters are laid out once for a full step (`runtime.gather_once`):
whoever needs one then takes it without a meeting. They are torch ops, so a traced graph has each as one node. All ranks call the same ones in
the same order, on one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime import faults
from weft.runtime.custom_ops import define
from weft.runtime.fused import KernelLike, Row, bind
from weft.runtime.intra_host import HostGroup, _fold
from weft.runtime.launched import _peer_table, _power_of_two
from weft.runtime.peers import PeerBuffer

ONE_SHOT = 1 << 18  # bytes up to which each rank sums everything itself rather than its share for all
Kernels = Callable[[str, torch.dtype, bool], KernelLike | None]  # of a reduction: its op, dtype, and whether all ranks get it


class DeviceCollectives(HostGroup):
    """`kernels` gives the kernel of a reduction, or None where there is none for the dtype."""

    takes_apart = True  # they are laid out together already
    message = 64 << 20  # every one has two meetings, for which all ranks wait

    def __init__(self, group: Any, peers: Any, kernels: Kernels) -> None:
        super().__init__(group, peers)
        self._kernels = kernels
        self._bound: dict[Any, tuple[Any, Tensor]] = {}
        self._kept: list[PeerBuffer] = []  # what recordings may still use
        self._operands: dict[int, PeerBuffer] = {}  # by size
        self._pads, self._pads_keep = _peer_table(peers, 4 * (peers.world + 1))
        self.number = len(_intra_hosts)
        _intra_hosts.append(self)

    # -- as generated code calls them ----------------------------------------------------------------------------------------

    def all_reduce_list(self, xs: Sequence[Tensor], op: str, own: Sequence[bool]) -> list[Tensor]:
        flat = _ops.intra_host_reduce(list(xs), op, self.number)
        return [y.view(x.shape) for x, y in zip(xs, flat.split([x.numel() for x in xs]), strict=True)]

    def all_gather(self, mine: Tensor) -> Tensor:
        return _ops.intra_host_gather(mine, self.number, self.world)  # type: ignore[no-any-return]

    def reduce_scatter(self, parts: Tensor, op: str = "sum") -> Tensor:
        return self.reduce_scatter_list([parts], op).view(parts.shape[1:])

    def reduce_scatter_list(self, parts: Sequence[Tensor], op: str = "sum") -> Tensor:
        return _ops.intra_host_scatter(list(parts), op, self.number)  # type: ignore[no-any-return]

    def all_to_all(self, parts: Tensor) -> Tensor:
        return _ops.intra_host_swap(parts, self.number)  # type: ignore[no-any-return]

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
        out = self._by_kernel([terms], op, spread)
        return self._by_torch([terms], op) if out is None else out

    def gathered(self, mine: Tensor) -> Tensor:
        pieces = self._put([mine])
        self.meet()
        out = torch.cat(pieces).view(self.world, *mine.shape)
        self.meet()
        return out

    def place_operands(self, xs: Sequence[Tensor], places: Sequence[int], size: int) -> None:
        """Operands put where the others can read them until they are put there again, each from its place on, in bytes."""
        if size not in self._operands:
            self._operands[size] = self.peers.empty(size)
        buffer = self._operands[size]
        self.meet()  # nobody reads what was there before any more
        torch._foreach_copy_([buffer.view(at, tuple(x.shape), x.dtype) for x, at in zip(xs, places, strict=True)], list(xs))
        self.meet()

    def taken(self, size: int, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What every rank has laid out at a place, along a new first dim."""
        return torch.stack([self._operands[size].view(at, tuple(shape), dtype, r) for r in range(self.world)])

    def scattered(self, parts: Sequence[Tensor], op: str) -> Tensor:
        """Of each of the parts [ranks, ...] this rank's one, reduced, end to end."""
        sizes, begins = [p[0].numel() for p in parts], list[int]()
        for p in parts:
            begins.append((sum(q.numel() for q in parts[: len(begins)])) + self.rank * p[0].numel())
        terms = self._put(parts)
        own = [[t[at : at + size] for t in terms] for at, size in zip(begins, sizes, strict=True)]
        out = self._by_kernel(own, op, False)
        return self._by_torch(own, op) if out is None else out

    def swapped(self, parts: Tensor) -> Tensor:
        own = [t.view(parts.shape)[self.rank] for t in self._put([parts])]
        self.meet()
        out = torch.stack(own)
        self.meet()
        return out

    def _by_torch(self, rows: Sequence[Sequence[Tensor]], op: str) -> Tensor:
        self.meet()
        out = torch.cat([_fold(terms, op, torch.empty_like(terms[0], memory_format=torch.contiguous_format)).view(-1) for terms in rows])
        self.meet()
        return out

    def _by_kernel(self, rows: Sequence[Sequence[Tensor]], op: str, spread: bool) -> Tensor | None:
        """Terms of every row reduced, rows end to end, by one kernel that meets, reduces and meets; with `spread`, each rank reduces its share of
        the only row and writes it to all."""
        rows = [terms for terms in rows if terms[0].numel()]
        kernel = self._kernels(op, rows[0][0].dtype, spread) if rows else None
        if kernel is None:
            return None
        key = (op, rows[0][0].dtype, spread, tuple((terms[0].numel(), *(t.data_ptr() for t in terms)) for terms in rows))
        if key not in self._bound:
            self._bound[key] = self._bind_spread(kernel, rows[0]) if spread else self._bind(kernel, rows)
        run, out = self._bound[key]
        run.launch_phases()
        return out.clone()

    def _bind(self, kernel: KernelLike, rows: Sequence[Sequence[Tensor]]) -> tuple[Any, Tensor]:
        out = torch.empty(sum(terms[0].numel() for terms in rows), dtype=rows[0][0].dtype, device=self.peers.device)
        places = [o.data_ptr() for o in out.split([terms[0].numel() for terms in rows])]
        made = [Row(terms[0].numel(), {"terms": [t.data_ptr() for t in terms], "out": at}) for terms, at in zip(rows, places, strict=True)]
        return bind(kernel, made, self.peers), out

    def _bind_spread(self, kernel: KernelLike, terms: Sequence[Tensor]) -> tuple[Any, Tensor]:
        count, dtype = terms[0].numel(), terms[0].dtype
        buffer = self.peers.empty(count * dtype.itemsize)
        self._kept.append(buffer)
        share = -(-count // self.world // 16) * 16  # begins stay aligned
        lo, hi = min(self.rank * share, count), min((self.rank + 1) * share, count)
        shift = lo * dtype.itemsize
        at = {"terms": [t.data_ptr() + shift for t in terms], "out": [a + shift for a in buffer.addresses]}
        return bind(kernel, [Row(hi - lo, at)], self.peers, [share]), buffer.view(0, (count,), dtype)


_intra_hosts: list[DeviceCollectives] = []
_ops: Any = torch.ops.weft

define(
    "intra_host_reduce(Tensor[] xs, str op, int host) -> Tensor",
    lambda xs, op, host: _intra_hosts[host].reduced(xs, op),
    lambda xs, op, host: xs[0].new_empty(sum(x.numel() for x in xs)),
)
define(
    "intra_host_gather(Tensor mine, int host, int world) -> Tensor",
    lambda mine, host, world: _intra_hosts[host].gathered(mine),
    lambda mine, host, world: mine.new_empty((world, *mine.shape)),
)
define(
    "intra_host_scatter(Tensor[] parts, str op, int host) -> Tensor",
    lambda parts, op, host: _intra_hosts[host].scattered(parts, op),
    lambda parts, op, host: parts[0].new_empty(sum(p[0].numel() for p in parts)),
)
define(
    "intra_host_place(Tensor[] xs, int[] places, int size, int host) -> Tensor",
    lambda xs, places, size, host: (_intra_hosts[host].place_operands(xs, places, size), xs[0].new_empty(1))[1],
    lambda xs, places, size, host: xs[0].new_empty(1),
)
define(  # `placed` is what the other op gave: first that, then this
    "intra_host_take(Tensor placed, int size, int at, int[] shape, ScalarType dtype, int host, int world) -> Tensor",
    lambda placed, size, at, shape, dtype, host, world: _intra_hosts[host].taken(size, at, shape, dtype),
    lambda placed, size, at, shape, dtype, host, world: placed.new_empty((world, *shape), dtype=dtype),
)
define(
    "intra_host_swap(Tensor parts, int host) -> Tensor",
    lambda parts, host: _intra_hosts[host].swapped(parts),
    lambda parts, host: parts.new_empty(parts.shape),
)
