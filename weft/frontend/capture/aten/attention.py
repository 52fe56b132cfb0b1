"""Attention, intercepted as a torch function: torch would choose an op by device, mask and dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from weft.core.node import Node
from weft.frontend.capture.constants import through
from weft.frontend.capture.handlers import function
from weft.frontend.capture.masks import Seen, far, recognised
from weft.frontend.capture.precision import lowered
from weft.frontend.capture.recorder import Recorder
from weft.ops import attention as wa
from weft.ops import pointwise as w
from weft.ops.shape import expand, expand_op, reshape, reshape_op


@function(F.scaled_dot_product_attention)
def sdpa(r: Recorder, q: Node, k: Node, v: Node, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
         scale: float | None = None, enable_gqa: bool = False) -> Node:  # fmt: skip
    q, k, v = lowered(r, q, k, v)
    lead, (q4, k4, v4) = _four(q, k, v)
    mask = _mask_four(attn_mask, lead)
    k4, v4 = _unrepeated(k4, v4)
    seen = recognised(r, mask, q4.shape[2], k4.shape[2], is_causal)
    out = attend(r, q4, k4, v4, seen, dropout_p, scale, _written_out(r, q, k, v, attn_mask, dropout_p, enable_gqa))
    return reshape(out, (*lead, q.shape[-2], v.shape[-1]))


def _written_out(r: Recorder, q: Node, k: Node, v: Node, mask: Node | None, dropout: float, grouped: bool) -> str:
    """Where torch has no kernel and writes attention out: on "any" device, on a "cpu", or nowhere.

    A GPU's kernels train masks, but not one by which a row may see far keys alone."""
    if any(x.ndim != 4 for x in (q, k, v)) or q.shape[-1] != v.shape[-1] or (q.shape[1] != k.shape[1] and not grouped):
        return "any"
    if mask is not None and r.moves(mask):
        return "any" if far(r, through(r, mask)) else "cpu"
    return "cpu" if dropout > 0 else ""


def _four(*xs: Node) -> tuple[tuple[int, ...], list[Node]]:
    """The dims before rows and features of what attention gives, and q, k and v as [batch, heads, rows, features].

    Where q has more heads than k or v they stay as they are: several query heads read one key head.
    """
    rank = max(x.ndim for x in xs)
    q, k, v = (reshape(x, (*(1,) * (rank - x.ndim), *x.shape)) for x in xs)
    if rank < 4:
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
        return lead, [reshape(_stretched(x, lead), (*(lead or (1,)), 1, *x.shape[-2:])) for x in (q, k, v)]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    few = torch.broadcast_shapes(k.shape[-3:-2], v.shape[-3:-2])  # key heads
    many = q.shape[-3:-2] if q.shape[-3] != 1 else few
    wide = [_stretched(x, (*batch, *heads)) for x, heads in ((q, many), (k, few), (v, few))]
    return (*batch, *many), [reshape(x, (math.prod(batch), *x.shape[-3:])) for x in wide]


def _stretched(x: Node, lead: tuple[int, ...]) -> Node:
    return x if x.shape[:-2] == lead else expand(x, (*lead, *x.shape[-2:]))


def _mask_four(mask: Node | None, lead: tuple[int, ...]) -> Node | None:
    """[batch or 1, heads or 1, rows or 1, keys], for a result with these dims before its rows."""
    if mask is None:
        return None
    if len(lead) < 2:  # no heads
        lead = (*(lead or (1,)), 1)
        mask = reshape(mask, (mask.shape[0], 1, *mask.shape[1:])) if mask.ndim > 2 else mask
    mask = reshape(mask, (*(1,) * (len(lead) + 2 - mask.ndim), *mask.shape))
    own = mask.shape[:-3]
    if any(n != 1 for n in own) and own != lead[:-1]:
        mask, own = expand(mask, (*lead[:-1], *mask.shape[-3:])), lead[:-1]
    return reshape(mask, (math.prod(own), *mask.shape[-3:]))


def _unrepeated(k: Node, v: Node) -> tuple[Node, Node]:
    """Keys and values before each was repeated for the query heads of its group."""
    before, behind = _before_repeat(k), _before_repeat(v)
    same = before is not None and behind is not None and before.shape[:3] == behind.shape[:3]
    return (before, behind) if same else (k, v)  # type: ignore[return-value]


def _before_repeat(x: Node) -> Node | None:
    """[b, g, t, d], where x is [b, g, 1, t, d] stretched to [b, g, r, t, d], as [b, g * r, t, d]."""
    wide = x.args[0] if x.op is reshape_op else None
    if wide is None or wide.op is not expand_op or wide.ndim != 5 or wide.args[0].ndim != 5:
        return None
    b, g, _, t, d = wide.shape
    fits = wide.args[0].shape == (b, g, 1, t, d) and x.shape == (b, g * wide.shape[2], t, d)
    if not fits:
        return None
    inner = wide.args[0].args[0] if wide.args[0].op is reshape_op else wide.args[0]
    return inner if inner.shape == (b, g, t, d) else reshape(wide.args[0], (b, g, t, d))


def attend(r: Recorder, q: Node, k: Node, v: Node, seen: Seen, dropout: float, scale: float | None, written_out: str = "") -> Node:
    """One attention op."""
    if dropout >= 1:
        return w.mul(attend(r, q, k, v, seen, 0.0, scale, written_out), 0.0)
    drops = (dropout, r.seed, r.next_site()) if dropout else None
    how = {"causal": seen.causal, "window": seen.window, "mask": seen.mask, "scale": scale}
    return wa.attention(q, k, v, **how, dropout=drops, written_out=written_out)[0]
