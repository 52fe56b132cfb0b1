"""Attention, heard above ATen: torch would choose an op by device, mask and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F

from weft.core.node import Node
from weft.frontend.capture.modes import function
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import attention as wa
from weft.ops.fill import full
from weft.ops.shape import expand, reshape


@function(F.scaled_dot_product_attention)
def sdpa(r: Recorder, q: Node, k: Node, v: Node, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False) -> Node:  # fmt: skip
    q, k, v = lowered(r, q, k, v)
    out = attend(r, *(_four(x, q) for x in (q, k, v)), _mask_four(attn_mask, q), dropout_p, is_causal, scale)
    return reshape(out, (*q.shape[:-1], v.shape[-1]))


def _four(x: Node, q: Node) -> Node:
    """[batch, heads, rows, features], a batch of 1 stretched to that of q."""
    lead = x.shape[:-2]
    if x.ndim < 4:
        return reshape(x, (*(lead or (1,)), 1, *x.shape[-2:]))
    wide = q.shape[:-3]
    x = expand(x, (*wide, *x.shape[-3:])) if x.shape[:-3] != wide else x
    return reshape(x, (math.prod(wide), *x.shape[-3:]))


def _mask_four(mask: Node | None, q: Node) -> Node | None:
    """[batch or 1, heads or 1, rows or 1, keys]."""
    if mask is None or mask.ndim <= 2:
        return mask if mask is None else reshape(mask, (1, 1, *(1,) * (2 - mask.ndim), *mask.shape))
    if q.ndim < 4:
        return reshape(mask, (mask.shape[0], 1, *mask.shape[-2:]))
    lead = (1,) * (q.ndim - mask.ndim) + mask.shape[:-3]
    if any(n != 1 for n in lead) and lead != q.shape[:-3]:
        mask, lead = expand(mask, (*q.shape[:-3], *mask.shape[-3:])), q.shape[:-3]
    return reshape(mask, (math.prod(lead), *mask.shape[-3:]))


def attend(r: Recorder, q: Node, k: Node, v: Node, mask: Node | None, dropout: float, causal: bool, scale: float | None) -> Node:
    """One attention op."""
    if dropout >= 1:
        return full((*q.shape[:-1], v.shape[-1]), 0.0, r.mesh, q.dtype)
    drops = (dropout, r.seed, r.next_site()) if dropout else None
    return wa.attention(q, k, v, causal=causal, mask=mask, scale=scale, dropout=drops)[0]
