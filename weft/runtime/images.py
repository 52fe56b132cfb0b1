"""A traced step over images, with their channels beside each other in memory: what the GPU's convolutions read without turning it first.

Only how values lie changes. What leaves the graph lies as it did before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def channels_last(graph: GraphModule, given: list[Tensor]) -> GraphModule:
    """The graph traced anew, every convolution given such operands."""
    from torch.fx.experimental.proxy_tensor import make_fx

    before = [x.meta["val"] for x in next(n for n in reversed(graph.graph.nodes) if n.op == "output").args[0]]

    def run(*tensors: Tensor) -> list[Tensor]:
        after = _Turned(graph).run(*tensors)
        return [y if y.stride() == x.stride() else y.reshape(-1).view(y.shape) for x, y in zip(before, after, strict=True)]

    return make_fx(run, tracing_mode="fake")(*given)


class _Turned(Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in CONVOLUTIONS:
            args = tree_map(_turned, args)
        if target is aten.view.default:
            target = aten.reshape.default
        return super().call_function(target, args, kwargs)


def _turned(x: Any) -> Any:
    """An operand that stands for its size alone, with one number in memory, stays what it is."""
    image = isinstance(x, Tensor) and x.ndim == 4 and x.stride()[0] != 0
    return x.contiguous(memory_format=torch.channels_last) if image else x
