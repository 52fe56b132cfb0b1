"""The two moves between vertices and edges as torch ops, each the other's gradient: spread and segment_sum.

`at[e]` is the vertex that edge e belongs to. `segment_max` is 0 at a vertex without edges; ties share the gradient.
"""

from __future__ import annotations

from typing import Any

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


def _save_spread(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _save_sum(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _save_max(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output)


def _spread_vjp(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return segment_sum(grad, ctx.saved_tensors[0], ctx.rows), None


def _sum_vjp(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return spread(grad, ctx.saved_tensors[0]), None, None


def _max_vjp(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    x, at, top = ctx.saved_tensors
    hit = torch.where(x == spread(top, at), 1.0, 0.0).to(x.dtype)
    ties = segment_sum(hit, at, top.shape[0])
    return hit * spread(grad / ties.clamp(min=1), at), None, None


torch.library.register_autograd("weft::spread", _spread_vjp, setup_context=_save_spread, lib=_LIB)
torch.library.register_autograd("weft::segment_sum", _sum_vjp, setup_context=_save_sum, lib=_LIB)
torch.library.register_autograd("weft::segment_max", _max_vjp, setup_context=_save_max, lib=_LIB)

spread = torch.ops.weft.spread.default
segment_sum = torch.ops.weft.segment_sum.default
segment_max = torch.ops.weft.segment_max.default
