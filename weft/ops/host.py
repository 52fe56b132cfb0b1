"""Values kept in the host's memory between their making and a late use: sent there, fetched a while before, waited for. All are copies."""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.pointwise import FIRST, elementwise
from weft.ops.registry import Kind, Linear, define

AS_IT_IS: dict[str, Any] = {
    "equation": elementwise, "arity": 1, "linear": Linear.FIRST, "monotone": FIRST, "vjp": lambda n, ct: (ct,), "field": lambda p, x: x,
}  # fmt: skip

to_host = define("to_host", kind=Kind.VIEW, run=torch.clone, early=True, **AS_IT_IS, doc="leaves the device's memory")
from_host = define("from_host", kind=Kind.COMPOSITE, run=torch.clone, **AS_IT_IS, doc="is on its way back", adds_nothing=True)
landed = define("landed", kind=Kind.VIEW, run=lambda x: x, **AS_IT_IS, doc="is there")

COPIES = (to_host, from_host)

__all__ = ["COPIES", "from_host", "landed", "to_host"]
