"""The kernel of a matmul that carries, for any GPU, and for the interpreter on CPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_carrying(
    x, w, out, source, target, words, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PIECE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out = x w^T, tile after tile in every program; in each step along k it stores the piece of the source it holds in registers
    and loads its next, which has until the next step to arrive. What is left at the end is copied then."""
    first, stride = tl.program_id(0) * PIECE, tl.num_programs(0) * PIECE
    across, steps = tl.cdiv(n, BN), tl.cdiv(k, BK)
    held = tl.zeros((PIECE,), tl.int32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BM) * across, tl.num_programs(0)):
        row, column = tile // across * BM, tile % across * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(steps):
            a, b = x.load([row, step * BK]), w.load([column, step * BK])
            if WIDE:  # the interpreter multiplies no half precision
                a, b = a.to(tl.float32), b.to(tl.float32)
            sums = tl.dot(a, b.T, sums)
            put(target, first - stride, held, words, PIECE)
            held = take(source, first, words, PIECE)
            first += stride
        out.store([row, column], sums.to(out.dtype))
    put(target, first - stride, held, words, PIECE)
    for left in tl.range(first, words, stride):
        put(target, left, take(source, left, words, PIECE), words, PIECE)


@triton.jit
def take(source, first, words, PIECE: tl.constexpr):
    at = first + tl.arange(0, PIECE)
    return tl.load(source + at, mask=at < words)


@triton.jit
def put(target, first, values, words, PIECE: tl.constexpr):
    at = first + tl.arange(0, PIECE)
    tl.store(target + at, values, mask=(at >= 0) & (at < words))
