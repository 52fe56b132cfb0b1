"""A matmul that carries: while its blocks multiply they also copy a tensor, a little in every step.

A copy next to a matmul takes multiprocessors from it, since a matmul's blocks leave room for no other; this one takes none, and
since a kernel ends before the next begins, what it carried needs no signal.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

TILE = 128, 256, 64  # rows, columns and depth of what a block multiplies in a step
WARPS = 8  # that multiply
STAGES = 4  # of operands under way, where the copy engine brings them
WIDTH = 64  # elements of a line, 128 bytes, of what the copy engine carries
LINES = 32, 128  # in a piece, at least and at most: the least keeps one step's copy small, the most is what room is left for
WORDS = 1024, 4096  # in a piece held in registers: 4 and 16 in each thread


def can_multiply(x: Tensor, w: Tensor) -> bool:
    """Whether rows x [m, k] and w [n, k] suit the kernels: half precision, rows of a multiple of 16 bytes, x of full lines, w as it is."""
    even = x.shape[1] % 8 == 0 and w.shape[0] % 8 == 0 and x.numel() % WIDTH == 0 and w.data_ptr() % 16 == 0
    return x.dtype == w.dtype and x.dtype in (torch.bfloat16, torch.float16) and w.is_contiguous() and even and x.numel() > 0


def multiply(x: Tensor, w: Tensor, out: Tensor, source: Tensor, target: Tensor, blocks: int) -> None:
    """out = x w^T by so many blocks, which copy `source` to `target` on the way. All are contiguous; the source has full lines."""
    tiles = -(-x.shape[0] // TILE[0]) * -(-w.shape[0] // TILE[1])
    grid = max(1, min(blocks, tiles))
    steps = grid * -(-tiles // grid) * -(-x.shape[1] // TILE[2])
    (_by_copy_engine if _has_copy_engine(x.device) else _by_registers)(x, w, out, source, target, grid, steps)


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    """Whether the kernel for tensor cores and a copy engine that work asynchronously can be had."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        import weft.runtime.hopper_gemm_copy  # noqa: F401
    except ImportError:  # Gluon is an experiment of Triton's, and may move
        return False
    return True


def _by_copy_engine(x: Tensor, w: Tensor, out: Tensor, source: Tensor, target: Tensor, grid: int, steps: int) -> None:
    from weft.runtime.hopper_gemm_copy import described, multiply_carrying

    bm, bn, bk = TILE
    count = source.numel() // WIDTH
    lines = _copy_size(count, steps, *LINES)
    there, here = (described(t.view(-1, WIDTH), [lines, WIDTH]) for t in (source, target))
    multiply_carrying[(grid,)](
        described(x, [bm, bk]), described(w, [bn, bk]), out, there, here, x.shape[0], w.shape[0], x.shape[1], -(-count // lines),
        BM=bm, BN=bn, BK=bk, STAGES=STAGES, LINES=lines, WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip


def _by_registers(x: Tensor, w: Tensor, out: Tensor, source: Tensor, target: Tensor, grid: int, steps: int) -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from weft.runtime.device_gemm_copy import multiply_carrying

    bm, bn, bk = TILE
    boxes = ((x, [bm, bk]), (w, [bn, bk]), (out, [bm, bn]))
    there, here = (t.view(-1).view(torch.int32) for t in (source, target))
    multiply_carrying[(grid,)](
        *(TensorDescriptor.from_tensor(t, box) for t, box in boxes), there, here, there.numel(), x.shape[0], w.shape[0], x.shape[1],
        BM=bm, BN=bn, BK=bk, PIECE=_copy_size(there.numel(), steps, *WORDS), WIDE=os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=WARPS, num_stages=3,
    )  # fmt: skip


def _copy_size(count: int, steps: int, least: int, most: int) -> int:
    """How much to copy in each of so many steps, a power of two."""
    piece = least
    while piece < most and piece * steps < count:
        piece *= 2
    return piece
