"""Memory shared between the processes of one user on one host, with no name anyone could find or leave behind.

A segment is an anonymous file held open by its maker; peers open it through the maker's descriptor table.
It vanishes with the last process that maps it, however that process ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A mapped piece of shared memory. `key` is what a peer on the same host needs to open it."""

    memory: mmap.mmap
    key: tuple[int, int, int]  # pid of the maker, its descriptor, bytes

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        fd = os.memfd_create(f"weft-{secrets.token_hex(8)}", os.MFD_CLOEXEC)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, nbytes)
        return cls(mmap.mmap(fd, nbytes), (os.getpid(), fd, nbytes))

    @classmethod
    def open(cls, key: tuple[int, int, int]) -> Segment:
        pid, theirs, nbytes = key
        fd = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(fd, nbytes), key)
        finally:
            os.close(fd)  # the mapping stays

    def seal(self) -> None:
        """Close the maker's descriptor: from here on nobody new can open it."""
        os.close(self.key[1])

    @cached_property
    def bytes(self) -> Tensor:
        """The full segment as a tensor, which keeps it mapped."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def host_identity() -> str:
    """Equal for two processes exactly if they may share memory. A network namespace of its own counts as a host, and so does what
    NCCL is made to take for one."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    spaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net", "user"))
    return "-".join([os.environ.get("NCCL_HOSTID", boot), *map(str, spaces)])
