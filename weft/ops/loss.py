"""cross_entropy: one op and its backward where the vocabulary is replicated, three reductions where it is sharded."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.node import Attrs, Node, constant, user_line
from weft.ops.comm import all_reduce_partials
from weft.ops.embed import need_index, pick
from weft.ops.fill import indices, is_sharded, stop_gradient
from weft.ops.norm import need_float, softmax, to_dtype, wide, wide_dtype
from weft.ops.pointwise import cast, eq, exp, log, ne, where
from weft.ops.reduce import amax, mean, sum_
from weft.ops.registry import Equation, Kind, Linear, Types, define
from weft.ops.shape import reshape


def _token_equation(types: Types, attrs: Attrs) -> Equation:
    need_float("cross_entropy", types, 0)
    need_index("cross_entropy", types, 1)
    if not types[0].shape:
        raise TypeMismatch("cross_entropy takes logits [..., v]", needed="a last dim of classes", found=str(types[0]), where=user_line())
    rows = tuple(f"d{i}" for i in range(len(types[0].shape) - 1))
    return Equation(((*rows, "v"), rows), (rows,), unsharded=frozenset("v"))


def _token_run(x: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float) -> torch.Tensor:
    logp = torch.log_softmax(wide(x), -1)
    keep = target != ignore_index
    at = torch.where(keep, target, 0).long()
    loss = -logp.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * logp.mean(-1)
    return torch.where(keep, loss, torch.zeros((), dtype=loss.dtype, device=x.device))


def _back_equation(types: Types, attrs: Attrs) -> Equation:
    logits, rows = _token_equation(types[1:], attrs).ins
    return Equation((rows, logits, rows), (logits,), unsharded=frozenset("v"))


def _back_run(ct: torch.Tensor, x: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float) -> torch.Tensor:
    keep = target != ignore_index
    at = torch.where(keep, target, 0).long().unsqueeze(-1)
    p = torch.softmax(wide(x), -1)
    slope = p.scatter_add(-1, at, torch.full_like(at, smoothing - 1, dtype=p.dtype)) - smoothing / x.shape[-1]
    return (slope * torch.where(keep, ct, torch.zeros_like(ct)).unsqueeze(-1)).to(x.dtype)


def _back_written(ct: Node, x: Node, target: Node, ignore_index: int, smoothing: float) -> Any:
    """The same in ops, for a gradient of the gradient, and where classes are sharded: each rank knows which it holds."""
    w = to_dtype(x, wide_dtype(x.dtype))
    classes = reshape(indices(x, -1), (*(1,) * target.ndim, x.shape[-1]))
    hit = cast(eq(to_dtype(reshape(target, (*target.shape, 1)), torch.int64), classes), dtype=w.dtype)
    slope = _chances(w) - ((1 - smoothing) * hit + smoothing / x.shape[-1])
    kept = where(ne(target, ignore_index), to_dtype(ct, w.dtype), constant(0.0, w.dtype, x.mesh))
    return to_dtype(slope * reshape(kept, (*kept.shape, 1)), x.dtype)


def _chances(w: Node) -> Any:
    if not is_sharded(w, -1):
        return softmax(w)
    peak, norm = _peak_and_norm(w)
    return exp(w - (peak + norm))


def _peak_and_norm(w: Node) -> tuple[Any, Any]:
    """The largest logit and log(sum(exp(w - largest))), one all_reduce each where classes are sharded; forward and backward pass share them."""
    peak = all_reduce_partials(amax(stop_gradient(w), dims=-1, keepdim=True))
    return peak, log(all_reduce_partials(sum_(exp(w - peak), dims=-1, keepdim=True)))


def _token_across(x: Node, target: Node, ignore_index: int, smoothing: float) -> Any:
    """Sharded classes: the maximum, the sum and the target's logit are reduced, each as small as the targets."""
    w = to_dtype(x, wide_dtype(x.dtype))
    keep = ne(target, ignore_index)
    peak, norm = _peak_and_norm(w)
    picked = all_reduce_partials(pick(w, where(keep, target, constant(0, target.dtype, target.mesh))))
    top, norm = (reshape(t, target.shape) for t in (peak, norm))
    loss = norm + (top - picked)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (norm + (top - all_reduce_partials(mean(w, -1))))
    return where(keep, loss, 0.0)


_cross_entropy_backward = define(
    "cross_entropy_backward",
    kind=Kind.COMPOSITE,
    equation=_back_equation,
    run=_back_run,
    dtype=lambda types, attrs: types[1].dtype,
    linear=Linear.FIRST,
    written=_back_written,
    across=_back_written,
    flops=lambda n: 8.0 * math.prod(n.args[1].type.layout.largest_local),
    transcendental=True,
)

cross_entropy_op = define(
    "cross_entropy",
    kind=Kind.COMPOSITE,
    equation=_token_equation,
    run=_token_run,
    dtype=lambda types, attrs: wide_dtype(types[0].dtype),
    vjp=lambda n, ct: (_cross_entropy_backward(ct, *n.args, **dict(n.attrs)), None),
    across=_token_across,
    flops=lambda n: 6.0 * math.prod(n.args[0].type.layout.largest_local),
    doc="the loss of every target, 0 where it is ignored",
    transcendental=True,
)


def token_losses(logits: Any, target: Any, ignore_index: int = -100, label_smoothing: float = 0.0) -> Any:
    """logits [..., v], target [...] -> losses [...], 0 where ignored; a sharded vocabulary costs three small all_reduces."""
    apply = _token_across if is_sharded(logits, -1) else cross_entropy_op
    return apply(logits, target, ignore_index=ignore_index, smoothing=float(label_smoothing))


def cross_entropy(logits: Any, target: Any, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean") -> Any:
    """The classes in the last dim. The mean is over all kept targets of all ranks; where targets are sharded it is a partial sum."""
    losses = token_losses(logits, target, ignore_index, label_smoothing)
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise TypeMismatch("cross_entropy has no such reduction", needed="mean, sum or none", found=repr(reduction), where=user_line())
    return sum_(losses) if reduction == "sum" else sum_(losses) / _kept(losses, target, ignore_index)


def _kept(losses: Node, target: Node, ignore_index: int) -> Any:
    """How many targets count, exactly: integers are summed."""
    count = all_reduce_partials(sum_(cast(ne(target, ignore_index), dtype="i64")))
    return cast(count, dtype=losses.dtype)


__all__ = ["cross_entropy", "token_losses"]
