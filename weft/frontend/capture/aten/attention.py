"""Attention, heard above ATen: torch would choose an op by device, mask and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F

from weft.core.node import Node
from weft.frontend.capture.masks import Seen, recognised
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
    q4, k4, v4 = (_four(x, q) for x in (q, k, v))
    k4, v4 = _unrepeated(k4, v4)
    seen = recognised(r, _mask_four(attn_mask, q), q4.shape[2], k4.shape[2], is_causal)
    out = attend(r, q4, k4, v4, seen, dropout_p, scale)
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


def _unrepeated(k: Node, v: Node) -> tuple[Node, Node]:
    """Keys and values before each was repeated for the query heads of its group."""
    before, behind = _before_repeat(k), _before_repeat(v)
    same = before is not None and behind is not None and before.shape[:3] == behind.shape[:3]
    return (before, behind) if same else (k, v)  # type: ignore[return-value]


def _before_repeat(x: Node) -> Node | None:
    """[b, g, t, d], where x is [b, g, 1, t, d] stretched to [b, g, r, t, d], as [b, g * r, t, d]."""
    wide = x.args[0] if x.op.name == "reshape" else None
    if wide is None or wide.op.name != "expand" or wide.ndim != 5 or wide.args[0].ndim != 5:
        return None
    b, g, _, t, d = wide.shape
    fits = wide.args[0].shape == (b, g, 1, t, d) and x.shape == (b, g * wide.shape[2], t, d)
    return reshape(wide.args[0], (b, g, t, d)) if fits else None


def attend(r: Recorder, q: Node, k: Node, v: Node, seen: Seen, dropout: float, scale: float | None) -> Node:
    """One attention op."""
    if dropout >= 1:
        return full((*q.shape[:-1], v.shape[-1]), 0.0, r.mesh, q.dtype)
    drops = (dropout, r.seed, r.next_site()) if dropout else None
    return wa.attention(q, k, v, causal=seen.causal, window=seen.window, mask=seen.mask, scale=scale, dropout=drops)[0]
