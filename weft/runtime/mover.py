"""One long-lived kernel of few blocks that moves several tensors in turn, while products on the other blocks wait for each.

A copy made by the driver, or by one kernel per tensor, needs blocks anew for each and gets them only when the product lets go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32768  # words a block has under way at once: 128 KiB, enough to keep one multiprocessor's share of memory busy


class Mover:
    """Moves up to `most` tensors on the current line; `wait` holds the current line until one has arrived."""

    def __init__(self, device: torch.device, most: int) -> None:
        self._flags = torch.zeros(most, dtype=torch.int32, device=device)
        self._blocks = 1

    def move(self, targets: Sequence[Tensor], sources: Sequence[Tensor], blocks: int) -> None:
        """Start copying each source to its target, in order. All are contiguous and of one size."""
        from weft.runtime.device_sync import move

        words = sources[0].numel() * sources[0].element_size() // 4
        self._blocks = max(1, min(blocks, -(-words // BLOCK)))
        move[(self._blocks,)](_words(sources), _words(targets), self._flags, words, BLOCK=BLOCK, num_warps=32)

    def wait(self, k: int) -> None:
        from weft.runtime.device_sync import wait_for

        wait_for[(1,)](self._flags[k:], self._blocks, num_warps=1)

    def rest(self) -> None:
        """On the line that has waited for every tensor: so that the next moves, which come after, find no flag raised."""
        self._flags.zero_()


def _words(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.view(-1).view(torch.int32) for t in tensors)
