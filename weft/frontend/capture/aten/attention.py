"""Attention, heard above ATen: torch would choose an op by device, mask and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from weft.core.node import Node, constant
from weft.frontend.capture.aten.norms import drop
from weft.frontend.capture.modes import function
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import attention as wa
from weft.ops import norm as wn
from weft.ops import pointwise as w
from weft.ops.fill import arange, full
from weft.ops.linalg import einsum
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


def attend(r: Recorder, q: Node, k: Node, v: Node, mask: Node | None, dropout: float, causal: bool, scale: float | None,
           window: int = 0) -> Node:  # fmt: skip
    """One attention op; with dropout on the weights, the products and the softmax it is made of."""
    if dropout == 0:
        return wa.attention(q, k, v, causal=causal, mask=mask, scale=scale, window=window)[0]
    return _with_dropout(r, q, k, v, mask, dropout, causal, scale, window)


def _with_dropout(r: Recorder, q: Node, k: Node, v: Node, mask: Any, p: float, causal: bool, scale: float | None, window: int) -> Node:
    (b, h, s, d), g = q.shape, k.shape[1]
    q5 = reshape(q, (b, g, h // g, s, d))
    x = w.mul(einsum("bgrsd,bgtd->bgrst", q5, k), 1 / math.sqrt(d) if scale is None else float(scale))
    x = x if mask is None else _masked(r, x, _grouped(mask, g, h))
    seen = _seen(r, s, k.shape[2], causal, window)
    x = x if seen is None else w.where(seen, x, full((), -math.inf, r.mesh, x.dtype))
    y = einsum("bgrst,bgte->bgrse", drop(r, wn.softmax(x, -1), p), v)
    return reshape(y, (b, h, s, v.shape[-1]))


def _grouped(mask: Node, g: int, h: int) -> Node:
    b, heads, s, t = mask.shape
    return reshape(mask, (b, 1, 1, s, t) if heads == 1 else (b, g, h // g, s, t))


def _masked(r: Recorder, x: Node, mask: Node) -> Node:
    if mask.dtype != torch.bool:
        return w.add(x, mask)
    return w.where(mask, x, full((), -math.inf, r.mesh, x.dtype))


def _seen(r: Recorder, rows: int, keys: int, causal: bool, window: int) -> Node | None:
    """[rows, keys]: which keys a row sees."""
    row, key = reshape(arange(rows, r.mesh), (rows, 1)), arange(keys, r.mesh)
    seen = [w.le(key, row)] if causal else []
    seen += [w.gt(key, w.sub(row, constant(window, torch.int64, r.mesh)))] if window else []
    return None if not seen else seen[0] if len(seen) == 1 else w.logical_and(*seen)
