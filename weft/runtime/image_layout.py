"""A traced step over images, with their channels next to each other in memory: what the GPU's convolutions read without turning it first.

Only how values lie changes, and what leaves the graph lies as it did before. Whether it helps depends on the convolutions, grouped ones
above all, so each kind of them that a graph has is timed both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from weft.runtime.replay import Clock, mark

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
MARGIN, TRIES = 0.05, 3
Kind = tuple[Any, ...]  # a convolution's op and operands, each tensor by shape, dtype and whether it is more than a size


def channels_last(graph: GraphModule, given: Sequence[Tensor]) -> GraphModule:
    """The graph traced anew, every convolution given such operands."""
    from torch.fx.experimental.proxy_tensor import make_fx

    before = [x.meta["val"] for x in next(n for n in reversed(graph.graph.nodes) if n.op == "output").args[0]]

    def run(*tensors: Tensor) -> list[Tensor]:
        after = _ChannelsLast(graph).run(*tensors)
        return [y if y.stride() == x.stride() else y.reshape(-1).view(y.shape) for x, y in zip(before, after, strict=True)]

    return make_fx(run, tracing_mode="fake")(*given)


class _ChannelsLast(Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in CONVOLUTIONS:
            args = tree_map(_to_channels_last, args)
        if target is aten.view.default:
            target = aten.reshape.default
        return super().call_function(target, args, kwargs)


def _to_channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and _is_image(x) else x


def _is_image(x: Tensor) -> bool:
    """An operand that stands for its size alone, with one number in memory, is none."""
    return x.ndim == 4 and x.stride()[0] != 0


def faster_channels_last(graph: GraphModule, device: torch.device) -> bool:
    """Whether a graph's convolutions take less time so."""
    kinds = Counter(_kind(n) for n in graph.graph.nodes if n.target in CONVOLUTIONS)
    try:
        took = [sum(count * _milliseconds(kind, device, channels_last) for kind, count in kinds.items()) for channels_last in (False, True)]
    except torch.OutOfMemoryError:  # no room to try
        return False
    return took[1] * (1 + MARGIN) < took[0]


def _kind(n: Node) -> Kind:
    def stable(x: Any) -> Any:
        value = x.meta["val"] if isinstance(x, Node) else x
        if isinstance(value, Tensor):
            return "tensor", tuple(value.shape), value.dtype, _is_image(value)
        return tuple(value) if isinstance(value, (list, tuple)) else value

    return n.target, *map(stable, n.args)


def _milliseconds(kind: Kind, device: torch.device, channels_last: bool) -> float:
    """The least of a few runs of a convolution."""

    def made(x: Any) -> Any:
        if not isinstance(x, tuple) or x[:1] != ("tensor",):
            return list(x) if isinstance(x, tuple) else x
        _, shape, dtype, image = x
        value = torch.zeros(shape if image else (1,) * len(shape), dtype=dtype, device=device)
        return value.expand(shape) if not image else _to_channels_last(value) if channels_last else value

    op, *operands = kind
    args = [made(x) for x in operands]
    clock, least = Clock(device), float("inf")
    for turn in range(TRIES + 1):
        clock.time(lambda: op(*args))
        mark(device)()
        least = min(least, clock.read() or 0.0) if turn else least
    return least
