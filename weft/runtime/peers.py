"""The one device interface: where every rank's buffers and signal pads are, which rank this is, how many there are.

`HostPeers` feeds it from shared host memory, `runtime.cuda.DevicePeers` from symmetric device memory.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core import native
from weft.core.errors import RuntimeFault
from weft.runtime import faults
from weft.runtime.agree import from_all
from weft.runtime.board import SIZE, Board, doing, world_board
from weft.runtime.shm import Segment, host_identity

HEADER = Path(__file__).with_name("weft_sync.h")
SYNC = """#include "weft_sync.h"
extern "C" {
int32_t weft_barrier(weft::World *w, uint32_t op) { return weft::barrier(w, op); }
}
"""


@dataclass(frozen=True)
class PeerBuffer:
    """One buffer per rank, all of one size, each mapped by every rank."""

    rank: int
    parts: tuple[Tensor, ...]  # bytes, one per rank

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(part.data_ptr() for part in self.parts)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, rank: int | None = None) -> Tensor:
        """A tensor in this rank's part, or in a peer's."""
        part = self.parts[self.rank if rank is None else rank]
        count = torch.Size(shape).numel() * dtype.itemsize
        return part[offset : offset + count].view(dtype).view(shape)


class Peers(Protocol):
    """What fused kernels need from a transport."""

    rank: int
    world: int
    device: torch.device
    target: str  # of the code that runs here

    def empty(self, nbytes: int) -> PeerBuffer: ...

    def barrier(self, op: str = "barrier") -> None: ...


def kernel_language(device: torch.device) -> str:
    """What fused kernels are written in for a device. WEFT_TARGET=triton tries GPU kernels on CPUs, interpreted."""
    return "triton" if device.type != "cpu" else os.environ.get("WEFT_TARGET", "cpu")


class Alone:
    """No peers: for kernels that do not communicate."""

    def __init__(self, device: torch.device, target: str = "cpu") -> None:
        self.rank, self.world, self.device, self.target = 0, 1, device, target
        self.state = World(0, 1, 0, 0, None, None)

    def empty(self, nbytes: int) -> PeerBuffer:
        return PeerBuffer(0, (torch.empty(nbytes, dtype=torch.uint8, device=self.device),))

    def barrier(self, op: str = "barrier") -> None:
        """Nobody to wait for."""

    def op(self, name: str) -> int:
        return 0

    def check(self, outcome: int) -> None:
        assert outcome == 0


class World(ctypes.Structure):
    """`weft::World` of weft_sync.h."""

    _fields_ = [
        ("rank", ctypes.c_int32), ("size", ctypes.c_int32), ("spins", ctypes.c_int32), ("timeout_ms", ctypes.c_int32),
        ("pads", ctypes.c_void_p), ("pidfds", ctypes.c_void_p),
        ("blamed", ctypes.c_int32), ("outcome", ctypes.c_int32), ("op", ctypes.c_uint32),
    ]  # fmt: skip


class HostPeers:
    """Ranks on one host, meeting in shared memory. Made by all ranks of `group` together."""

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float | None = None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.target = torch.device("cpu"), kernel_language(torch.device("cpu"))
        self.global_ranks = dist.get_process_group_ranks(group)
        self._require_one_host()
        self.board = self._open_board()
        self._pids = _exchange(os.getpid(), group)
        self._pidfds = [os.pidfd_open(pid) for pid in self._pids]
        self._sync = native.load(SYNC, header=HEADER)
        self._keep = (
            (ctypes.c_void_p * self.world)(*map(_address, self.board.pages)),
            (ctypes.c_int32 * self.world)(*self._pidfds),
        )
        timeout = faults.timeout_s() if timeout_s is None else timeout_s
        pads, pidfds = map(ctypes.addressof, self._keep)
        self.state = World(self.rank, self.world, _spins(self.world), int(timeout * 1000), pads, pidfds)
        self.state_address = ctypes.addressof(self.state)

    def empty(self, nbytes: int) -> PeerBuffer:
        """A new buffer on every rank. All ranks ask for the same size in the same order."""
        return PeerBuffer(self.rank, tuple(part.bytes for part in self._share(max(nbytes, 1))))

    def barrier(self, op: str = "barrier") -> None:
        """Wait for every rank to come here; fail if one cannot."""
        self.check(self._sync.weft_barrier(ctypes.byref(self.state), self.op(op)))

    def op(self, name: str) -> int:
        """A number for `name`, which peers can turn back into the name."""
        return self.board.op(name)

    def check(self, outcome: int) -> None:
        """Raise what a failed wait found."""
        if outcome:
            raise faults.describe(self, faults.Outcome(self.state.outcome), self.state.blamed, self.state.op)

    def pid(self, rank: int) -> int:
        return self._pids[rank]

    def _share(self, nbytes: int) -> list[Segment]:
        mine = Segment.create(nbytes)
        keys = _exchange(mine.key, self.group)
        parts = [mine if r == self.rank else Segment.open(key) for r, key in enumerate(keys)]
        _exchange(None, self.group)  # everyone has opened mine
        mine.seal()
        return parts

    def _open_board(self) -> Board:
        """The launcher's pages for the world, else pages of this group's own."""
        world = world_board()
        if world is not None and self.group in (None, dist.group.WORLD) and len(world.pages) == self.world:
            return world
        return Board([memoryview(page.memory) for page in self._share(SIZE)], self.rank)

    def _require_one_host(self) -> None:
        hosts = _exchange(host_identity(), self.group)
        others = [self.global_ranks[r] for r, host in enumerate(hosts) if host != hosts[self.rank]]
        if others:
            raise RuntimeFault(
                "ranks on several hosts cannot share host memory",
                needed="all ranks of the group on one host (one pid, network and user namespace)",
                found=f"ranks {others} are elsewhere",
                try_="run the unfused form, which uses torch.distributed collectives",
            )


def _address(page: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def _exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    with doing("the sharing of peer memory"):
        return from_all(value, group)


def _spins(world: int) -> int:
    """Spin for about 30 us where every rank can have a core, else hardly at all."""
    return 2000 if world <= len(os.sched_getaffinity(0)) else 20


_connected: dict[Any, Peers] = {}


def connect(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Peers:
    """The peers of a group on a device, made once. A collective call the first time."""
    device = torch.device(device)
    key = (group or dist.group.WORLD, device.type)
    if key not in _connected:
        if device.type == "cuda":
            from weft.runtime.cuda import DevicePeers

            _connected[key] = DevicePeers(group, device)
        else:
            _connected[key] = HostPeers(group)
    return _connected[key]
