"""Memory for one run: buffers are kept from run to run and only grow, so a step of training allocates nothing."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod

import torch
from torch import Tensor


class Workspace:
    """Named buffers of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Hashable, Tensor] = {}

    def take(self, key: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer `key` with this shape; what was in it before is lost."""
        need = prod(shape)
        found = self._buffers.get((key, dtype))
        if found is None or found.numel() < need:
            found = torch.empty(max(need + need // 4, 16), dtype=dtype, device=self.device)
            self._buffers[key, dtype] = found
        return found[:need].view(shape)

    def bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())


class Pool:
    """Workspaces that no run holds. A run takes one and gives it back when its backward is done, or when it is dropped."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[Workspace] = []

    def take(self) -> Workspace:
        return self._free.pop() if self._free else Workspace(self.device)

    def give(self, workspace: Workspace) -> None:
        self._free.append(workspace)

    def bytes(self) -> int:
        return sum(w.bytes() for w in self._free)
