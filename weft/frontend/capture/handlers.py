"""What is done with what torch calls: tables that `aten/` fills, and that users may add to.

`FUNCTIONS` maps torch functions (F.layer_norm) to handlers, `ATEN` maps ATen ops. A handler takes the recorder, then what
the op was given with tensors replaced by nodes, and gives nodes; NotImplemented passes the call on downwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.core.errors import CaptureError
from weft.core.node import DTYPE_NAMES, Node, user_line
from weft.frontend.capture.recorder import Handler
from weft.frontend.capture.values import Step
from weft.ops.pointwise import cast

ATEN: dict[Any, Handler] = {}
ATEN_ON_TENSORS: dict[Any, Handler] = {}
VIEWS: dict[Any, Callable[..., list[Step] | list[list[Step]]]] = {}
FUNCTIONS: dict[Any, Handler] = {}
ON_TENSORS: set[Handler] = set()


def _overloads(names: tuple[str, ...]) -> list[Any]:
    """`add.Tensor` is one overload; `add` all of them. A name this torch does not have is passed over."""
    found = []
    for name in names:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is not None:
            found += [getattr(packet, o) for o in packet.overloads() if not overload or o == overload]
    return found


def aten(*names: str, tensors: bool = False) -> Callable[[Handler], Handler]:
    """Register how ATen ops become weft ops: `handler(recorder, *args, **kwargs)` on nodes; with `tensors`, on the traced tensors."""

    def add(handler: Handler) -> Handler:
        (ATEN_ON_TENSORS if tensors else ATEN).update(dict.fromkeys(_overloads(names), handler))
        return handler

    return add


def views(*names: str) -> Callable[[Any], Any]:
    """Register view ops: `steps(shape, *args)` gives the steps from the operand, or one list of steps per result."""

    def add(steps: Any) -> Any:
        VIEWS.update(dict.fromkeys(_overloads(names), steps))
        return steps

    return add


def function(*functions: Any, tensors: bool = False) -> Callable[[Handler], Handler]:
    """Register a torch function to be intercepted before it falls apart into ATen, on nodes; with `tensors`, on the traced tensors themselves."""

    def add(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        if tensors:
            ON_TENSORS.add(handler)
        return handler

    return add


def register_lowering(op: Any) -> Callable[[Handler], Handler]:
    """Register the lowering of a torch op: `handler(*args)` takes nodes and gives nodes of weft ops."""

    def add(handler: Handler) -> Handler:
        table = ATEN if isinstance(op, torch._ops.OpOverload) else FUNCTIONS
        table[op] = lambda recorder, *args, **kwargs: handler(*args, **kwargs)
        return handler

    return add


def to_dtype(node: Node, dtype: torch.dtype) -> Node:
    if dtype not in DTYPE_NAMES:
        raise CaptureError(f"weft has no dtype {dtype}", needed=", ".join(DTYPE_NAMES.values()), found=str(dtype), where=user_line())
    return node if node.dtype == dtype else cast(node, dtype=DTYPE_NAMES[dtype])
