"""Peers on GPUs: torch's symmetric memory feeds the same tables that shared host memory does on CPUs.

torch numbers the meetings at which memory is shared by process, whatever group meets, and ranks find each other under equal numbers only.
Groups that are not of all ranks share their memory at different times, so that they would wait for each other or take what an
earlier meeting left: these hand out CUDA's own handles instead.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.core.errors import RuntimeFault
from weft.runtime import hosts
from weft.runtime.agree import from_all
from weft.runtime.peers import PeerBuffer


class DevicePeers:
    """Ranks that can map each other's device memory (one NVLink domain, or several ranks on one GPU)."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self._symm_mem = symm_mem
        self.group, self.target = group or dist.group.WORLD, "triton"
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.global_ranks = [dist.get_global_rank(self.group, r) for r in range(self.world)]
        self._handles: list[object] = []
        here = from_all(hosts.place(self.device), group)
        # with ranks of other groups too: blocks that wait for each other must all have room at once
        self.sharing = max(here.count(here[self.rank]), hosts.sharing(here[self.rank]))
        _require_one_host([host for host, _ in here], self.global_ranks, self.rank)

    def empty(self, nbytes: int) -> PeerBuffer:
        """A new buffer on every rank. All ranks ask for the same size in the same order."""
        size = -(-max(nbytes, 1) // 16) * 16
        try:
            return PeerBuffer(self.rank, self._of_all(size) if self.world == dist.get_world_size() else self._of_some(size))
        except RuntimeError as error:
            raise RuntimeFault(
                "ranks cannot map each other's device memory",
                needed="GPUs with peer access, or TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 where ranks share one GPU",
                found=str(error).splitlines()[0],
                try_="run the unfused form, which uses torch.distributed collectives",
            ) from None

    def _of_all(self, size: int) -> tuple[torch.Tensor, ...]:
        mine = self._symm_mem.empty(size, dtype=torch.uint8, device=self.device)
        handle = self._symm_mem.rendezvous(mine, self.group)
        self._handles.append(handle)
        return tuple(mine if r == self.rank else handle.get_buffer(r, mine.shape, torch.uint8) for r in range(self.world))

    def _of_some(self, size: int) -> tuple[torch.Tensor, ...]:
        mine = torch.empty(size, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)  # what this memory was before may still be in use here, and peers do not wait for that
        answers = from_all(mine.untyped_storage()._share_cuda_()[1:], self.group)
        opened = [None if r == self.rank else torch.UntypedStorage._new_shared_cuda(self.device.index, *how) for r, how in enumerate(answers)]
        dist.barrier(self.group)
        parts = tuple(mine if s is None else torch.empty(0, dtype=torch.uint8, device=self.device).set_(s) for s in opened)
        self._handles.append(parts)  # a table on the device may outlive whoever asked for it, here and where it is mapped
        return parts

    def barrier(self, op: str = "barrier") -> None:
        """Wait, on the host, until every rank's work so far is done."""
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)

    def multiprocessors(self) -> int:
        """This rank's share of those of its GPU."""
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count) // self.sharing

    def resident_blocks(self) -> int:
        """Blocks of one rank that are sure to run at once when every rank launches as many."""
        return self.multiprocessors() - 1


def _require_one_host(names: list[str], ranks: list[int], mine: int) -> None:
    others = [rank for rank, host in zip(ranks, names, strict=True) if host != names[mine]]
    if others:
        raise RuntimeFault(
            "ranks on several hosts cannot map each other's device memory",
            needed="all ranks of the group on one host",
            found=f"ranks {others} are elsewhere",
            try_="run the unfused form, which uses torch.distributed collectives",
        )
