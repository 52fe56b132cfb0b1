"""Parameters and gradients of one group in peer memory, their slices over the ranks, and this rank's share of the state.

The tensors are laid end to end and split into equal runs, one per rank, so a rank's share of a tensor is one run or nothing. For a
kernel on a GPU every tensor is sharded by itself: there all ranks have the same pieces of work, and one that has nothing of a tensor idles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.runtime.fused import Row
from weft.runtime.memory import zeros

UNIT = 64  # elements: tensors start, and slices begin, on multiples of this, so every access is aligned


@dataclass(frozen=True)
class Slices:
    """Where tensors of the given sizes start when laid end to end, and which run of each tensor a rank has."""

    starts: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...]  # per tensor, per rank: first and last element
    total: int
    share: int  # of each rank, of all tensors together, at most

    @staticmethod
    def of(sizes: Sequence[int], world: int, each: bool = False) -> Slices:
        """Of the tensors end to end, or of each by itself."""
        starts, at = [], 0
        for n in sizes:
            starts.append(at)
            at += _round_up(n)
        share = _round_up(-(-at // world))
        parts = [(0, _round_up(-(-n // world))) if each else (start, share) for start, n in zip(starts, sizes, strict=True)]
        runs = [
            tuple(_clamp(r * part - start, (r + 1) * part - start, n) for r in range(world))
            for (start, part), n in zip(parts, sizes, strict=True)
        ]
        return Slices(tuple(starts), tuple(runs), at, share)


def _round_up(n: int) -> int:
    return -(-n // UNIT) * UNIT


def _clamp(lo: int, hi: int, n: int) -> tuple[int, int]:
    lo = min(max(lo, 0), n)
    return lo, max(lo, min(hi, n))


class Bank:
    """The tensors of one parameter group. Made by all ranks together; parameters become views of peer memory."""

    def __init__(self, params: Sequence[torch.nn.Parameter], states: Sequence[str], peers: Any, master: bool) -> None:
        self.params, self.peers, self.master = list(params), peers, master
        self.slices = Slices.of([p.numel() for p in params], peers.world, each=peers.target == "triton")
        self.dtype = params[0].dtype
        self.padded = self.slices.share * peers.world  # what a collective of equal runs moves
        nbytes = self.padded * self.dtype.itemsize
        self.values, self.grads = peers.empty(nbytes), peers.empty(nbytes)
        kept = [_round_up(hi - lo) for lo, hi in (runs[peers.rank] for runs in self.slices.runs)]
        self._kept_at = [sum(kept[:k]) for k in range(len(kept))]
        names = [*states, *(["x"] if master else [])]
        self.states = {s: zeros(max(1, sum(kept)), torch.float32, peers.device) for s in names}
        self.grad_views = [self._view(self.grads, k) for k in range(len(self.params))]
        self._adopt()

    def _adopt(self) -> None:
        """Move the parameters in, as rank 0 has them, and gradients with them."""
        for k, p in enumerate(self.params):
            view = self._view(self.values, k)
            view.copy_(p.data)
            p.data = view
            if p.grad is not None:
                self.grad_views[k].copy_(p.grad)
                p.grad = self.grad_views[k]
        flat = self.values.view(0, (self.slices.total,), self.dtype)
        dist.broadcast(flat, dist.get_process_group_ranks(self.peers.group)[0], group=self.peers.group)
        if self.master:
            for k, p in enumerate(self.params):
                self.state(k, "x").copy_(self.run_of(p.data, k))
        self.peers.barrier("adopt parameters")

    def _view(self, buffer: Any, k: int) -> Tensor:
        p = self.params[k]
        return buffer.view(self.slices.starts[k] * self.dtype.itemsize, tuple(p.shape), self.dtype)

    def run_of(self, full: Tensor, k: int) -> Tensor:
        """This rank's run of a full tensor of the shape of parameter `k`."""
        lo, hi = self.slices.runs[k][self.peers.rank]
        return full.reshape(-1)[lo:hi]

    def state(self, k: int, name: str) -> Tensor:
        """This rank's run of a state of parameter `k`."""
        lo, hi = self.slices.runs[k][self.peers.rank]
        return self.states[name][self._kept_at[k] : self._kept_at[k] + hi - lo]

    def row(self, k: int, scalars: int, names: Mapping[str, str]) -> Row:
        """Parameter `k` as a row of the fused kernel, whose slots have names of their own."""
        lo, hi = self.slices.runs[k][self.peers.rank]
        size = self.dtype.itemsize
        offset = (self.slices.starts[k] + lo) * size
        values = [a + offset for a in self.values.addresses]
        at: dict[str, Any] = {"g": [a + offset for a in self.grads.addresses], "low" if self.master else "x": values}
        at |= {name: flat.data_ptr() + 4 * self._kept_at[k] for name, flat in self.states.items()}
        return Row(hi - lo, {slot: at[name] for slot, name in names.items()}, scalars)

    def span(self, k: int) -> int:
        """The longest run of parameter `k` any rank has."""
        return max(hi - lo for lo, hi in self.slices.runs[k])

    def gathered(self, k: int, name: str) -> Tensor:
        """A full state of parameter `k`, from all ranks: a collective call."""
        full = torch.zeros(self.params[k].numel(), device=self.peers.device)
        self.run_of(full, k).copy_(self.state(k, name))
        dist.all_reduce(full, group=self.peers.group)
        return full.view(self.params[k].shape)
