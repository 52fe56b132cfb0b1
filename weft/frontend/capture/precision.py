"""Mixed precision: autocast, by the lists torch uses on GPUs.

Capture runs on the CPU, whatever device the user's `torch.autocast` names: entering it turns autocast on for the CPU, so
ATen ops cast as torch casts them there. Ops intercepted as torch functions cast their own operands: matmuls, convolutions and
attention to the low dtype, losses, norms and softmax to float32. Parameters stay as they are and the cast is in the
program, so state is float32 and what is communicated in which dtype is visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.node import Node
from weft.frontend.capture.recorder import Recorder
from weft.ops.pointwise import cast

WIDE = {
    F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax, F.layer_norm,
    F.group_norm, F.cross_entropy, F.nll_loss, F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.kl_div, F.softplus,
    torch.exp, Tensor.exp, torch.log, Tensor.log, torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt,
    torch.reciprocal, Tensor.reciprocal, torch.sum, Tensor.sum, torch.cumsum, Tensor.cumsum, torch.norm, Tensor.norm,
    F.normalize, F.cosine_similarity, torch.prod, Tensor.prod, torch.log1p, Tensor.log1p, torch.expm1, Tensor.expm1,
}  # fmt: skip
_HALF = (torch.bfloat16, torch.float16)


def autocast_dtype() -> torch.dtype | None:
    """The low dtype, where autocast is on."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def lowered(recorder: Recorder, *xs: Node | None) -> list[Any]:
    """Floats brought to autocast's dtype; without autocast, as they are."""
    low = autocast_dtype()
    if low is None:
        return list(xs)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[low]
    return [cast(x, dtype=name) if x is not None and _may_cast(x.dtype) and x.dtype != low else x for x in xs]


def _may_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64


def widened(func: Any, args: Any) -> Any:
    """Half tensors brought to float32, where autocast is on and the function asks for it."""
    if autocast_dtype() is None or func not in WIDE:
        return args
    return tuple(a.float() if isinstance(a, Tensor) and a.dtype in _HALF else a for a in args)


@contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Inside, `torch.autocast(any device)` is autocast of the CPU."""
    kind = torch.amp.autocast_mode.autocast
    make, enter = kind.__init__, kind.__enter__

    def make_here(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        make(self, "cpu", _default(device_type, dtype), enabled, False)

    def enter_here(self: Any) -> Any:
        self.device, self._cache_enabled = "cpu", False
        return enter(self)

    try:
        kind.__init__, kind.__enter__ = make_here, enter_here
        yield
    finally:
        kind.__init__, kind.__enter__ = make, enter


def _default(device_type: str, dtype: Any) -> Any:
    return dtype if dtype is not None or device_type == "cpu" else torch.get_autocast_dtype(device_type)
