"""The one device interface: where every rank's buffers and signal pads are, which rank this is, how many there are.

`HostPeers` feeds it from shared host memory, `runtime.cuda.DevicePeers` from symmetric device memory.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import RuntimeFault
from weft.runtime import faults, native
from weft.runtime.shm import Segment, host_identity

PAGE = 4096
NAMES, NAME = 512, 128  # op names each rank can leave for its peers, and bytes of one
SYNC = """#include "weft_sync.h"
extern "C" {
int32_t weft_barrier(weft::World *w, uint32_t op) { return weft::barrier(w, op); }
int32_t weft_post(weft::World *w, uint32_t op) { return weft::post(w, op); }
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
        self.device, self.target = torch.device("cpu"), os.environ.get("WEFT_TARGET", "cpu")
        self.global_ranks = dist.get_process_group_ranks(group)
        self._require_one_host()
        self._pages = self._share(PAGE + NAMES * NAME)
        self._pidfds = [os.pidfd_open(page.key[0]) for page in self._pages]
        self._names: dict[str, int] = {}
        self._sync = native.load(SYNC)
        self._keep = (
            (ctypes.c_void_p * self.world)(*(page.address for page in self._pages)),
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

    def post(self, op: str) -> None:
        """Say which call comes next without waiting; fail if a peer said otherwise."""
        self.check(self._sync.weft_post(ctypes.byref(self.state), self.op(op)))

    def op(self, name: str) -> int:
        """A number for `name`, which peers can turn back into the name."""
        if name not in self._names:
            if len(self._names) == NAMES:
                self._names.clear()
            number, text = zlib.crc32(name.encode()), name.encode()[: NAME - 5]
            at = PAGE + len(self._names) * NAME
            page = self._pages[self.rank].memory
            page[at : at + NAME] = number.to_bytes(4, "little") + text.ljust(NAME - 4, b"\0")
            self._names[name] = number
        return self._names[name]

    def check(self, outcome: int) -> None:
        """Raise what a failed wait found."""
        if outcome:
            raise faults.describe(self, faults.Outcome(self.state.outcome), self.state.blamed, self.state.op)

    def op_name(self, number: int) -> str:
        """What any rank called op `number`."""
        for page in self._pages:
            for at in range(PAGE, PAGE + NAMES * NAME, NAME):
                if page.memory[at : at + 4] == number.to_bytes(4, "little") and page.memory[at + 4]:
                    return page.memory[at + 4 : at + NAME].rstrip(b"\0").decode(errors="replace")
        return "an op it never named"

    def last_op(self, rank: int) -> str | None:
        """The op at which `rank` last waited or was about to."""
        words = (ctypes.c_uint32 * 8).from_buffer(self._pages[rank].memory)  # epoch, sleepers, verdict (2), ops (4)
        return self.op_name(words[4 + words[0] % 4]) if words[0] else None

    def pid(self, rank: int) -> int:
        return self._pages[rank].key[0]

    def _share(self, nbytes: int) -> list[Segment]:
        mine = Segment.create(nbytes)
        keys = _exchange(mine.key, self.group)
        parts = [mine if r == self.rank else Segment.open(key) for r, key in enumerate(keys)]
        _exchange(None, self.group)  # everyone has opened mine
        mine.seal()
        return parts

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


def _exchange(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


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
