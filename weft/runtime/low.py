"""A product of 8-bit floats: the device's own where it has one, else the same numbers multiplied in a wider dtype."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x [m, k] times y [k, n], summed in float32 at least."""
    if x.is_cuda and x.shape[1] % 16 == y.shape[1] % 16 == 0 and torch.cuda.get_device_capability(x.device) >= (8, 9):
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(x.contiguous(), y.t().contiguous().t(), scale_a=one, scale_b=one, out_dtype=dtype)
    wide = torch.float32 if dtype in HALF else dtype
    return (x.to(wide) @ y.to(wide)).to(dtype)
