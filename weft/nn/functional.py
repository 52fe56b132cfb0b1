"""Linear maps with a collective, differentiable. The gradient of a scatter is a gather, so backward overlaps as forward does.

linear_reduce_scatter   y = reduce_scatter(x w^T)      dx = all_gather(dy) w      dw = all_gather(dy)^T x
all_gather_linear       y = all_gather(x) w^T          dx = reduce_scatter(dy w)  dw = dy^T all_gather(x)
linear_all_reduce       y = all_reduce(x w^T)          dx = dy w                  dw = dy^T x
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import TypeMismatch
from weft.nn import over_group, over_peers
from weft.nn.strategies import PLAIN, Strategy, choose, divides, key_of
from weft.runtime import recorded


def _run(op: str, rows: int, x: Tensor, w: Tensor, group: Any, strategy: Strategy | None, *more: Any) -> Any:
    """The matmul `op` in the way asked for, or chosen for these shapes; plainly where the rows cannot be split so."""
    chosen = strategy or choose(key_of(op, x.shape[0], w.shape[0], x.shape[1], x.dtype, group))
    if not _fits(op, rows, group, chosen):
        chosen = Strategy(chosen.over) if _fits(op, rows, group, Strategy(chosen.over)) else PLAIN
    if chosen.over != "peers":
        return getattr(over_group, op)(x, w, group, chosen, *more)
    key = op, tuple(x.shape), x.dtype, w.data_ptr(), tuple(w.shape), w.stride(), group or dist.group.WORLD, chosen, more
    run = getattr(over_peers, op)
    return recorded.call(key, lambda given: run(given, w, group, chosen, *more), x, lambda: over_peers.rows_for(op, x, group))


def _fits(op: str, rows: int, group: Any, strategy: Strategy) -> bool:
    return strategy.over == "group" and op in over_group.UNEVEN or divides(rows, dist.get_world_size(group), strategy)


def matmul_reduce_scatter(x: Tensor, w: Tensor, group: Any = None, strategy: Strategy | None = None) -> Tensor:
    _require_even(x.shape[0], group, "rows of x")
    return _run("matmul_reduce_scatter", x.shape[0], x, w, group, strategy)  # type: ignore[no-any-return]


def matmul_all_reduce(x: Tensor, w: Tensor, group: Any = None, strategy: Strategy | None = None) -> Tensor:
    return _run("matmul_all_reduce", x.shape[0], x, w, group, strategy)  # type: ignore[no-any-return]


def gather_matmul(x: Tensor, w: Tensor, group: Any = None, strategy: Strategy | None = None, keep: bool = True) -> tuple[Tensor, Any]:
    """With `keep`, the gathered rows as well."""
    return _run("gather_matmul", x.shape[0] * dist.get_world_size(group), x, w, group, strategy, keep)  # type: ignore[no-any-return]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any, strategy: Strategy | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group, ctx.strategy = group, strategy
        return matmul_reduce_scatter(x, w, group, strategy)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx, full = gather_matmul(dy.contiguous(), w.T.contiguous(), ctx.group, ctx.strategy)
        return dx, full.T @ x, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any, strategy: Strategy | None) -> Tensor:
        y, full = gather_matmul(x, w, group, strategy, keep=ctx.needs_input_grad[1])
        ctx.save_for_backward(full, w)
        ctx.group, ctx.strategy = group, strategy
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        full, w = ctx.saved_tensors
        dx = matmul_reduce_scatter(dy.contiguous(), w.T.contiguous(), ctx.group, ctx.strategy)
        return dx, None if full is None else dy.T @ full, None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: Any, strategy: Strategy | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return matmul_all_reduce(x, w, group, strategy)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return dy @ w, dy.T @ x, None, None


def linear_reduce_scatter(x: Tensor, w: Tensor, bias: Tensor | None = None, *, group: Any = None, strategy: Strategy | None = None) -> Tensor:
    """Rows of x times w^T, summed over the ranks; each rank keeps its slice of the rows. `bias` is added once, after the sum."""
    return _flat(lambda flat: _ReduceScatter.apply(flat, w, group, strategy), x, bias)


def all_gather_linear(x: Tensor, w: Tensor, bias: Tensor | None = None, *, group: Any = None, strategy: Strategy | None = None) -> Tensor:
    """The rows of all ranks times this rank's w^T."""
    return _flat(lambda flat: _AllGather.apply(flat, w, group, strategy), x, bias)


def linear_all_reduce(x: Tensor, w: Tensor, bias: Tensor | None = None, *, group: Any = None, strategy: Strategy | None = None) -> Tensor:
    """x w^T summed over the ranks. `bias` is added once, after the sum."""
    return _flat(lambda flat: _AllReduce.apply(flat, w, group, strategy), x, bias)


def _flat(run: Callable[[Tensor], Tensor], x: Tensor, bias: Tensor | None) -> Tensor:
    """Leading dims as rows: the first is the one that is scattered or gathered."""
    y = run(x.reshape(-1, x.shape[-1]))
    y = y if bias is None else y + bias
    return y.reshape(-1, *x.shape[1:-1], y.shape[-1])


def _require_even(rows: int, group: Any, what: str) -> None:
    world = dist.get_world_size(group)
    if rows % world:
        raise TypeMismatch(f"{rows} {what} over {world} ranks", needed=f"a multiple of {world}", found=str(rows), try_="pad the sequence")
