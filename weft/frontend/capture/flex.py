"""FlexAttention, captured as attention under the mask that its mask_mod says, whoever imported the function and under whatever name.

torch runs it through a compiler of its own and trains it on GPUs alone. Here it is a mask as any other: causal parts are recognised, and
the rest (documents, prefixes) is a value of the program, so it trains under every plan on every device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import CaptureError
from weft.core.node import user_line

MODULE, NAME = "torch.nn.attention.flex_attention", "_heard_by_weft"


@contextmanager
def flex_intercepted() -> Iterator[None]:
    """Inside, torch's function runs other code: the one below."""
    theirs: Any = sys.modules.get(MODULE)
    if theirs is None or hasattr(theirs, NAME):  # heard already, where one trace is made inside another
        yield
        return
    function = theirs.flex_attention
    code = function.__code__
    setattr(theirs, NAME, _attend)
    function.__code__ = _stand_in.__code__
    try:
        yield
    finally:
        function.__code__ = code
        delattr(theirs, NAME)


def _stand_in(*given: Any, **named: Any) -> Any:
    return _heard_by_weft(*given, **named)  # type: ignore[name-defined]  # noqa: F821 - a name of torch's module while it is heard


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Tensor:  # fmt: skip
    if score_mod is not None or return_lse or return_aux is not None:
        raise CaptureError(
            "flex_attention changes its scores or gives more than its result",
            needed="a mask_mod alone", found="a score_mod" if score_mod is not None else "return_lse or return_aux",
            try_="write the scores out: (q @ k.mT * scale + bias).softmax(-1) @ v", where=user_line(),
        )  # fmt: skip
    theirs: Any = sys.modules[MODULE]
    mask = None if block_mask is None else theirs.create_mask(block_mask.mask_mod, *block_mask.shape, device=query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
