"""Whole ops by torch's own fused kernels, called by generated code where one computes exactly the op."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    if _by_cudnn(q, k, causal):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse
    if q.dtype != torch.float32:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]  # type: ignore[no-any-return]
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse[..., : q.shape[2]]


def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, causal, scale=scale)
    if q.dtype == torch.float32:
        return _efficient_backward(do, q, k, v, out, lse, None, causal, scale)
    if _by_cudnn(q, k, causal):
        return _cudnn_backward(do, q, k, v, out, lse, None, causal, scale)
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none[0], scale=scale
    )


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Any:
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that is not used
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # rows come by 32
    if q.dtype != torch.float32:  # then the kernel reads the result as the forward kernel lays it out, whatever its strides say
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = [True, True, True, False]
    return _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, out, lse, none, none, 0.0, wanted, causal, scale=scale
    )[:3]


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Any:
    none, lse = torch.zeros((), dtype=torch.int64, device=q.device), lse.reshape(*q.shape[:3], 1)
    where = (bias, None, None, q.shape[2], k.shape[2])
    return _aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, out, lse, none, none, *where, 0.0, causal, scale=scale)


def _by_cudnn(q: Tensor, k: Tensor, causal: bool, masked: bool = False) -> bool:
    """Whether cuDNN's kernels are the quick ones: for half precision, from Hopper on."""
    if q.dtype == torch.float32 or torch.cuda.get_device_capability(q.device) < (9, 0) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return _cudnn_has(tuple(q.shape[1:]), tuple(k.shape[1:]), q.dtype, q.device, causal, masked)


@functools.cache
def _cudnn_has(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, device: torch.device, causal: bool, masked: bool) -> bool:
    """Whether it has an attention of this shape, forward and back: tried on one sample."""
    with _disable_current_modes(), torch.no_grad():
        query, key = (torch.zeros(1, *shape, dtype=dtype, device=device) for shape in (q, k))
        bias = (
            torch.zeros(1, 1, 1, -(-k[1] // 16) * 16, dtype=dtype, device=device)[..., : k[1]].expand(1, *q[:2], k[1]) if masked else None
        )
        try:
            out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(query, key, key, bias, True, 0.0, causal, False)
            _cudnn_backward(query, query, key, key, out, lse, bias, causal, 1.0)
        except RuntimeError:
            return False
        return tuple(lse.shape) == (1, *q[:2], 1)


def _masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)  # type: ignore[no-any-return]
    if _by_cudnn(q, k, False, masked=True):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, False, False, scale=scale)
        return out, lse
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, lse[..., : q.shape[2]]


def _masked_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float) -> Any:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    back = _cudnn_backward if _by_cudnn(q, k, False, masked=True) else _efficient_backward
    return back(do, q, k, v, out, lse, bias, False, scale)


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A mask [b, g, r, s, t], stretched where a size is 1, as the kernels add it, [b, g * r, s, t], and which rows see any key.

    Without infinities, whose differences are no numbers: a key that is not seen stays far below any that is.
    """
    far = -6e4 if mask.dtype == torch.float16 else -1e30  # times a few it is still a number
    bias = torch.where(mask == -torch.inf, far, mask.clamp(min=far / 2))
    seen = (mask > -torch.inf).any(-1, keepdim=True)
    short = -bias.shape[-1] % 16 if bias.shape[-1] > 1 else 0
    bias = torch.nn.functional.pad(bias, (0, short))[..., : bias.shape[-1]] if short and q.is_cuda else bias  # rows start every 16 numbers
    b, g, r, s = q.shape[:4]
    heads = (1, 1) if bias.shape[1:3] == (1, 1) else (g, r)
    flat = bias.expand(-1, *heads, -1, -1).flatten(1, 2)
    return flat.expand(b, g * r, s, k.shape[2]), seen  # stretched last of all, so that it is not written out


def _shares_keys(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel itself lets several query heads read one key head."""
    return q.is_cuda and q.dtype != torch.float32 and mask is None


