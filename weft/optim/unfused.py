"""The same step without peer memory: reduce_scatter over the process group, the formulas as torch ops, all_gather.

It reads the very expressions the kernel is generated from, so it is the kernel's twin and its fall-back across hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.codegen.expr import Group, Level, Value, ordered
from weft.core.node import OPS
from weft.runtime import comm
from weft.runtime.board import doing
from weft.runtime.peers import PeerBuffer

DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class GroupPeers:
    """Ranks that cannot reach each other's memory: buffers are this rank's own."""

    target = "group"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def empty(self, nbytes: int) -> PeerBuffer:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        none = mine[:0]
        return PeerBuffer(self.rank, tuple(mine if r == self.rank else none for r in range(self.world)))

    def barrier(self, op: str = "barrier") -> None:
        with doing(op):
            dist.barrier(self.group)


class Unfused:
    """A step over the rows (bank, place) of some parameters. Called with one dict of hyper-parameters per set of scalars."""

    def __init__(self, body: Group, names: Mapping[str, str], rows: Sequence[tuple[Any, int, int]], peers: GroupPeers, name: str) -> None:
        self.body, self.names, self.rows, self.peers, self.name = body, names, list(rows), peers, name
        self.values = list(ordered(v for _, v in body.stores))

    def __call__(self, scalars: Sequence[dict[str, float]]) -> None:
        with doing(self.name):
            banks = list({id(bank): bank for bank, _, _ in self.rows}.values())
            sums = {id(bank): self._scattered(bank) for bank in banks}
            found = self._evaluate(sums, scalars)
            for slot, v in self.body.stores:
                for (bank, k, _), env in zip(self.rows, found, strict=True):
                    self._place(bank, k, slot.name).copy_(env[v])
            for bank in banks:
                self._gather(bank)

    def _scattered(self, bank: Any) -> Tensor:
        """This rank's run of the summed gradients."""
        flat = bank.grads.view(0, (bank.padded,), bank.dtype)
        share = bank.padded // self.peers.world
        span = (1, bank.padded, 1)
        return comm.reduce_scatter(flat, self.peers.group, span=span, mine=share, shape=(share,)).wait().float()  # type: ignore[no-any-return]

    def _gather(self, bank: Any) -> None:
        flat = bank.values.view(0, (bank.padded,), bank.dtype)
        share = bank.padded // self.peers.world
        mine = flat[self.peers.rank * share : (self.peers.rank + 1) * share]
        flat.copy_(comm.all_gather(mine, self.peers.group, span=(1, share, 1), full=bank.padded, shape=(bank.padded,)).wait())

    def _place(self, bank: Any, k: int, slot: str) -> Tensor:
        """Where a slot of a row is kept on this rank."""
        if self.names[slot] in bank.states:
            return bank.state(k, self.names[slot])  # type: ignore[no-any-return]
        return bank.run_of(bank.params[k].data, k)  # type: ignore[no-any-return]

    def _evaluate(self, sums: dict[int, Tensor], scalars: Sequence[dict[str, float]]) -> list[dict[Value, Tensor]]:
        """Every value of every row; at a total all rows wait for all ranks."""
        found: list[dict[Value, Tensor]] = [{} for _ in self.rows]
        for v in self.values:
            if v.fn == "total":
                for env, total in zip(found, self._totals(v, found), strict=True):
                    env[v] = total
                continue
            for (bank, k, which), env in zip(self.rows, found, strict=True):
                env[v] = self._value(v, bank, k, sums[id(bank)], scalars[which], env)
        return found

    def _value(self, v: Value, bank: Any, k: int, sums: Tensor, hyper: dict[str, float], env: dict[Value, Tensor]) -> Tensor:
        if v.fn in ("const", "scalar"):
            return torch.tensor(v.const if v.fn == "const" else hyper[v.name], dtype=torch.float64, device=self.peers.device)
        if v.fn == "reduce":
            lo, hi = bank.slices.runs[k][self.peers.rank]
            at = bank.slices.starts[k] + lo - self.peers.rank * (bank.padded // self.peers.world)
            return sums[at : at + hi - lo] if hi > lo else sums[:0]
        if v.fn == "load":
            assert v.slot is not None
            return self._place(bank, k, v.slot.name).float()
        args = [env[a] for a in v.args]
        if v.fn == "cast":
            return args[0].to(DTYPES[v.name]).float()
        args = [self._single(a, v) for a in args]
        if v.fn == "reciprocal":
            return torch.reciprocal(*args)
        return OPS[v.fn].run(*(a.bool() for a in args[:1]), *args[1:]) if v.fn == "where" else OPS[v.fn].run(*args)  # type: ignore[no-any-return]

    @staticmethod
    def _single(x: Tensor, user: Value) -> Tensor:
        """Numbers stay in double until they meet a tensor."""
        return x.float() if user.level == Level.ELEMENT else x

    def _totals(self, v: Value, found: list[dict[Value, Tensor]]) -> list[Tensor]:
        low = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[v.name]
        fold = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[v.name]
        parts = [fold(env[v.args[0]].double()) if env[v.args[0]].numel() else torch.tensor(low, device=self.peers.device) for env in found]
        each = torch.stack([p.double() for p in parts])
        each = fold(each).expand_as(each).contiguous() if v.level == Level.CALL else each
        dist.all_reduce(each, REDUCE[v.name], group=self.peers.group)
        return list(each)
