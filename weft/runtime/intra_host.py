"""Collectives between ranks of one host, through memory all of them map: no sockets, one barrier each.

Every rank puts its operand where the others can read it, all meet, and each takes what it needs. There are two such places,
used in turn: who writes one again has met the others since, so nobody is still reading it. What is larger than a place goes in several rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.peers import PeerBuffer, Peers

SLICED = 1 << 16  # bytes above which, with more than two ranks, each sums only its share and takes the rest from the others
PLACE = 16 << 20  # bytes of a place at most: each is mapped by every rank for as long as the process lives
FOLD = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class HostGroup:
    """A process group whose ranks share a host. All ranks call the same things in the same order."""

    takes_apart = False  # whether what is gathered is better taken one by one
    message = 0  # bytes of one, where that is not as between hosts

    def __init__(self, group: Any, peers: Peers) -> None:
        self.group, self.peers = group, peers
        self.rank, self.world = peers.rank, peers.world
        self._places: list[PeerBuffer | None] = [None, None]
        self._sizes = [0, 0]
        self._current = 0

    def _next(self, nbytes: int) -> PeerBuffer:
        """The place whose turn it is, grown by all ranks equally if it is too small."""
        self._current ^= 1
        place = self._places[self._current]
        if place is None or self._sizes[self._current] < nbytes:
            self._sizes[self._current] = max(nbytes, 2 * self._sizes[self._current], 1 << 16)
            place = self._places[self._current] = self.peers.empty(self._sizes[self._current])
        return place

    def _share(self, parts: Sequence[Tensor], op: str) -> list[Tensor]:
        """Every rank's operand, its parts laid end to end, once all have put theirs there."""
        count, dtype = sum(p.numel() for p in parts), parts[0].dtype
        place = self._next(count * dtype.itemsize)
        views = [place.view(0, (count,), dtype, r) for r in range(self.world)]
        at = 0
        for part in parts:
            views[self.rank][at : at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        self.peers.barrier(op)
        return views

    def all_reduce_list(self, xs: Sequence[Tensor], op: str, own: Sequence[bool]) -> list[Tensor]:
        """Tensors reduced together, those that are `own` in place. Terms are taken in the order of ranks: all get the same bits."""
        outs = [x if mine and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype) for x, mine in zip(xs, own, strict=True)]
        if sum(x.nbytes for x in xs) <= PLACE:
            self._reduce(xs, op, outs)
            return outs
        for x, out in zip(xs, outs, strict=True):
            for part, into in zip(x.reshape(-1).split(PLACE // x.itemsize), out.view(-1).split(PLACE // x.itemsize), strict=True):
                self._reduce([part], op, [into])
        return outs

    def _reduce(self, xs: Sequence[Tensor], op: str, outs: Sequence[Tensor]) -> None:
        terms = self._share(xs, "all_reduce")
        sliced = self.world > 2 and terms[0].numel() * terms[0].element_size() > SLICED
        shares = self._sum_shares(terms, op) if sliced else [(0, terms[0].numel(), terms)]
        at = 0
        for out in (out.view(-1) for out in outs):
            for start, stop, part in shares:
                lo, hi = max(at, start), min(at + out.numel(), stop)
                if lo < hi:
                    _fold([t[lo:hi] for t in part], op, out[lo - at : hi - at])
            at += out.numel()

    def _sum_shares(self, terms: list[Tensor], op: str) -> list[tuple[int, int, list[Tensor]]]:
        """Every rank sums its share where it lies; who holds what then, as (start, stop, the one term)."""
        full = len(terms[0])
        share = -(-full // self.world)
        bounds = [(min(r * share, full), min((r + 1) * share, full)) for r in range(self.world)]
        start, stop = bounds[self.rank]
        _fold([t[start:stop] for t in terms], op, terms[self.rank][start:stop])
        self.peers.barrier("all_reduce")
        return [(*bound, [term]) for bound, term in zip(bounds, terms, strict=True)]

    def all_gather(self, mine: Tensor) -> Tensor:
        """Every rank's piece, all of one shape, along a new first dim."""
        out = mine.new_empty((self.world, *mine.shape))
        for part, full in _rounds(mine, 0, out, 1):
            for r, piece in enumerate(self._share([part], "all_gather")):
                full[r].copy_(part if r == self.rank else piece.view(part.shape))
        return out

    def all_gather_list(self, mine: Sequence[Tensor]) -> list[list[Tensor]]:
        """Of each flat piece every rank's, where they lie: to be copied before the next call."""
        full = self._share(mine, "all_gather")
        sizes = [x.numel() for x in mine]
        return [list(pieces) for pieces in zip(*(views.split(sizes) for views in full), strict=True)]

    def reduce_scatter(self, parts: Tensor, op: str = "sum") -> Tensor:
        """parts [ranks, ...]: this rank's one, reduced."""
        out = parts.new_empty(parts.shape[1:])
        for some, into in _rounds(parts, 1, out, 0):
            _fold([t.view(some.shape)[self.rank] for t in self._share([some], "reduce_scatter")], op, into)
        return out

    def reduce_scatter_list(self, parts: Sequence[Tensor], op: str = "sum") -> Tensor:
        """Of each of the parts [ranks, ...] this rank's one, reduced, end to end."""
        return self.reduce_scatter(torch.cat([p.reshape(self.world, -1) for p in parts], 1), op)

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [ranks, ...]: from every rank the one for this rank, in the order of ranks."""
        out = parts.new_empty(parts.shape)
        for some, into in _rounds(parts, 1, out, 1):
            for r, t in enumerate(self._share([some], "all_to_all")):
                into[r].copy_(t.view(some.shape)[self.rank])
        return out


def _rounds(x: Tensor, first: int, out: Tensor, same: int) -> list[tuple[Tensor, Tensor]]:
    """An operand in parts that fit into a place, split along its longest dim from `first` on, with what `out`, whose dims from `same` on are those,
    has of each."""
    many = -(-x.nbytes // PLACE)
    if many <= 1:
        return [(x, out)]
    dim = max(range(first, x.ndim), key=lambda d: x.shape[d])
    return list(zip(x.chunk(many, dim), out.chunk(many, dim - first + same), strict=True))


_near: dict[int, HostGroup] = {}


def host_group_of(group: Any, peers: Peers, make: Callable[[], HostGroup] | None = None) -> HostGroup:
    """The one `HostGroup` of these peers: its places are kept for all programs."""
    if id(peers) not in _near:
        _near[id(peers)] = make() if make is not None else HostGroup(group, peers)
    return _near[id(peers)]


def _fold(terms: Sequence[Tensor], op: str, out: Tensor) -> Tensor:
    """The reduction of the terms into `out`, which may be one of them."""
    fold: Any = FOLD[op]
    if len(terms) == 1:
        return out.copy_(terms[0])
    total = fold(terms[0], terms[1], out=out) if len(terms) == 2 else fold(terms[0], terms[1])
    for k, term in enumerate(terms[2:], 3):
        total = fold(total, term, out=out if k == len(terms) else total)
    return out
