"""Matmuls of 8-bit floats: operands scaled row by row to fill the range, multiplied, summed in a wider dtype and scaled back.

A row is what one sum runs over. Rounded to three digits, an element x of a row whose largest is A is off by at most
|x| / 16 + A / 458752, so a matmul with y by ROUNDING of the sum of |x||y|, and a little where rows span more than five decades.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core.node import Attrs, Node, dtype_of
from weft.ops.comm import all_gather, all_reduce_partials
from weft.ops.linalg import einsum_equation
from weft.ops.norm import to_dtype, wide_dtype
from weft.ops.pointwise import abs_, cast, maximum
from weft.ops.reduce import amax
from weft.ops.registry import ONE, Equation, Kind, Linear, Types, define

LOW = "f8"
MOST = torch.finfo(torch.float8_e4m3fn).max
ROUNDING = (1 + 2.0**-4) ** 2 - 1


def _dtype(types: Types, attrs: Attrs) -> torch.dtype:
    return dtype_of(attrs["dtype"])


def _equation(types: Types, attrs: Attrs) -> Equation:
    """x, y, and the scale of every row of each, with a size of 1 in place of what is summed."""
    plain = einsum_equation(types[:2], attrs)
    (out,) = plain.outs
    scales = tuple(tuple(c if c in out else ONE for c in labels) for labels in plain.ins)
    return Equation((*plain.ins, *scales), plain.outs)


def _run(x: torch.Tensor, y: torch.Tensor, of_x: torch.Tensor, of_y: torch.Tensor, equation: str, dtype: str) -> torch.Tensor:
    left, out = equation.split("->")
    ins = left.split(",")
    made = torch.einsum(equation, x.to(of_x.dtype), y.to(of_y.dtype))
    for scale, labels in zip((of_x, of_y), ins, strict=True):
        made = made * scale.reshape([scale.shape[labels.index(c)] if c in labels else 1 for c in out])
    return made.to(dtype_of(dtype))


low_einsum = define("low_einsum", kind=Kind.CONTRACT, equation=_equation, run=_run, dtype=_dtype, linear=Linear.EACH)


def quantised(x: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """x in 8 bits, and the scale of every row along `dims`, which are kept: x is about one times the other. A row of zeros stays one.

    What is gathered is made small before: rounding and gathering commute.
    """
    if x.op is all_gather and len(x.args) == 1:
        low, scale = quantised(x.args[0], dims)
        how = dict(x.attrs)
        cut = scale.layout.where_cut(how["axis"]) is not None
        return all_gather(low, **how), all_gather(scale, **how) if cut else scale
    most = all_reduce_partials(amax(abs_(x), dims=dims, keepdim=True))
    scale = maximum(to_dtype(most, wide_dtype(x.dtype)), 1e-30) / MOST
    return cast(to_dtype(x, scale.dtype) / scale, dtype=LOW), scale


def scaled_product(equation: str, x: Node, y: Node, dtype: torch.dtype) -> Any:
    """The einsum of x and y by a matmul of 8-bit floats."""
    left, out = equation.split("->")
    ins = left.split(",")
    parts = [quantised(v, tuple(i for i, c in enumerate(labels) if c not in out)) for v, labels in zip((x, y), ins, strict=True)]
    (low_x, of_x), (low_y, of_y) = parts
    return low_einsum(low_x, low_y, of_x, of_y, equation=equation, dtype=dtype)


__all__ = ["LOW", "ROUNDING", "low_einsum", "quantised", "scaled_product"]
