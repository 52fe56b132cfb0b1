"""Matmuls of 8-bit floats: operands scaled row by row to fill the range, multiplied, summed in a wider dtype and scaled back.

A row is what one sum runs over; or each 128 of it have a scale of their own, and 128 x 128 of a weight; or a tensor has one.
Rounded to three digits, an element x
of a row, block or tensor whose largest is A is off by at most |x| / 16 + A / 458752, so a matmul with y by ROUNDING of the sum of |x||y|, and a
little where rows span more than five decades.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch

from weft.core.errors import LayoutError, TypeMismatch
from weft.core.node import Attrs, Node, dtype_of
from weft.ops.comm import all_gather, all_reduce_partials
from weft.ops.linalg import einsum_equation
from weft.ops.norm import to_dtype, wide_dtype
from weft.ops.pointwise import abs_, cast, maximum
from weft.ops.reduce import amax
from weft.ops.registry import ONE, Equation, Kind, Linear, Types, define
from weft.ops.shape import reshape

LOW = "f8"
MOST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128  # elements that share a scale, where blocks have their own
ROUNDING = (1 + 2.0**-4) ** 2 - 1


def _dtype(types: Types, attrs: Attrs) -> torch.dtype:
    return dtype_of(attrs["dtype"])


def _equation(types: Types, attrs: Attrs) -> Equation:
    """x, y, and the scale of every row of each, with a size of 1 in place of what is summed, or of every dim."""
    plain = einsum_equation(types[:2], attrs)
    (out,) = plain.outs
    shapes = (t.shape for t in types[2:])
    scales = tuple(tuple(c if c in out and n != 1 else ONE for c, n in zip(labels, s, strict=True)) for labels, s in zip(plain.ins, shapes, strict=True))
    return Equation((*plain.ins, *scales), plain.outs)


def _run(
    x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor, equation: str, dtype: str, fast: bool = False
) -> torch.Tensor:
    """`fast`: a device may sum in fewer than float32's digits."""
    left, out = equation.split("->")
    ins = left.split(",")
    made = torch.einsum(equation, x.to(of_x.dtype), y.to(of_y.dtype))
    for scale, labels in zip((of_x, of_y), ins, strict=True):
        made = made * scale.reshape([scale.shape[labels.index(c)] if c in labels else 1 for c in out])
    return made.to(dtype_of(dtype))


low_einsum = define("low_einsum", kind=Kind.CONTRACT, equation=_equation, run=_run, dtype=_dtype, linear=Linear.EACH)


