"""Whole ops by torch's own fused kernels, called by generated code where one computes exactly the op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]  # type: ignore[no-any-return]
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)  # type: ignore[no-any-return]


def _flash_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    if not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, out, lse, 0.0, causal, scale=scale)
    none = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state of a generator that is not used
    return _aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """Keys or values [b, g, t, d] for every one of the r query heads of their group, [b, g * r, t, d]."""
    b, g, r = like.shape[:3]
    return x if r == 1 else x.unsqueeze(2).expand(b, g, r, *x.shape[2:]).reshape(b, g * r, *x.shape[2:])


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q [b, g, r, s, d], k and v [b, g, t, d] -> result and log-sum-exp, without the scores ever being whole."""
    b, g, r, s, d = q.shape
    out, lse = _flash(q.reshape(b, g * r, s, d), _heads(k, q), _heads(v, q), causal, scale)
    return out.reshape(b, g, r, s, -1), lse.reshape(b, g, r, s)


def attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, causal: bool = False) -> Any:
    b, g, r, s = q.shape[:4]
    flat = (b, g * r, s, -1)
    dq, dk, dv = _flash_backward(
        do.reshape(flat), q.reshape(flat), _heads(k, q), _heads(v, q), out.reshape(flat), lse.reshape(b, g * r, s), causal, scale
    )
    if r > 1:
        dk, dv = (x.reshape(b, g, r, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq.reshape(q.shape), dk, dv


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
    """One pass over a parameter and its moments; `own` says that the moments may be overwritten."""
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
        lr=float(lr),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    return p, m, v
