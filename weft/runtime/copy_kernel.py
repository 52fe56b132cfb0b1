"""One long-lived kernel of few blocks that moves several tensors in turn, while matmuls on the other blocks wait for each.

A copy made by the driver, or by one kernel per tensor, needs blocks anew for each and gets them only when the matmul lets go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AT_ONCE = 32768, 1, 32  # words a block loads and then stores, stages, warps: 128 KiB, as much as one multiprocessor holds
IN_FLOW = 8192, 5, 8  # the same memory in pieces, so that loads never stop for stores


class CopyKernel:
    """Moves up to `most` tensors on the current line; `wait` holds the current line until one has arrived."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._flags = torch.zeros(most, dtype=torch.int32, device=device)
        self._blocks = 1

    def move(self, targets: Sequence[Tensor], sources: Sequence[Tensor], blocks: int, *, flow: bool = False) -> None:
        """Start copying each source to its target, in order. All are contiguous and of one size. `flow`: in smaller pieces, more of
        them under way."""
        from weft.runtime.device_sync import move

        block, stages, warps = IN_FLOW if flow else AT_ONCE
        words = sources[0].numel() * sources[0].element_size() // 4
        self._blocks = max(1, min(blocks, -(-words // block)))
        move[(self._blocks,)](_words(sources), _words(targets), self._flags, words, BLOCK=block, STAGES=stages, num_warps=warps)

    def wait(self, k: int) -> None:
        from weft.runtime.device_sync import wait_for

        wait_for[(1,)](self._flags[k:], self._blocks, num_warps=1)

    def rest(self) -> None:
        """On the line that has waited for every tensor: so that the next moves, which come after, find no flag raised."""
        self._flags.zero_()


def _words(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.view(-1).view(torch.int32) for t in tensors)
