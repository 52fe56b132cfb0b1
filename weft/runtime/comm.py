"""Collectives as generated code calls them: over a process group, along the middle of [before, size, after], uneven or not.

Each starts at once and returns a `InFlight`; `wait()` gives the tensor. Uneven pieces are padded to the first, largest one,
and since only late pieces are short, what is gathered is right after dropping the tail. Under a trace the same collectives
are torch's functional ones, which a compiler sees as ops.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from weft.core.pairs import pairs
from weft.runtime.intra_host import FOLD, HostGroup
from weft.runtime.parallel_groups import ParallelGroups

Span = tuple[int, int, int]  # elements before the sharded part, its size, elements after
REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@atexit.register
def _let_go() -> None:
    """gloo's threads drop their last tensors a moment after the wait, and one that does so while Python ends aborts the process."""
    if dist.is_gloo_available():
        time.sleep(0.1)


class InFlight:
    """A collective under way."""

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Any:
        for work in self._work if isinstance(self._work, (list, tuple)) else [self._work]:
            if work is not None:
                work.wait()
        return self._finish()


def done(value: Any) -> InFlight:
    return InFlight(None, lambda: value)


def joined(pending: Sequence[InFlight]) -> InFlight:
    """Several collectives as one: all are started before any is waited for."""
    return InFlight(None, lambda: tuple(p.wait() for p in pending))


def ranks_of(group: Any) -> int:
    return group.world if isinstance(group, HostGroup) else dist.get_world_size(far(group))


def far(group: Any) -> Any:
    """torch's own group, for what goes from one rank to another."""
    return group.group if isinstance(group, (HostGroup, ParallelGroups)) else group


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    short = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, short]) if short else x


def message_bytes(device: torch.device) -> int:
    """How much one message should carry: more would wait for its last part longer than the message costs."""
    return 2 << 20 if device.type == "cpu" else 16 << 20


def scatter_natively(group: Any) -> bool:
    """gloo's own reduce_scatter moves as much as its all_reduce, so there it is an all_to_all and a sum."""
    return dist.get_backend(group) != "gloo"


def _channel_for(group: Any, sent: int) -> Any:
    """The group for a message of so many bytes."""
    return group.take(sent) if isinstance(group, ParallelGroups) else group


def _functional(name: str, x: torch.Tensor, *more: Any, group: Any) -> InFlight:
    """A collective as an op of a traced graph: started here, waited for where its value is."""
    import torch.distributed._functional_collectives  # tells the trace the shapes of what they give

    wire = torch.ops._c10d_functional
    out = getattr(wire, name)(x, *more, (group or dist.group.WORLD).group_name)
    return InFlight(None, lambda: wire.wait_tensor(out))


def _reduced(x: torch.Tensor, group: Any, op: str) -> InFlight:
    """The reduction of contiguous memory of one's own, in its place."""
    group = _channel_for(group, 2 * x.nbytes)
    if isinstance(x, FakeTensor):
        return _functional("all_reduce", x, op, group=group)
    return InFlight(dist.all_reduce(x, REDUCE[op], group=group, async_op=True), lambda: x)


def _gathered(mine: torch.Tensor, group: Any) -> InFlight:
    """Every rank's `mine`, end to end along the first dim."""
    n = ranks_of(group)
    if isinstance(group, HostGroup):
        return done(group.all_gather(mine).flatten(0, 1))
    group = _channel_for(group, n * mine.nbytes)
    if isinstance(mine, FakeTensor):
        return _functional("all_gather_into_tensor", mine, n, group=group)
    out = mine.new_empty((n * mine.shape[0], *mine.shape[1:]))
    return InFlight(_gather_into(out, mine, group=group, async_op=True), lambda: out)


def _scattered(parts: torch.Tensor, group: Any, op: str) -> InFlight:
    """parts [ranks, ...]: this rank's one, reduced."""
    if isinstance(group, HostGroup):
        return done(group.reduce_scatter(parts, op))
    group = _channel_for(group, parts.nbytes)
    if isinstance(parts, FakeTensor):
        return _functional("reduce_scatter_tensor", parts.flatten(0, 1), op, len(parts), group=group)
    if scatter_natively(group):
        out = parts.new_empty(parts.shape[1:])
        return InFlight(_scatter_into(out, parts.flatten(0, 1), REDUCE[op], group=group, async_op=True), lambda: out)
    got = torch.empty_like(parts)
    return InFlight(dist.all_to_all_single(got, parts, group=group, async_op=True), lambda: _fold(got, op))


