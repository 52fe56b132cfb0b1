"""What torch's own ways are given in place of NCCL on ranks that share a GPU: its ops over symmetric memory. On a CPU gloo's, to see that they run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench._gpu_rank import Rank

SMALL = 1 << 18  # bytes up to which every rank reads all terms itself


class Memory:
    """Collectives over buffers that all ranks reach, kept from call to call."""

    def __init__(self, me: Rank) -> None:
        self.me, self.group = me, dist.group.WORLD
        self._buffers: dict[Any, tuple[Tensor, Any]] = {}

    @property
    def name(self) -> str:
        assert self.group is not None
        return self.group.group_name

    def buffer(self, key: Any, count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """A buffer of at least so many elements on every rank, and its handle. All ranks ask for the same ones in the same order."""
        if (key, count, dtype) not in self._buffers:
            unit = 64 * self.me.world
            self._buffers[key, count, dtype] = self._made(-(-count // unit) * unit, dtype)
        return self._buffers[key, count, dtype]

    def _made(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        if not self.me.cuda:
            return torch.zeros(count, dtype=dtype), None
        import torch.distributed._symmetric_memory as symm_mem

        made = symm_mem.empty(count, dtype=dtype, device=self.me.device)
        return made.zero_(), symm_mem.rendezvous(made, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """All ranks' buffers summed in place."""
        if self.me.cuda:
            return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", self.name)  # type: ignore[no-any-return]
        dist.all_reduce(x)
        return x

    def summed(self, y: Tensor, key: Any) -> Tensor:
        """The sum of the ranks' tensors."""
        if not self.me.cuda:
            return self.sum(y.clone())
        buffer, _ = self.buffer(key, y.numel(), y.dtype)
        buffer[: y.numel()].copy_(y.reshape(-1))
        if y.numel() * y.element_size() <= SMALL:
            return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self.name)[: y.numel()].view(y.shape)  # type: ignore[no-any-return]
        return self.sum(buffer)[: y.numel()].view(y.shape).clone()

    # -- for DDP ---------------------------------------------------------------------------------------------------------------

    def hook(self, _, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations, and takes no other than its own
        grads = bucket.buffer()
        buffer, _ = self.buffer(("ddp", bucket.index()), grads.numel(), grads.dtype)
        torch.mul(grads, 1 / self.me.world, out=buffer[: grads.numel()])
        done: Any = torch.futures.Future(devices=[self.me.device] if self.me.cuda else [])
        done.set_result(self.sum(buffer)[: grads.numel()])
        return done

    # -- for FSDP2 -------------------------------------------------------------------------------------------------------------

    def install(self, module: Any) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

        memory = self

        class Gather(AllGather):
            def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
                return torch.empty(*size, dtype=dtype, device=device)

            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
                memory.gather(output_tensor, input_tensor)

        class Scatter(ReduceScatter):
            allocate = Gather.allocate

            def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
                memory.scatter(output_tensor, input_tensor, "AVG" in str(op))

        module.set_custom_all_gather(Gather())
        module.set_custom_reduce_scatter(Scatter())

    def gather(self, out: Tensor, mine: Tensor) -> None:
        if not self.me.cuda:
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, mine.clone())  # renamed in torch 2.13
            return
        count = mine.numel()
        buffer, handle = self.buffer("gather", count, mine.dtype)
        buffer[:count].copy_(mine.view(-1))
        handle.barrier(channel=0)
        torch.cat([handle.get_buffer(r, (count,), mine.dtype) for r in range(self.me.world)], out=out.view(-1))
        handle.barrier(channel=1)

    def scatter(self, out: Tensor, whole: Tensor, mean: bool) -> None:
        count, first = out.numel(), self.me.rank * out.numel()
        if not self.me.cuda:
            total = whole.clone()
            dist.all_reduce(total)
            out.copy_(total.view(-1)[first : first + count].view(out.shape))
        else:
            buffer, handle = self.buffer("scatter", whole.numel(), whole.dtype)
            buffer[: whole.numel()].copy_(whole.view(-1))
            handle.barrier(channel=0)
            terms = [handle.get_buffer(r, (count,), whole.dtype, first) for r in range(self.me.world)]
            total = torch.add(terms[0], terms[1], out=out.view(-1))
            for term in terms[2:]:
                total.add_(term)
            handle.barrier(channel=1)
        if mean:
            out.div_(self.me.world)
