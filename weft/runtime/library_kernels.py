"""Entire ops by torch's own fused kernels, called by generated code where one computes exactly the op."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from weft.runtime.deduplicate import barrier as barrier
from weft.runtime.fused_attention import attention as attention
from weft.runtime.fused_attention import attention_backward as attention_backward
from weft.runtime.grouped import experts as experts
from weft.runtime.grouped import experts_backward as experts_backward
from weft.runtime.host_memory import from_host as from_host
from weft.runtime.host_memory import landed as landed
from weft.runtime.host_memory import to_host as to_host

_aten = torch.ops.aten


def layer_norm(x: Tensor, *vectors: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, and the mean and deviation its backward needs."""
    weight, bias = (*vectors, None, None)[:2]
    return _aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)  # type: ignore[no-any-return]


def layer_norm_backward(ct: Tensor, x: Tensor, *weight: Tensor, eps: float, vectors: int, statistics: Any = None) -> Any:
    mean, deviation = statistics or layer_norm(x, eps=eps)[1:]
    w = weight[0] if weight else None
    wanted = [True, vectors > 0, vectors > 1]
    out = _aten.native_layer_norm_backward(ct, x, [x.shape[-1]], mean, deviation, w, w if vectors > 1 else None, wanted)
    return out[: 1 + vectors] if vectors else out[0]


def cross_entropy_backward(ct: Tensor, x: Tensor, target: Tensor, *, ignore_index: int, smoothing: float) -> Tensor:
    """The softmax less one at the target, times the cotangent."""
    keep = target != ignore_index
    scale = torch.where(keep, ct, torch.zeros((), dtype=ct.dtype, device=ct.device)).unsqueeze(-1)
    if x.is_cuda:  # the log-softmax is the loss's own, made once; a comparison fuses with the rest, a scatter does not
        p = torch.log_softmax(x.to(ct.dtype), -1).exp()
        hit = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
        return ((p - hit.to(p.dtype)) * scale).to(x.dtype)
    p = torch.softmax(x.to(ct.dtype), -1)
    at = torch.where(keep, target, 0).long().unsqueeze(-1)
    return p.scatter_add_(-1, at, torch.full_like(at, -1, dtype=p.dtype)).mul_(scale).to(x.dtype)


def put(x: Tensor, index: Tensor, rows: Tensor, *, dim: int) -> Tensor:
    """Every slice of x added to the row its index names; `rows` are the ascending rows held, of which an index may miss."""
    rows_stored = rows.numel()
    flat = index.reshape(-1)
    x = x.reshape(*x.shape[:dim], flat.numel(), *x.shape[dim + index.ndim :])
    traced = isinstance(flat, FakeTensor)  # Inductor does not search in what it makes on the way; to count, it reads once
    at = (rows < flat.unsqueeze(-1)).sum(-1) if traced else torch.searchsorted(rows, flat.contiguous())
    at = at.clamp(max=max(rows_stored - 1, 0))
    hit = (rows[at] == flat) if rows_stored else torch.zeros_like(flat, dtype=torch.bool)
    x = torch.where(hit.reshape(-1, *(1,) * (x.ndim - 1 - dim)), x, torch.zeros((), dtype=x.dtype, device=x.device))
    return x.new_zeros(*x.shape[:dim], rows_stored, *x.shape[dim + 1 :]).index_add_(dim, at, x)


def put_all(x: Tensor, index: Tensor, *, dim: int, rows: int) -> Tensor:
    """The same where all rows are here."""
    if dim == 0:
        row = x.shape[index.ndim :]
        flat = x.reshape(index.numel(), math.prod(row))
        return _aten.embedding_dense_backward(flat, index.reshape(-1), rows, -1, False).reshape(rows, *row)  # type: ignore[no-any-return]
    x = x.reshape(*x.shape[:dim], index.numel(), *x.shape[dim + index.ndim :])
    return x.new_zeros(*x.shape[:dim], rows, *x.shape[dim + 1 :]).index_add_(dim, index.reshape(-1), x)


