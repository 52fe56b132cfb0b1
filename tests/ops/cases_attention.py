"""attention, plain and over cut keys, and its backwards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.harness import Input, case, index, normal
from weft.core.node import op_named
from weft.ops import attention as att
from weft.ops.pointwise import uniform_at
from weft.ops.reduce import sum_
from weft.ops.shape import reshape


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, causal: bool = False, window: int = 0, offset: int = 0
) -> Any:
    """torch's own result, and the log-sum-exp of the scores."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    bias = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype) if mask is None else mask
    i, j = torch.arange(q.shape[2])[:, None] + offset, torch.arange(k.shape[2])
    bias = bias.masked_fill(j > i, -math.inf) if causal else bias
    bias = bias.masked_fill(j <= i - window, -math.inf) if window else bias
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1).mT / math.sqrt(q.shape[-1]) + bias
    return out, scores.logsumexp(-1)


def dropped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor, mask: Any = None) -> torch.Tensor:
    """Weights dropped by their place among all scores, counted over [b, h, s, t]."""
    x = q @ k.repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1).mT / math.sqrt(q.shape[-1])
    p = torch.softmax(x if mask is None else x + mask, -1)
    at = torch.arange(p.numel()).reshape(p.shape)
    p = torch.where(uniform_at(at, seed, 5) >= 0.4, p / 0.6, 0.0)
    return p @ v.repeat_interleave(q.shape[1] // max(v.shape[1], 1), 1)


def _dropping(q: Any, k: Any, v: Any, seed: Any, mask: Any = None) -> Any:
    return att.attention(q, k, v, mask=mask, dropout=(0.4, seed, 5))[0]


def _first(f: Any, **more: Any) -> Any:
    return lambda *xs: f(*xs, **more)[0]


def _both(f: Any, **more: Any) -> Any:
    return lambda *xs: tuple(f(*xs, **more))


def _shared(f: Any) -> Any:
    """Keys and values from one tensor, so that more layouts can be tried."""
    return lambda q, kv, *mask, **more: f(q, kv, kv, *mask, **more)


def _self(f: Any) -> Any:
    return lambda x, *mask, **more: f(x, x, x, *mask, **more)


def _masked(f: Any, **more: Any) -> Any:
    return lambda q, k, v, mask: f(q, k, v, mask=mask, **more)


def _back(name: str, **attrs: Any) -> Any:
    """The backward op on what the forward gave: one tensor as q, k and v, one cotangent for the result and (summed) for the lse."""

    def fn(do: Any, x: Any, *mask: Any) -> Any:
        q = reshape(x, (*x.shape[:2], 1, *x.shape[2:]))
        more = {"scale": 1 / math.sqrt(x.shape[-1]), **attrs}
        out, lse = op_named("attention")(q, x, x, *mask, **more)
        cts = [do] if name == "attention_backward" else [do, sum_(do, dims=-1)]
        return op_named(name)(*cts, q, x, x, out, lse, *mask, **more)

    return fn


def _ref_back(do: torch.Tensor, x: torch.Tensor, *mask: torch.Tensor, lse: bool, **more: Any) -> Any:
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    masks = [y.squeeze(2).clone().requires_grad_() for y in mask]
    outs = [y.unsqueeze(2) for y in reference(q, k, v, *masks, **more)]
    grads = torch.autograd.grad(outs[: 1 + lse], masks or [q, k, v], [do, do.sum(-1)][: 1 + lse])
    return grads[0].unsqueeze(2) if mask else (grads[0].unsqueeze(2), grads[1], grads[2])


def lower(s: int, t: int) -> Input:
    """A bool mask that shows every row something."""
    return Input((s, t), lambda g, _: (torch.rand(s, t, generator=g) < 0.5) | (torch.arange(t) == 0))


_VALUES = "the result follows v alone, the log-sum-exp does not: a cut of e or a pending v would hold for one of them only"

_PLAIN = [
    case(
        "attention",
        _both(att.attention),
        reference,
        normal(2, 2, 5, 3),
        normal(2, 2, 3, 3),
        normal(2, 2, 3, 2),
        inner=False,
        refused=_VALUES,
    ),
    case(
        "attention result only",
        _first(att.attention),
        _first(reference),
        normal(2, 3, 5, 2),
        normal(2, 3, 4, 2),
        normal(2, 3, 4, 2),
        inner=False,
        partial=False,
        refused=_VALUES,
    ),
    case("attention grouped", _both(_shared(att.attention)), _shared(reference), normal(2, 4, 3, 2), normal(2, 2, 5, 2)),
    case("attention of one key head", _both(_shared(att.attention)), _shared(reference), normal(2, 4, 3, 2), normal(2, 1, 5, 2)),
    case(
        "attention causal",
        _both(_shared(att.attention), causal=True),
        _both(_shared(reference), causal=True),
        normal(2, 2, 5, 3),
        normal(2, 2, 5, 3),
        local=True,
    ),
    case(
        "attention causal, offset",
        _both(_shared(att.attention), causal=True, offset=3),
        _both(_shared(reference), causal=True, offset=3),
        normal(1, 2, 2, 3),
        normal(1, 2, 5, 3),
        local=True,
    ),
    case(
        "attention windowed",
        _both(_shared(att.attention), causal=True, window=2),
        _both(_shared(reference), causal=True, window=2),
        normal(1, 2, 5, 2),
        normal(1, 2, 5, 2),
        local=True,
    ),
    case(
        "attention with dropout",
        lambda q, kv, seed: _dropping(q, kv, kv, seed),
        lambda q, kv, seed: dropped(q, kv, kv, seed),
        normal(2, 4, 3, 2),
        normal(2, 2, 5, 2),
        index(9),
        local=True,
        roots=False,
    ),
    case(
        "attention masked, with dropout",
        lambda x, m, seed: _dropping(x, x, x, seed, m),
        lambda x, m, seed: dropped(x, x, x, seed, m),
        normal(2, 2, 5, 2),
        normal(2, 1, 5, 5),
        index(9),
        local=True,
        inner=False,
        roots=False,
        partial=False,
    ),
    case("attention of itself", _both(_self(att.attention)), _self(reference), normal(2, 2, 5, 2)),
    case(
        "attention masked",
        lambda x, m: tuple(att.attention(x, x, x, mask=m)),
        _self(reference),
        normal(2, 2, 5, 2),
        normal(2, 1, 5, 5),
        inner=False,
    ),
    case(
        "attention masked by heads",
        lambda q, kv, m: tuple(att.attention(q, kv, kv, mask=m)),
        _shared(reference),
        normal(2, 4, 3, 2),
        normal(2, 2, 5, 2),
        normal(4, 3, 5),
        inner=False,
        partial=False,
    ),
    case(
        "attention masked by flags",
        lambda x, m: tuple(att.attention(x, x, x, mask=m, causal=True)),
        _both(_self(reference), causal=True),
        normal(2, 2, 5, 2),
        lower(5, 5),
        local=True,
        inner=False,
    ),
]

_KEYS = [
    case(
        "attention over keys",
        _both(att.attention_over_keys),
        reference,
        normal(1, 2, 3, 2),
        normal(1, 2, 6, 2),
        normal(1, 2, 6, 2),
        local=True,
        inner=False,
        partial=False,
    ),
    case(
        "attention over keys, causal",
        _both(_shared(att.attention_over_keys), causal=True, offset=3),
        _both(_shared(reference), causal=True, offset=3),
        normal(1, 4, 5, 2),
        normal(1, 2, 12, 2),
        local=True,
    ),
    case(
        "attention over keys, masked",
        lambda q, kv, m: tuple(att.attention_over_keys(q, kv, kv, mask=m)),
        _shared(reference),
        normal(1, 2, 3, 2),
        normal(1, 2, 6, 2),
        normal(3, 6),
        local=True,
        inner=False,
        partial=False,
    ),
]

_BACKS = [
    case(
        "attention backward",
        _back("attention_backward", causal=True),
        lambda *xs: _ref_back(*xs, lse=False, causal=True),
        normal(2, 2, 1, 5, 2),
        normal(2, 2, 5, 2),
        smooth=False,
        local=True,
    ),
    case(
        "attention lse backward",
        _back("attention_lse_backward"),
        lambda *xs: _ref_back(*xs, lse=True),
        normal(2, 2, 1, 3, 2),
        normal(2, 2, 3, 2),
        smooth=False,
    ),
    case(
        "attention mask backward",
        _back("attention_mask_backward"),
        lambda *xs: _ref_back(*xs, lse=True),
        normal(2, 2, 1, 3, 2),
        normal(2, 2, 3, 2),
        normal(1, 2, 1, 3, 3),
        smooth=False,
        inner=False,
    ),
]

CASES = [*_PLAIN, *_KEYS, *_BACKS]
