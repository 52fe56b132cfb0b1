"""How blocks of several ranks meet inside device kernels. Generated kernels import this; it also runs interpreted, on CPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def meet(pads, block, LIMIT, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    """This block on every rank: what was written before is seen after. A pad has flags and a count for each block."""
    lane = tl.arange(0, LANES)
    real = lane < WORLD
    mine = tl.load(pads + RANK).to(tl.pointer_type(tl.int32)) + block * (WORLD + 1)
    tl.debug_barrier()  # this block's writes, the last count among them, come before its signal
    epoch = tl.load(mine + WORLD) + 1
    theirs = tl.load(pads + lane, mask=real, other=0).to(tl.pointer_type(tl.int32)) + block * (WORLD + 1) + RANK
    tl.atomic_xchg(theirs, epoch, mask=real, sem="release", scope="sys")
    waits = 0
    late = WORLD
    while (late > 0) & (waits < LIMIT):
        seen = tl.atomic_add(mine + lane, 0, mask=real, sem="acquire", scope="sys")
        late = tl.sum((real & (seen < epoch)).to(tl.int32))
        waits += 1
    tl.debug_barrier()
    tl.store(mine + WORLD, tl.where(late > 0, -(1 << 30), epoch))  # a count below zero: someone never came


@triton.jit
def mix(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(index, seed, site):
    """In [0, 1), from the element's number in the full tensor, the seed and the site: what weft's dropout draws everywhere."""
    key = mix(seed * -7046029254386353131 + site)
    return ((mix(index + key) >> 40) & 0xFFFFFF).to(tl.float32) / 16777216.0


@triton.jit
def meet_alone(pads, LIMIT, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    meet(pads, tl.program_id(0), LIMIT, RANK, WORLD, LANES)


@triton.jit
def move(sources, targets, flags, words, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Copy each source to its target, one after the other, and count in its flag the blocks that have done their share. With
    several stages, so many pieces less one are on their way through shared memory while one is stored."""
    for k in tl.static_range(len(sources)):
        for first in tl.range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK, num_stages=STAGES):
            at = first + tl.arange(0, BLOCK)
            tl.store(targets[k] + at, tl.load(sources[k] + at, mask=at < words), mask=at < words)
        tl.debug_barrier()
        tl.atomic_add(flags + k, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(flag, COUNT):
    """Go on when COUNT blocks have done their share."""
    seen = 0
    while seen < COUNT:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
