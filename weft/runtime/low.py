"""A matmul of 8-bit floats: the device's own where it has one, else the same numbers multiplied in a wider dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """x [m, k] times y [k, n], times the scale of every row of x and of every column of y. Summed in float32 at least; where `fast`, in as many
    digits as the device's quickest matmul keeps, which on Hopper is 14 bits."""
    rows, columns = of_x.reshape(-1, 1), of_y.reshape(1, -1)
    if x.is_cuda and dtype == torch.bfloat16 and x.shape[1] % 16 == y.shape[1] % 16 == 0 and torch.cuda.get_device_capability(x.device) >= (9, 0):
        left, right = x.contiguous(), y.t().contiguous().t()
        return torch._scaled_mm(left, right, scale_a=rows, scale_b=columns, out_dtype=dtype, use_fast_accum=fast)
    return (x.to(of_x.dtype) @ y.to(of_x.dtype) * rows * columns).to(dtype)
