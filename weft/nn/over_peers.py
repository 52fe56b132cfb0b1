"""The three matmuls with a collective, over memory all ranks can reach: a side stream moves one chunk while the main stream
multiplies the next. Every remote byte is read once, into memory of the rank that needs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.codegen.expr import Group, Slot, load, reduce
from weft.codegen.kernel import Kernel, compile_group
from weft.core.node import DTYPE_NAMES
from weft.nn.strategies import Strategy
from weft.runtime import gemm_copy
from weft.runtime.copy_kernel import CopyKernel
from weft.runtime.fused import Row, bind
from weft.runtime.peers import Alone, PeerBuffer, connect
from weft.runtime.streams import Side


@functools.cache
def _sum_kernel(dtype: str, world: int, target: str) -> Kernel:
    terms, out = Slot("terms", dtype, spread=True), Slot("out", dtype)
    return compile_group(Group("sum of terms", ((out, reduce(terms)),)), world, target)


@functools.cache
def _copy_kernel(dtype: str, target: str) -> Kernel:
    source, out = Slot("source", dtype), Slot("out", dtype)
    return compile_group(Group("copy", ((out, load(source)),)), 1, target)


class Space:
    """Peer memory and bound kernels of one group, kept from call to call. All ranks use it in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.peers: Any = connect(group, device)
        self.side, self.second = Side(device), Side(device, urgent=False)
        self._buffers: dict[Any, PeerBuffer] = {}
        self._sums: dict[Any, Any] = {}
        self._copy_kernel: CopyKernel | None = None
        self._meeting = bind(compile_group(Group("meet", ((Slot("to", "f32", spread=True), load(Slot("of", "f32"))),)), self.peers.world,
                                           self.peers.target), [self._nothing()], self.peers)  # fmt: skip

    def _nothing(self) -> Row:
        """A row without elements: a kernel on it only meets."""
        self._empty = self.peers.empty(64)
        return Row(0, {"to": list(self._empty.addresses), "of": self._empty.parts[self.peers.rank].data_ptr()})

    def multiprocessors(self) -> int:
        """This rank's share of those of its device."""
        return self.peers.multiprocessors() if hasattr(self.peers, "multiprocessors") else 1

    def meet(self) -> None:
        """All ranks' work on this line so far is seen by all."""
        self._meeting.meet()

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """A tensor of this name on every rank, in peer memory."""
        key = (name, shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = self.peers.empty(torch.Size(shape).numel() * dtype.itemsize)
        return [self._buffers[key].view(0, shape, dtype, rank) for rank in range(self.peers.world)]

    def sum_into(self, out: Tensor, terms: list[Tensor], strategy: Strategy, name: str) -> None:
        """out = sum of the ranks' terms, on the current line; `name` tells apart what is kept for it."""
        key = (name, tuple(t.data_ptr() for t in terms), out.numel(), strategy.blocks)
        if key not in self._sums:
            kernel = _sum_kernel(DTYPE_NAMES[out.dtype], self.peers.world, self.peers.target)
            row = Row(out.numel(), {"terms": [t.data_ptr() for t in terms], "out": out.data_ptr()})
            self._sums[key] = bind(kernel, [row], self.peers, name=name, blocks=strategy.blocks)
        self._sums[key].move("out", out.data_ptr())
        self._sums[key].launch_phases(leave=False)

    def copy(self, out: Tensor, source: Tensor, strategy: Strategy) -> None:
        """out = source, on the current line, by the driver or by a kernel of few blocks."""
        if strategy.by != "kernel":
            out.copy_(source)
            return
        key = ("copy", out.numel(), out.dtype, strategy.blocks)
        if key not in self._sums:
            row = Row(out.numel(), {"source": source.data_ptr(), "out": out.data_ptr()})
            alone = Alone(out.device, self.peers.target)
            self._sums[key] = bind(_copy_kernel(DTYPE_NAMES[out.dtype], alone.target), [row], alone, blocks=strategy.blocks)
        self._sums[key].move("source", source.data_ptr())
        self._sums[key].move("out", out.data_ptr())
        self._sums[key].launch_phases()

    def rows(self, rows: int, k: int, dtype: torch.dtype) -> list[Tensor]:
        """Where `gather_matmul` takes each rank's rows from."""
        return self.buffer("gather", (rows, k), dtype)

    def fetch(self, targets: list[Tensor], sources: list[Tensor], strategy: Strategy) -> tuple[list[Callable[[], None]], Callable[[], None]]:
        """Start bringing every source to its target. For each: what the main line calls before it uses it; and what after all."""
        if strategy.by in ("persistent", "flow") and self.peers.target == "triton":
            copier = self._copy_kernel = self._copy_kernel or CopyKernel(targets[0].device, self.peers.world)
            copier.move(targets, sources, strategy.blocks, flow=strategy.by == "flow")
            return [functools.partial(copier.wait, k) for k in range(len(targets))], copier.rest
        arrived: list[Callable[[], None]] = []
        for target, source in zip(targets, sources, strict=True):
            self.copy(target, source, strategy)
            arrived.append(functools.partial(self.side.main_after, self.side.mark()))
        return arrived, lambda: None


_spaces: dict[Any, Space] = {}


def space_of(group: dist.ProcessGroup | None, device: torch.device) -> Space:
    key = (group or dist.group.WORLD, device)
    if key not in _spaces:
        _spaces[key] = Space(group, device)
    return _spaces[key]


def rows_for(op: str, x: Tensor, group: Any) -> Tensor | None:
    """Where an op wants its rows to lie: those that are gathered, where the others read them."""
    space = space_of(group, x.device)
    return space.rows(*x.shape, x.dtype)[space.peers.rank] if op == "gather_matmul" else None


def _aligned(w: Tensor, space: Space) -> Tensor:
    """The weight with as many more outputs as it takes for rows of results to begin on 16 bytes: a GPU's matmuls of others are far slower."""
    more = -w.shape[0] % (16 // w.element_size())
    return F.pad(w, (0, 0, 0, more)) if more and _pays(space) else w


def _pays(space: Space) -> bool:
    return bool(space.peers.target == "triton")


def _as_asked(out: Tensor, n: int) -> Tensor:
    return out if out.shape[1] == n else out[:, :n].contiguous()


def matmul_reduce_scatter(x: Tensor, w: Tensor, group: Any, strategy: Strategy) -> Tensor:
    """x @ w.T summed over the ranks, each keeping its slice of the rows."""
    space = space_of(group, x.device)
    asked, w = w.shape[0], _aligned(w, space)
    world, rank, n = space.peers.world, space.peers.rank, w.shape[0]
    rows = x.shape[0] // (world * strategy.chunks)
    parts = space.buffer("scatter", (strategy.chunks, world, rows, n), x.dtype)
    out = torch.empty(strategy.chunks, rows, n, dtype=x.dtype, device=x.device)
    taken = x.view(world, strategy.chunks, rows, x.shape[1])
    for c in range(strategy.chunks):
        if strategy.chunks == 1:
            torch.mm(x, w.T, out=parts[rank][0].view(world * rows, n))
        else:
            torch.bmm(taken[:, c], w.T.expand(world, -1, -1), out=parts[rank][c])
        space.side.after_main()
        with space.side.work():
            space.sum_into(out[c], [p[c, rank] for p in parts], strategy, f"scatter {c}")
    with space.side.work():
        space.meet()  # nobody writes its terms again before all have read them
    space.side.main_after()
    return _as_asked(out.view(strategy.chunks * rows, n), asked)


def matmul_all_reduce(x: Tensor, w: Tensor, group: Any, strategy: Strategy) -> Tensor:
    """x @ w.T summed over the ranks: each sums its share of a chunk, and takes the others' shares from them."""
    space = space_of(group, x.device)
    asked, w = w.shape[0], _aligned(w, space)
    world, rank, n = space.peers.world, space.peers.rank, w.shape[0]
    rows = x.shape[0] // (world * strategy.chunks)
    parts = space.buffer("reduce", (strategy.chunks, world, rows, n), x.dtype)
    sums = space.buffer("sums", (strategy.chunks, rows, n), x.dtype)
    out = torch.empty(strategy.chunks, world, rows, n, dtype=x.dtype, device=x.device)
    pieces = x.view(strategy.chunks, world * rows, x.shape[1])
    for c in range(strategy.chunks):
        torch.mm(pieces[c], w.T, out=parts[rank][c].view(world * rows, n))
        space.side.after_main()
        with space.side.work():
            space.sum_into(sums[rank][c], [p[c, rank] for p in parts], strategy, f"reduce {c}")
            space.meet()
            for hop in range(world):
                source = (rank + hop) % world
                space.copy(out[c, source], sums[source][c], strategy)
    with space.side.work():
        space.meet()
    space.side.main_after()
    return _as_asked(out.view(x.shape[0], n), asked)


def gather_matmul(x: Tensor, w: Tensor, group: Any, strategy: Strategy, keep: bool = True) -> tuple[Tensor, Tensor | None]:
    """All ranks' rows times w.T: this rank's own while the others' arrive, then theirs in `strategy.chunks` turns, on `strategy.streams`
    streams in turn; or each rank's while its matmul carries the next's. With `keep`, the rows themselves too.

    Rows that already lie in `Space.rows`, peer memory, are read by the others from there.
    """
    space = space_of(group, x.device)
    asked, w = w.shape[0], _aligned(w, space)
    world, rank, (rows, k) = space.peers.world, space.peers.rank, x.shape
    shards = space.rows(rows, k, x.dtype)
    gathered = torch.empty(world, rows, k, dtype=x.dtype, device=x.device)
    out = torch.empty(world, rows, w.shape[0], dtype=x.dtype, device=x.device)
    order = [(rank + hop) % world for hop in range(1, world)]
    if strategy.by == "matmul" and world > 1 and space.peers.target == "triton" and gemm_copy.can_multiply(x, w):
        _each_brings_the_next(space, x, w, gathered, out, keep)
        return _as_asked(out.view(world * rows, -1), asked), gathered.view(world * rows, k) if keep else None
    space.side.after_main()
    with space.side.work():
        if x.data_ptr() != shards[rank].data_ptr():
            shards[rank].copy_(x)
        space.meet()
        arrived, rest = space.fetch([gathered[s] for s in order], [shards[s] for s in order], strategy)
        if keep:
            gathered[rank].copy_(x)
        space.meet()
    space.second.after_main()
    torch.mm(x, w.T, out=out[rank])
    for number, hops in enumerate(_in_parts(world - 1, strategy.chunks)):
        with space.second.work() if strategy.streams > 1 and number % 2 == 0 else contextlib.nullcontext():
            for hop in hops:
                arrived[hop]()
            for first, last in _stretches([order[hop] for hop in hops]):
                torch.mm(gathered[first:last].view(-1, k), w.T, out=out[first:last].view(-1, w.shape[0]))
    space.second.main_after()
    rest()
    space.side.main_after()
    return _as_asked(out.view(world * rows, -1), asked), gathered.view(world * rows, k) if keep else None


def _each_brings_the_next(space: Space, x: Tensor, w: Tensor, gathered: Tensor, out: Tensor, keep: bool) -> None:
    """Each matmul carries the rows of the next, beginning with this rank's own; the last carries nothing."""
    world, rank = space.peers.world, space.peers.rank
    shards = space.rows(*x.shape, x.dtype)
    if x.data_ptr() != shards[rank].data_ptr():
        shards[rank].copy_(x)
    space.meet()
    at_hand = shards[rank]
    for hop in range(world - 1):
        here, coming = (rank + hop) % world, (rank + hop + 1) % world
        gemm_copy.multiply(at_hand, w, out[here], shards[coming], gathered[coming], space.multiprocessors())
        at_hand = gathered[coming]
    space.side.after_main()
    with space.side.work():
        if keep:
            gathered[rank].copy_(x)
        space.meet()  # nobody writes its rows again before all have read them
    torch.mm(at_hand, w.T, out=out[(rank - 1) % world])
    space.side.main_after()


def _in_parts(count: int, parts: int) -> list[range]:
    """range(count) split into at most so many parts, the later ones the longer: what comes first should not be waited for long."""
    parts = max(1, min(count, parts))
    return [range(p * count // parts, (p + 1) * count // parts) for p in range(parts)] if count else []


def _stretches(numbers: list[int]) -> list[tuple[int, int]]:
    """Neighbouring numbers together, as first and one past the last: one matmul each."""
    found: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n:
            found[-1] = (found[-1][0], n + 1)
        else:
            found.append((n, n + 1))
    return found
