"""The moves between vertices and edges as torch ops, by which a vertex function asks for them and kernels know them.

`at[e]` is the vertex that edge e belongs to. In programs they are take, put and segment_max, which is 0 at a vertex without edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIB = torch.library.Library("weft", "FRAGMENT")
_LIB.define("spread(Tensor x, Tensor at) -> Tensor")
_LIB.define("segment_sum(Tensor x, Tensor at, int rows) -> Tensor")
_LIB.define("segment_max(Tensor x, Tensor at, int rows) -> Tensor")


def _spread(x: Tensor, at: Tensor) -> Tensor:
    return x.index_select(0, at)


def _segment_sum(x: Tensor, at: Tensor, rows: int) -> Tensor:
    return x.new_zeros((rows, *x.shape[1:])).index_add_(0, at, x)


def _segment_max(x: Tensor, at: Tensor, rows: int) -> Tensor:
    index = at.reshape(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return x.new_zeros((rows, *x.shape[1:])).scatter_reduce_(0, index, x, "amax", include_self=False)


for _name, _function in (("spread", _spread), ("segment_sum", _segment_sum), ("segment_max", _segment_max)):
    _LIB.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("weft::spread", lib=_LIB)
def _(x: Tensor, at: Tensor) -> Tensor:
    return x.new_empty((at.shape[0], *x.shape[1:]))


@torch.library.register_fake("weft::segment_sum", lib=_LIB)
def _(x: Tensor, at: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


@torch.library.register_fake("weft::segment_max", lib=_LIB)
def _(x: Tensor, at: Tensor, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


spread = torch.ops.weft.spread.default
segment_sum = torch.ops.weft.segment_sum.default
segment_max = torch.ops.weft.segment_max.default
