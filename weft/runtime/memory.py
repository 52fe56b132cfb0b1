"""Host memory for what a kernel sweeps over from end to end: in large pages, which cost fewer look-ups."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

LARGE = 2 << 20


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, in large pages where the host grants them."""
    made = torch.empty(count, dtype=dtype, device=device)
    if device.type == "cpu" and made.nbytes >= 2 * LARGE:
        _advise_large(made)
    return made.zero_()


def _advise_large(x: Tensor) -> None:
    """Must come before the first touch: a page that exists keeps its size. A host that declines loses nothing."""
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
