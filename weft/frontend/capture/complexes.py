"""Complex tensors: a node holds the pairs of real and imaginary parts, in a last dim of 2, and each op on them is torch's own.

A complex value never leaves the program: what comes in and what goes out is real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from weft.core.errors import CaptureError
from weft.core.node import user_line
from weft.frontend.capture.values import Step

PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}  # a complex dtype -> that of its parts


def any_complex(*given: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype.is_complex for x in tree_leaves(given))


def parts_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of the node that stands for a tensor."""
    if not tensor.dtype.is_complex:
        return tuple(tensor.shape), tensor.dtype
    if tensor.dtype not in PARTS:
        raise CaptureError(f"weft has no dtype {tensor.dtype}", needed="complex64 or complex128", found=str(tensor.dtype), where=user_line())
    return (*tensor.shape, 2), PARTS[tensor.dtype]


def of_pairs(step: Step) -> Step:
    """A step of a view of complex numbers, on their pairs."""
    kind, arg = step
    if kind in ("reshape", "expand"):
        return kind, (*arg, 2)
    return (kind, (*arg, len(arg))) if kind == "permute" else step


def refuse_complex(what: str, found: Any) -> CaptureError:
    return CaptureError(
        f"{what} is complex",
        needed="real tensors in and out of the step; complex ones between",
        found=f"{tuple(found.shape)} {found.dtype}",
        try_="torch.view_as_real(x), and torch.view_as_complex where it is used",
        where=user_line(),
    )
