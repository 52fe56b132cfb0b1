"""Attention, heard above ATen: torch would choose an op by device, mask and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from weft.core.node import Node
from weft.frontend.capture.known import through
from weft.frontend.capture.masks import Seen, far, recognised
from weft.frontend.capture.modes import function, to_dtype
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import attention as wa
from weft.ops import pointwise as w
from weft.ops.linalg import matmul
from weft.ops.norm import softmax
from weft.ops.shape import expand, reshape, transpose


@function(F.scaled_dot_product_attention)
def sdpa(r: Recorder, q: Node, k: Node, v: Node, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False) -> Node:  # fmt: skip
    q, k, v = lowered(r, q, k, v)
    q4, k4, v4 = (_four(x, q) for x in (q, k, v))
    if _far_rows(r, q4, k4, attn_mask, enable_gqa):
        out = _written_out(r, q4, k4, v4, _mask_four(attn_mask, q), dropout_p, scale)
        return reshape(out, (*q.shape[:-1], v.shape[-1]))
    k4, v4 = _unrepeated(k4, v4)
    seen = recognised(r, _mask_four(attn_mask, q), q4.shape[2], k4.shape[2], is_causal)
    out = attend(r, q4, k4, v4, seen, dropout_p, scale)
    return reshape(out, (*q.shape[:-1], v.shape[-1]))


def _far_rows(r: Recorder, q: Node, k: Node, mask: Node | None, grouped: bool) -> bool:
    """Whether a row may see far keys alone, where torch writes attention out: it then sees them all alike, and so do gradients.

    The log-sum-exp, from which the op and torch's kernels make their gradients, keeps no digits of such a row.
    """
    if mask is None or mask.dtype == torch.bool or not far(r, through(r, mask)):
        return False
    return r.moves(mask) or (q.shape[1] != k.shape[1] and not grouped)


def _written_out(r: Recorder, q: Node, k: Node, v: Node, mask: Any, dropout: float, scale: float | None) -> Node:
    """Products, softmax, products, as torch does it where it has no kernel."""
    heads = q.shape[1] // k.shape[1]
    k, v = (_repeated(x, heads) for x in (k, v))
    scores = w.mul(matmul(q, transpose(k)), 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale))
    weights = softmax(w.add(scores, to_dtype(mask, scores.dtype)))
    if dropout:
        weights = w.dropout(weights, r.seed, p=dropout, site=r.next_site()) if dropout < 1 else w.mul(weights, 0.0)
    return matmul(weights, v)


def _repeated(x: Node, times: int) -> Node:
    b, g, t, d = x.shape
    return x if times == 1 else reshape(expand(reshape(x, (b, g, 1, t, d)), (b, g, times, t, d)), (b, g * times, t, d))


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
    if not fits:
        return None
    inner = wide.args[0].args[0] if wide.args[0].op.name == "reshape" else wide.args[0]
    return inner if inner.shape == (b, g, t, d) else reshape(wide.args[0], (b, g, t, d))


def attend(r: Recorder, q: Node, k: Node, v: Node, seen: Seen, dropout: float, scale: float | None) -> Node:
    """One attention op."""
    if dropout >= 1:
        return w.mul(attend(r, q, k, v, seen, 0.0, scale), 0.0)
    drops = (dropout, r.seed, r.next_site()) if dropout else None
    return wa.attention(q, k, v, causal=seen.causal, window=seen.window, mask=seen.mask, scale=scale, dropout=drops)[0]
