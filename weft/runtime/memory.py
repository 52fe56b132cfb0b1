"""Host memory: in large pages for what a kernel sweeps over from end to end, and kept from step to step."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LARGE = 2 << 20
TRIM, OWN_MAPPING = -1, -3  # of mallopt(3): when freed memory is given back, from which size on a tensor is mapped by itself
_chosen = [LARGE, LARGE // 2]  # what holds for good


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


@functools.cache
def keep() -> None:
    """Keep what a step frees for the next one, instead of giving it back and having every page of it zeroed again. For good: a process
    stays as large as its largest step. Other allocators than glibc's do so anyway."""
    _choose(-1, 32 << 20)  # the most there is


@functools.cache
def give_back() -> None:
    """Give large tensors back as soon as they are freed, for steps that gather parameters to hold few of them: kept, holes between tensors of many
    sizes grow to as much as a third of what is in use. For good, whatever else is run."""
    keep()
    _choose(LARGE, LARGE // 2)


@contextmanager
def given_back() -> Iterator[None]:
    """Inside, large tensors are given back as they are freed, and at the end all else that was: what comes next begins without a heap full of holes."""
    _allocate(LARGE, LARGE // 2)
    try:
        yield
    finally:
        _allocate(*_chosen)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _choose(trim: int, own: int) -> None:
    _chosen[:] = trim, own
    _allocate(trim, own)


def _allocate(trim: int, own: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM, trim)
        mallopt(OWN_MAPPING, own)