def _by_tree(parts: torch.Tensor, group: Any) -> InFlight:
    """parts [ranks, ...]: this rank's one, the ranks' terms summed by pairs."""
    if isinstance(group, HostGroup):
        return done(pairs(group.all_to_all(parts).unbind(0)))
    got, group = torch.empty_like(parts), far(group)
    return InFlight(dist.all_to_all_single(got, parts, group=group, async_op=True), lambda: pairs(got.unbind(0)))


def all_reduce(x: torch.Tensor, group: Any, op: str = "sum", tree: bool = False) -> InFlight:
    """`tree`: terms are summed by pairs of ranks, each rank a share."""
    if tree:
        n = ranks_of(group)
        mine = _by_tree(_padded(x.reshape(1, -1), 1, -(-x.numel() // n) * n).reshape(n, -1).contiguous(), group)
        return InFlight(None, lambda: _gathered(mine.wait(), group).wait()[: x.numel()].reshape(x.shape))
    if isinstance(group, HostGroup):
        return done(group.all_reduce_list([x], op, [False])[0])
    return _reduced(x.clone(memory_format=torch.contiguous_format), group, op)


def all_reduce_list(xs: Sequence[torch.Tensor], group: Any, op: str = "sum", *, own: Sequence[bool]) -> InFlight:
    """Several tensors reduced as one. Of those that are the caller's `own` the result may take the place."""
    if isinstance(group, HostGroup):
        return done(group.all_reduce_list(xs, op, own))
    sums = _reduced(torch.cat([x.reshape(-1) for x in xs]), group, op)
    return InFlight(None, lambda: [y.view(x.shape) for x, y in zip(xs, sums.wait().split([x.numel() for x in xs]), strict=True)])


def all_gather(x: torch.Tensor, group: Any, *, span: Span, full: int, shape: Sequence[int]) -> InFlight:
    """Pieces of a part of `full` indices put together; `span` is how this rank's piece lies, `shape` the result's."""
    mine = _padded(x.reshape(span), 1, -(-full // ranks_of(group))).contiguous()
    pieces = _gathered(mine, group)
    return InFlight(None, lambda: _joined(pieces.wait(), ranks_of(group), span, full, shape))


def _joined(pieces: torch.Tensor, n: int, span: Span, full: int, shape: Sequence[int]) -> torch.Tensor:
    """Pieces of all ranks, one rank after the other, as the part they make up."""
    before, _, after = span
    piece = -(-full // n)
    return pieces.reshape(n, before, piece, after).transpose(0, 1).reshape(before, n * piece, after)[:, :full].reshape(tuple(shape))


def all_gather_list(xs: Sequence[torch.Tensor], group: Any, *, hows: Sequence[tuple[Span, int, Sequence[int]]]) -> tuple[InFlight, ...]:
    """Several gathers in one message; for each its span, full size and shape."""
    n = ranks_of(group)
    if isinstance(group, HostGroup) and group.takes_apart:
        return tuple(all_gather(x, group, span=span, full=full, shape=shape) for x, (span, full, shape) in zip(xs, hows, strict=True))
    flat = [_padded(x.reshape(span), 1, -(-full // n)).reshape(-1) for x, (span, full, _) in zip(xs, hows, strict=True)]
    if type(group) is HostGroup:
        return tuple(done(_joined(torch.cat(ps), n, *how)) for ps, how in zip(group.all_gather_list(flat), hows, strict=True))
    pieces = _gathered(torch.cat(flat), group)
    split = functools.cache(lambda: pieces.wait().view(n, -1).split([len(x) for x in flat], 1))
    return tuple(InFlight(None, functools.partial(lambda k, how: _joined(split()[k], n, *how), k, how)) for k, how in enumerate(hows))


def reduce_scatter(
    x: torch.Tensor, group: Any, op: str = "sum", *, span: Span, mine: int, shape: Sequence[int], tree: bool = False
) -> InFlight:
    """The terms reduced and each rank's piece of the part kept; `span` is how the full part lies."""
    parts = _parts(x, ranks_of(group), span)
    sums = _by_tree(parts.contiguous(), group) if tree else _scattered(parts if isinstance(group, HostGroup) else parts.contiguous(), group, op)
    return InFlight(None, lambda: sums.wait()[:, :mine].reshape(tuple(shape)))


def _parts(x: torch.Tensor, n: int, span: Span) -> torch.Tensor:
    """What each rank is to have of a part, [ranks, before, piece, after]."""
    before, full, after = span
    piece = -(-full // n)
    return _padded(x.reshape(span), 1, n * piece).reshape(before, n, piece, after).transpose(0, 1)


def reduce_scatter_list(
    xs: Sequence[torch.Tensor], group: Any, op: str = "sum", *, hows: Sequence[tuple[Span, int, Sequence[int]]]
) -> tuple[InFlight, ...]:
    """Several in one message; for each its span, how much of it is this rank's, and the result's shape."""
    n = ranks_of(group)
    parts = [_parts(x, n, span) for x, (span, _, _) in zip(xs, hows, strict=True)]
    sizes = [p[0].numel() for p in parts]
    on_host = isinstance(group, HostGroup)
    sums = done(group.reduce_scatter_list(parts, op)) if on_host else _scattered(torch.cat([p.reshape(n, -1) for p in parts], 1), group, op)
    split = functools.cache(lambda: sums.wait().split(sizes))

    def cut(k: int) -> torch.Tensor:
        _, mine, shape = hows[k]
        return split()[k].view(parts[k].shape[1:])[:, :mine].reshape(tuple(shape))

    return tuple(InFlight(None, functools.partial(cut, k)) for k in range(len(parts)))


def _fold(parts: torch.Tensor, op: str) -> torch.Tensor:
    return functools.reduce(FOLD[op], parts.unbind(0))


def all_to_all(
    x: torch.Tensor, group: Any, *, view: Sequence[int], old: int, new: int, full: int, mine: int, shape: Sequence[int]
) -> InFlight:
    """From pieces along dim `old` of `view` to pieces along dim `new`; `full` is the old part's full size, `mine` the new piece's."""
    n = ranks_of(group)
    old_piece, new_piece = -(-full // n), -(-view[new] // n)
    y = _padded(_padded(x.reshape(tuple(view)), old, old_piece), new, n * new_piece)
    y = y.unflatten(new, (n, new_piece)).movedim(new, 0)

    def joined(pieces: torch.Tensor) -> torch.Tensor:
        z = pieces.movedim(0, old).flatten(old, old + 1).narrow(old, 0, full)
        return z.narrow(new, 0, mine).reshape(tuple(shape))

    if isinstance(group, HostGroup):
        return done(joined(group.all_to_all(y)))
    y, group = y.contiguous(), far(group)
    if isinstance(y, FakeTensor):
        sent = _functional("all_to_all_single", y, [1] * n, [1] * n, group=group)
        return InFlight(None, lambda: joined(sent.wait()))
    out = torch.empty_like(y)
    return InFlight(dist.all_to_all_single(out, y, group=group, async_op=True), lambda: joined(out))


def reduce(x: torch.Tensor, group: Any, op: str = "sum", *, root: int) -> InFlight:
    group = far(group)
    out = x.to(reach(group, x.device)).clone(memory_format=torch.contiguous_format)
    work = dist.reduce(out, dist.get_global_rank(group, root), REDUCE[op], group=group, async_op=True)
    return InFlight(work, lambda: out.to(x.device) if dist.get_rank(group) == root else None)


def broadcast(x: torch.Tensor | None, group: Any, *, root: int, shape: Sequence[int], like: Any) -> InFlight:
    """`like` is (dtype, device) for the ranks that receive."""
    group, (dtype, device) = far(group), like
    place = reach(group, device)
    out = x.contiguous().to(place) if x is not None else torch.empty(tuple(shape), dtype=dtype, device=place)
    return InFlight(dist.broadcast(out, dist.get_global_rank(group, root), group=group, async_op=True), lambda: out.to(device))


def send(x: torch.Tensor, group: Any, *, to: int) -> InFlight:
    group = far(group)
    out = x.contiguous().to(reach(group, x.device))
    return InFlight(dist.isend(out, dist.get_global_rank(group, to), group=group), lambda: None)


def recv(group: Any, *, source: int, shape: Sequence[int], like: Any) -> InFlight:
    group, (dtype, device) = far(group), like
    out = torch.empty(tuple(shape), dtype=dtype, device=reach(group, device))
    return InFlight(dist.irecv(out, dist.get_global_rank(group, source), group=group), lambda: out.to(device))


def reach(group: Any, device: Any) -> torch.device:
    """Where a tensor must be for the group's backend to send it: gloo takes none of an accelerator's."""
    device = torch.device(device)
    return device if device.type == "cpu" or "nccl" in str(dist.get_backend(group)) else torch.device("cpu")


def slice_span(x: torch.Tensor, *, span: Span, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """This rank's slice of a value it holds in full."""
    return x.reshape(span)[:, start:stop].reshape(tuple(shape))
