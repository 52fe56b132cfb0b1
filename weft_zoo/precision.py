"""Where half precision is left: before sums over many elements."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Half precision brought to float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
