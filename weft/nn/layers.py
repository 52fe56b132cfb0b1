"""The overlapped matmuls as modules: the two halves of a tensor-parallel block, and the layer that ends one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core.errors import TypeMismatch
from weft.nn.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from weft.nn.strategies import Strategy


class _Sharded(nn.Module):
    """A slice of a linear layer: `dim` is the dim of the weight [out, in] that the ranks share."""

    dim: int

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None, strategy: Strategy | None = None, **kind: Any
    ) -> None:
        super().__init__()
        self.group, self.strategy = group, strategy
        self.in_features, self.out_features = in_features, out_features
        shape = [out_features, in_features]
        world = dist.get_world_size(group)
        if shape[self.dim] % world:
            raise TypeMismatch(f"{type(self).__name__} of {shape[self.dim]} features over {world} ranks",
                               needed=f"a multiple of {world}", found=str(shape[self.dim]))  # fmt: skip
        shape[self.dim] //= world
        self.weight = nn.Parameter(torch.empty(shape, **kind))
        self.bias = nn.Parameter(torch.zeros(shape[0], **kind)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    @classmethod
    def of(cls, linear: nn.Linear, *, group: Any = None, strategy: Strategy | None = None) -> Any:
        """This rank's slice of a layer that every rank holds in full."""
        kind = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, group=group, strategy=strategy, **kind)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        with torch.no_grad():
            layer.weight.copy_(linear.weight.chunk(world, cls.dim)[rank])
            if layer.bias is not None and linear.bias is not None:
                layer.bias.copy_(linear.bias.chunk(world)[rank] if cls.dim == 0 else linear.bias)
        return layer


class AllGatherLinear(_Sharded):
    """Gathers the rows of all ranks and maps them to this rank's slice of the outputs: the first half of a block."""

    dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_linear(x, self.weight, self.bias, group=self.group, strategy=self.strategy)


class LinearReduceScatter(_Sharded):
    """Maps this rank's slice of the inputs and leaves each rank its slice of the summed rows: the second half of a block."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return linear_reduce_scatter(x, self.weight, self.bias, group=self.group, strategy=self.strategy)


class LinearAllReduce(_Sharded):
    """Maps this rank's slice of the inputs and sums over the ranks."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return linear_all_reduce(x, self.weight, self.bias, group=self.group, strategy=self.strategy)