def _heads(x: Tensor, like: Tensor, mask: Tensor | None) -> Tensor:
    """Keys or values [b, g, t, d] for every one of the r query heads of their group, [b, g * r, t, d]."""
    b, g, r = like.shape[:3]
    return x if r == 1 or _shares_keys(like, mask) else x.unsqueeze(2).expand(b, g, r, *x.shape[2:]).reshape(b, g * r, *x.shape[2:])


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q [b, g, r, s, d], k and v [b, g, t, d] -> result and log-sum-exp, without the scores ever being whole."""
    b, g, r, s, d = q.shape
    flat = q.reshape(b, g * r, s, d), _heads(k, q, mask), _heads(v, q, mask)
    if mask is None:
        out, lse = _flash(*flat, causal, scale)
        return out.reshape(b, g, r, s, -1), lse.reshape(b, g, r, s)
    bias, seen = _bias(mask, q, k)
    out, lse = _masked(*flat, bias, scale)
    return torch.where(seen, out.reshape(b, g, r, s, -1), 0.0), torch.where(seen[..., 0], lse.reshape(b, g, r, s), -torch.inf)


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None = None, *, scale: float, causal: bool = False
) -> Any:
    b, g, r, s = q.shape[:4]
    flat = (b, g * r, s, -1)
    ours = q.reshape(flat), _heads(k, q, mask), _heads(v, q, mask), out.reshape(flat)
    if mask is None:
        dq, dk, dv = _flash_backward(do.reshape(flat), *ours, lse.reshape(b, g * r, s), causal, scale)
    else:
        bias, seen = _bias(mask, q, k)
        lse = torch.where(seen[..., 0], lse, torch.inf)  # so that the weights of a row that sees no key are 0
        dq, dk, dv = _masked_backward(do.reshape(flat), *ours, lse.reshape(b, g * r, s), bias, scale)
    if r > 1 and not _shares_keys(q, mask):
        dk, dv = (x.reshape(b, g, r, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq.reshape(q.shape), dk, dv


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
    p = torch.softmax(x.to(ct.dtype), -1)
    if x.is_cuda:  # a comparison fuses with the rest, a scatter does not
        hit = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
        return ((p - hit.to(p.dtype)) * scale).to(x.dtype)
    at = torch.where(keep, target, 0).long().unsqueeze(-1)
    return p.scatter_add_(-1, at, torch.full_like(at, -1, dtype=p.dtype)).mul_(scale).to(x.dtype)


def put(x: Tensor, index: Tensor, rows: Tensor, *, dim: int) -> Tensor:
    """Every slice of x added to the row its index names; `rows` are the ascending rows held, of which an index may miss."""
    held = rows.numel()
    flat = index.reshape(-1)
    x = x.reshape(*x.shape[:dim], flat.numel(), *x.shape[dim + index.ndim :])
    at = torch.searchsorted(rows, flat.contiguous()).clamp(max=max(held - 1, 0))
    hit = (rows[at] == flat) if held else torch.zeros_like(flat, dtype=torch.bool)
    x = torch.where(hit.reshape(-1, *(1,) * (x.ndim - 1 - dim)), x, torch.zeros((), dtype=x.dtype, device=x.device))
    return x.new_zeros(*x.shape[:dim], held, *x.shape[dim + 1 :]).index_add_(dim, at, x)


def put_all(x: Tensor, index: Tensor, *, dim: int, rows: int) -> Tensor:
    """The same where all rows are held."""
    if dim == 0:
        row = x.shape[index.ndim :]
        flat = x.reshape(index.numel(), math.prod(row))
        return _aten.embedding_dense_backward(flat, index.reshape(-1), rows, -1, False).reshape(rows, *row)  # type: ignore[no-any-return]
    x = x.reshape(*x.shape[:dim], index.numel(), *x.shape[dim + index.ndim :])
    return x.new_zeros(*x.shape[:dim], rows, *x.shape[dim + 1 :]).index_add_(dim, index.reshape(-1), x)


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
    update(
        ps, [g.contiguous() for g in gs], ms, vs, [], [count] * len(ps), lr=rate, beta1=betas[0], beta2=betas[1],
        weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


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
    p = p.clone()
    m, v = (m, v) if own else (m.clone(), v.clone())
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
    rate, count = lr.to(p.device, torch.float32), step.to(p.device, torch.float32)
    g = g if decoupled else g + decay * p
    m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    root = v.sqrt() / (1 - betas[1] ** count).sqrt() + eps
    kept = p * (1 - rate * decay) if decoupled else p
    return (kept - rate / (1 - betas[0] ** count) * m / root).to(p.dtype), m.to(p.dtype), v.to(p.dtype)