def put_run(x: Tensor, index: Tensor, *, dim: int, rows: range) -> Tensor:
    """The same where rows without a gap are here."""
    at = index - rows.start
    hit = (at >= 0) & (at < len(rows))
    shape = (*(1,) * dim, *index.shape, *(1,) * (x.ndim - dim - index.ndim))
    x = torch.where(hit.view(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))
    return put_all(x, torch.where(hit, at, 0), dim=dim, rows=len(rows))


def conv2d_backward(ct: Tensor, x: Tensor, w: Tensor, *, stride: Any, padding: Any, dilation: Any) -> tuple[Tensor, Tensor]:
    """The gradients by input and by weight; with five dims, groups stand before the channels."""
    groups = w.shape[0] if w.ndim == 5 else 1
    flat = [y.flatten(1, 2) if y.ndim == 5 else y for y in (ct, x)]
    kernel = w.flatten(0, 1) if w.ndim == 5 else w
    dx, dw, _ = _aten.convolution_backward(*flat, kernel, None, stride, padding, dilation, False, [0, 0], groups, [True, True, False])
    return dx.reshape(x.shape), dw.reshape(w.shape)


def adam_(
    ps: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], lr: Tensor, step: Tensor, *,
    betas: Any, eps: float, decay: float, decoupled: bool,
) -> None:  # fmt: skip
    """All parameters and their moments in one pass, in place."""
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = step.to(ps[0].device, torch.float32)
    rate = lr.to(ps[0].device, torch.float32) if ps[0].is_cuda else float(lr)
    full = [[x.contiguous() for x in xs] for xs in (ps, gs, ms, vs)]  # the kernel takes all four for one piece of memory each
    update(
        *full, [], [count] * len(ps), lr=rate, beta1=betas[0], beta2=betas[1],
        weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
    for x, new in zip((*ps, *ms, *vs), (*full[0], *full[2], *full[3]), strict=True):
        if new is not x:
            x.copy_(new)


def adam(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    lr: Tensor,
    step: Tensor,
    *,
    betas: Any,
    eps: float,
    decay: float,
    decoupled: bool,
    own: bool,
) -> Any:
    """One pass over a parameter and its moments; `own` says that the moments may be overwritten. In a trace, in ops that fuse."""
    if isinstance(p, FakeTensor):
        return _adam_in_ops(p, g, m, v, lr, step, betas=betas, eps=eps, decay=decay, decoupled=decoupled)
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    p = p.clone(memory_format=torch.contiguous_format)
    own = own and m.is_contiguous() and v.is_contiguous()
    m, v = (m, v) if own else (m.clone(memory_format=torch.contiguous_format), v.clone(memory_format=torch.contiguous_format))
    update(
        [p],
        [g.contiguous()],
        [m],
        [v],
        [],
        [step.to(p.device, torch.float32)],
        lr=lr.to(p.device, torch.float32) if p.is_cuda else float(lr),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    return p, m, v


def _adam_in_ops(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, step: Tensor, *, betas: Any, eps: float, decay: float, decoupled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What depends on the step alone is computed in float64: 1 - 0.999 has few digits left in less."""
    rate, count = lr.to(p.device, torch.float64), step.to(p.device, torch.float64)
    g = g if decoupled else g + decay * p
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    root = v.sqrt() / (1 - betas[1] ** count).sqrt().to(p.dtype) + eps
    kept = p * (1 - rate * decay).to(p.dtype) if decoupled else p
    return (kept - (rate / (1 - betas[0] ** count)).to(p.dtype) * m / root).to(p.dtype), m.to(p.dtype), v.to(p.dtype)


def document_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, **how: Any) -> Any:
    """Attention among tokens of one number; rows [.., s, 1] and keys [.., 1, t], a batch before them or none."""
    from weft.runtime import document_attention as kernels  # Triton's, which not every machine has

    return kernels.document_attention(q, k, v, rows.reshape(-1, q.shape[3]), keys.reshape(-1, k.shape[2]), **how)


def document_attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Tensor, keys: Tensor, **how: Any) -> Any:
    from weft.runtime import document_attention as kernels

    return kernels.document_attention_backward(do, q, k, v, out, lse, rows.reshape(-1, q.shape[3]), keys.reshape(-1, k.shape[2]), **how)