def quantised(x: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """x in 8 bits, and the scale of every row along `dims`, which are kept: x is about one times the other; of all of x, where these are all
    dims. A row of zeros stays one.

    What is gathered is made small before: rounding and gathering commute.
    """
    if x.op is all_gather and len(x.args) == 1:
        low, scale = quantised(x.args[0], dims)
        how = dict(x.attrs)
        sharded = scale.layout.where_sharded(how["axis"]) is not None
        return all_gather(low, **how), all_gather(scale, **how) if sharded else scale
    most = all_reduce_partials(amax(abs_(x), dims=dims, keepdim=True))
    scale = maximum(to_dtype(most, wide_dtype(x.dtype)), 1e-30) / MOST
    return cast(to_dtype(x, scale.dtype) / scale, dtype=LOW), scale


def _block_equation(types: Types, attrs: Attrs) -> Equation:
    """x, y and the scale of every block of each, in labels where blocks and what lies in them are dims of their own."""
    return einsum_equation(types, attrs)


def _block_run(x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor, equation: str, dtype: str) -> torch.Tensor:
    """Scales are numbers of a wider dtype: each operand is what it stands for, rounded to the result's dtype, which is many digits more than
    its own 8 bits and whose matmuls sum in at least float32."""
    left, out = equation.split("->")
    a, b, *scales = left.split(",")
    wide = [(v.to(s.dtype) * s.reshape([n if c in k else 1 for c, n in zip(labels, v.shape, strict=True)])).to(dtype_of(dtype))
            for v, s, labels, k in zip((x, y), (of_x, of_y), (a, b), scales, strict=True)]  # fmt: skip
    return torch.einsum(f"{a},{b}->{out}", *wide)


block_einsum = define(
    "block_einsum", kind=Kind.CONTRACT, equation=_block_equation, run=_block_run, dtype=_dtype, linear=Linear.EACH,
    doc="a matmul of 8-bit floats with a scale for every block of what is summed",
)  # fmt: skip


def _split(x: Any, dims: Collection[int]) -> Any:
    """Dims as blocks x 128."""
    return reshape(x, tuple(m for d, n in enumerate(x.shape) for m in ((n // BLOCK, BLOCK) if d in dims else (n,))))


def in_blocks(x: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """x in 8 bits, these dims as blocks x 128, and a scale for every block; what is gathered is made small before, as in `quantised`."""
    if x.op is all_gather and len(x.args) == 1:
        with suppress(LayoutError, TypeMismatch):  # a shard that is no multiple of blocks is gathered first
            how, own = dict(x.attrs), x.args[0]
            if not own.layout.is_even:
                raise LayoutError("shards that differ in size", needed="equal ones", found=str(own.type))
            low, scale = in_blocks(own, dims)
            sharded = scale.layout.where_sharded(how["axis"]) is not None
            return all_gather(low, axis=how["axis"]), all_gather(scale, axis=how["axis"]) if sharded else scale
    y = _split(x, dims)
    inner = tuple(d + sum(e <= d for e in dims) for d in dims)
    most = all_reduce_partials(amax(abs_(y), dims=inner, keepdim=True))
    scale = maximum(to_dtype(most, wide_dtype(x.dtype)), 1e-30) / MOST
    low = cast(to_dtype(y, scale.dtype) / scale, dtype=LOW)
    return low, reshape(scale, tuple(n for d, n in enumerate(scale.shape) if d not in inner))


def block_matmul(equation: str, x: Node, y: Node, dtype: torch.dtype, weights: tuple[bool, bool]) -> Any:
    """The einsum of x and y by a matmul of 8-bit floats whose blocks of 128, along the last dim that is summed, are scaled each by itself;
    of a weight, blocks of 128 x 128."""
    left, out = equation.split("->")
    a, b = left.split(",")
    summed = [c for c in a if c in b and c not in out][-1]
    rows = [[c for c in labels if c in out][-1] for labels in (a, b)]
    blocks = ["".join(c for c in labels if c == summed or weight and c == row) for labels, row, weight in zip((a, b), rows, weights, strict=True)]
    sharded = {c: c.upper() for k in blocks for c in k}
    parts = [in_blocks(v, tuple(labels.index(c) for c in sorted(k, key=labels.index))) for v, labels, k in zip((x, y), (a, b), blocks, strict=True)]
    texts = ["".join(sharded[c] + c if c in k else c for c in labels) for labels, k in zip((a, b), blocks, strict=True)]
    scales = ["".join(sharded[c] if c in k else c for c in labels) for labels, k in zip((a, b), blocks, strict=True)]
    result = "".join(sharded[c] + c if c in sharded else c for c in out)
    (low_x, of_x), (low_y, of_y) = parts
    made = block_einsum(low_x, low_y, of_x, of_y, equation=f"{','.join((*texts, *scales))}->{result}", dtype=dtype)
    size = {c: n for labels, v in zip((a, b), (x, y), strict=True) for c, n in zip(labels, v.shape, strict=True)}
    return reshape(made, tuple(size[c] for c in out))


def scaled_matmul(equation: str, x: Node, y: Node, dtype: torch.dtype, fast: bool = False, by_row: bool = True) -> Any:
    """The einsum of x and y by a matmul of 8-bit floats, with a scale for every row of each or for all of it; `fast` as in `low_einsum`."""
    left, out = equation.split("->")
    ins = left.split(",")
    parts = [quantised(v, tuple(i for i, c in enumerate(labels) if c not in out or not by_row)) for v, labels in zip((x, y), ins, strict=True)]
    (low_x, of_x), (low_y, of_y) = parts
    return low_einsum(low_x, low_y, of_x, of_y, equation=equation, dtype=dtype, **({"fast": True} if fast else {}))


__all__ = ["BLOCK", "LOW", "ROUNDING", "block_einsum", "block_matmul", "in_blocks", "low_einsum", "quantised", "scaled_matmul"]
