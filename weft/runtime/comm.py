"""Collectives as generated code calls them: over a process group, along the middle of [before, size, after], uneven or not.

Each starts at once and returns a `Pending`; `wait()` gives the tensor. Uneven pieces are padded to the first, largest one,
and since only late pieces are short, what is gathered is right after cutting off the tail.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.runtime.near import Near

Span = tuple[int, int, int]  # elements before the cut part, its size, elements after
REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@atexit.register
def _let_go() -> None:
    """gloo's threads drop their last tensors a moment after the wait, and one that does so while Python ends aborts the process."""
    if dist.is_gloo_available():
        time.sleep(0.1)


class Pending:
    """A collective under way."""

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> Any:
        for work in self._work if isinstance(self._work, (list, tuple)) else [self._work]:
            if work is not None:
                work.wait()
        return self._finish()


def done(value: Any) -> Pending:
    return Pending(None, lambda: value)


def together(pending: Sequence[Pending]) -> Pending:
    """Several collectives as one: all are started before any is waited for."""
    return Pending(None, lambda: tuple(p.wait() for p in pending))


def ranks_of(group: Any) -> int:
    return group.world if isinstance(group, Near) else dist.get_world_size(group)


def far(group: Any) -> Any:
    """torch's own group, for what goes from one rank to another."""
    return group.group if isinstance(group, Near) else group


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    short = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, short]) if short else x


def scatter_natively(group: Any) -> bool:
    """gloo's own reduce_scatter moves as much as its all_reduce, so there it is an all_to_all and a sum."""
    return dist.get_backend(group) != "gloo"


def all_reduce(x: torch.Tensor, group: Any, op: str = "sum") -> Pending:
    if isinstance(group, Near):
        return done(group.all_reduce_list([x], op, [False])[0])
    out = x.clone(memory_format=torch.contiguous_format)
    return Pending(dist.all_reduce(out, REDUCE[op], group=group, async_op=True), lambda: out)


def all_reduce_list(xs: Sequence[torch.Tensor], group: Any, op: str = "sum", *, own: Sequence[bool]) -> Pending:
    """Several tensors reduced as one. Of those that are the caller's `own` the result may take the place."""
    if isinstance(group, Near):
        return done(group.all_reduce_list(xs, op, own))
    flat = torch.cat([x.reshape(-1) for x in xs])
    work = dist.all_reduce(flat, REDUCE[op], group=group, async_op=True)
    return Pending(work, lambda: [y.view(x.shape) for x, y in zip(xs, flat.split([x.numel() for x in xs]), strict=True)])


def all_gather(x: torch.Tensor, group: Any, *, span: Span, whole: int, shape: Sequence[int]) -> Pending:
    """Pieces of a part of `whole` indices put together; `span` is how this rank's piece lies, `shape` the result's."""
    n = ranks_of(group)
    before, _, after = span
    piece = -(-whole // n)
    mine = _padded(x.reshape(span), 1, piece).contiguous()

    def joined(pieces: torch.Tensor) -> torch.Tensor:
        return pieces.reshape(n, before, piece, after).transpose(0, 1).reshape(before, n * piece, after)[:, :whole].reshape(tuple(shape))

    if isinstance(group, Near):
        return done(joined(group.all_gather(mine)))
    out = mine.new_empty((n * before, piece, after))
    return Pending(_gather_into(out, mine, group=group, async_op=True), lambda: joined(out))


def reduce_scatter(x: torch.Tensor, group: Any, op: str = "sum", *, span: Span, mine: int, shape: Sequence[int]) -> Pending:
    """The terms reduced and each rank's piece of the part kept; `span` is how the whole part lies."""
    n = ranks_of(group)
    before, whole, after = span
    piece = -(-whole // n)
    parts = _padded(x.reshape(span), 1, n * piece).reshape(before, n, piece, after).transpose(0, 1)

    def cut(y: torch.Tensor) -> torch.Tensor:
        return y[:, :mine].reshape(tuple(shape))

    if isinstance(group, Near):
        return done(cut(group.reduce_scatter(parts, op)))
    parts = parts.contiguous()
    if scatter_natively(group):
        out = parts.new_empty(parts.shape[1:])
        return Pending(_scatter_into(out, parts.flatten(0, 1), REDUCE[op], group=group, async_op=True), lambda: cut(out))
    got = torch.empty_like(parts)
    work = dist.all_to_all_single(got, parts, group=group, async_op=True)
    return Pending(work, lambda: cut(_fold(got, op)))


def _fold(parts: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return parts.sum(0)
    return parts.amax(0) if op == "max" else parts.amin(0)


def all_to_all(
    x: torch.Tensor, group: Any, *, view: Sequence[int], old: int, new: int, whole: int, mine: int, shape: Sequence[int]
) -> Pending:
    """From pieces along dim `old` of `view` to pieces along dim `new`; `whole` is the old part's full size, `mine` the new piece's."""
    n = ranks_of(group)
    old_piece, new_piece = -(-whole // n), -(-view[new] // n)
    y = _padded(_padded(x.reshape(tuple(view)), old, old_piece), new, n * new_piece)
    y = y.unflatten(new, (n, new_piece)).movedim(new, 0)

    def joined(pieces: torch.Tensor) -> torch.Tensor:
        z = pieces.movedim(0, old).flatten(old, old + 1).narrow(old, 0, whole)
        return z.narrow(new, 0, mine).reshape(tuple(shape))

    if isinstance(group, Near):
        return done(joined(group.all_to_all(y)))
    y = y.contiguous()
    out = torch.empty_like(y)
    return Pending(dist.all_to_all_single(out, y, group=group, async_op=True), lambda: joined(out))


def reduce(x: torch.Tensor, group: Any, op: str = "sum", *, root: int) -> Pending:
    group, out = far(group), x.clone(memory_format=torch.contiguous_format)
    work = dist.reduce(out, dist.get_global_rank(group, root), REDUCE[op], group=group, async_op=True)
    return Pending(work, lambda: out if dist.get_rank(group) == root else None)


def broadcast(x: torch.Tensor | None, group: Any, *, root: int, shape: Sequence[int], like: Any) -> Pending:
    """`like` is (dtype, device) for the ranks that receive."""
    group = far(group)
    out = x.contiguous() if x is not None else torch.empty(tuple(shape), dtype=like[0], device=like[1])
    return Pending(dist.broadcast(out, dist.get_global_rank(group, root), group=group, async_op=True), lambda: out)


def send(x: torch.Tensor, group: Any, *, to: int) -> Pending:
    group = far(group)
    return Pending(dist.isend(x.contiguous(), dist.get_global_rank(group, to), group=group), lambda: None)


def recv(group: Any, *, source: int, shape: Sequence[int], like: Any) -> Pending:
    group, out = far(group), torch.empty(tuple(shape), dtype=like[0], device=like[1])
    return Pending(dist.irecv(out, dist.get_global_rank(group, source), group=group), lambda: out)


def cut(x: torch.Tensor, *, span: Span, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """This rank's slice of a value it holds whole."""
    return x.reshape(span)[:, start:stop].reshape(tuple(shape))
