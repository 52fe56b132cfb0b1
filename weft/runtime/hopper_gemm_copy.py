"""The kernel of a matmul that carries, for GPUs whose tensor cores and copy engine work next to the warps: eight warps multiply,
one fetches the operands, and one carries, so that moving takes a little shared memory and bandwidth, but no block and no register
of the matmul. Pieces are small and one at a time is under way: an even trickle costs the matmul less than a burst.
No interpreter runs it: tests compile it and interpret its twin in `device_carry`, `python -m bench.gpu_matmuls --stages gather` checks it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def described(matrix: Tensor, box: list[int]) -> Any:
    """A matrix as the copy engine takes it, in boxes."""
    return TensorDescriptor.from_tensor(matrix, box, gl.NVMMASharedLayout.get_default_for(box, KINDS[matrix.dtype]))


@gluon.jit
def multiply_carrying(
    x, w, out, source, target, m, n, k, pieces,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, LINES: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """out = x w^T, tile after tile in every program, and the source copied to the target in pieces of LINES lines."""
    across = gl.cdiv(n, BN)
    tiles, steps = gl.cdiv(m, BM) * across, gl.cdiv(k, BK)
    a = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    b = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    held = gl.allocate_shared_memory(source.dtype, [2, LINES, WIDTH], source.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    come = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    for side in gl.static_range(2):
        mbarrier.init(come.index(side), count=1)
    gl.warp_specialize(
        [
            (multiply, (out, a, b, full, free, m, n, tiles, across, steps, BM, BN, STAGES)),
            (fetch, (x, w, a, b, full, free, tiles, across, steps, BM, BN, BK, STAGES)),
            (bring, (source, target, held, come, pieces, LINES)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def multiply(out, a, b, full, free, m, n, tiles, across, steps, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """A stage is given back when the matmul of the next is under way, so that the tensor cores do not wait for the signal."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, BN, 16])
    at = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros((BM, BN), dtype=gl.float32, layout=layout)
        for step in range(steps):
            mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
            sums = warpgroup_mma(a.index(at % STAGES), b.index(at % STAGES).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
            at += 1
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
        i = tile // across * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
        j = tile % across * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
        there = (i[:, None] < m) & (j[None, :] < n)
        gl.store(out + i[:, None].to(gl.int64) * n + j[None, :], sums.to(out.dtype.element_ty), mask=there)


@gluon.jit
def fetch(x, w, a, b, full, free, tiles, across, steps, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """The operands of every step, so many stages ahead."""
    at = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for step in range(steps):
            stage = at % STAGES
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + w.block_type.nbytes)
            tma.async_copy_global_to_shared(x, [tile // across * BM, step * BK], full.index(stage), a.index(stage))
            tma.async_copy_global_to_shared(w, [tile % across * BN, step * BK], full.index(stage), b.index(stage))
            at += 1


@gluon.jit
def bring(source, target, held, come, pieces, LINES: gl.constexpr):
    """One piece comes while the last one leaves; the programs take pieces in turn."""
    first, programs = gl.program_id(0), gl.num_programs(0)
    count = gl.cdiv(gl.maximum(pieces - first, 0), programs)
    for turn in range(count + 1):
        line = (turn * programs + first) * LINES
        if turn < count:
            tma.store_wait(pendings=0)  # what was in this half has left it
            mbarrier.expect(come.index(turn % 2), source.block_type.nbytes)
            tma.async_copy_global_to_shared(source, [line, 0], come.index(turn % 2), held.index(turn % 2))
        if turn > 0:
            mbarrier.wait(come.index((turn - 1) % 2), ((turn - 1) // 2) & 1)
            tma.async_copy_shared_to_global(target, [line - programs * LINES, 0], held.index((turn - 1) % 2))
    tma.store_wait(pendings=0)
