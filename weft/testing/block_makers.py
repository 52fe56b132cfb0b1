"""Makers of the larger ops: norms, orders, lookups, attention, experts, images."""

from __future__ import annotations

from typing import Any

from weft.core.node import Node
from weft.ops.attention import attention, attention_over_keys
from weft.ops.conv import conv2d
from weft.ops.embed import embedding, gather, pick, put, scatter, scatter_sum, take
from weft.ops.experts import experts, experts_backward
from weft.ops.fill import indices
from weft.ops.loss import cross_entropy, token_losses
from weft.ops.moe import combine, dispatch, expert_slots, top_k_gates
from weft.ops.norm import layer_norm, log_softmax, rms_norm, softmax
from weft.ops.order import argmax, cumsum, sort, topk
from weft.ops.pool import adaptive_avg_pool2d, avg_pool2d, max_pool2d
from weft.ops.rotary import rotary
from weft.ops.segment import segment_max
from weft.testing.maker import Maker
from weft.testing.op_makers import makes

# -- norms, order, lookup ------------------------------------------------------------------------------------------------------------


@makes("softmax", "log_softmax")
def _softmax(m: Maker) -> Any:
    fn, x = m.rng.choice((softmax, log_softmax)), m.some(1)
    d = m.dim(x)
    return m.emit(lambda v: fn(v, d), x)


@makes("layer_norm", "rms_norm")
def _norm(m: Maker) -> Any:
    x = m.some(1)
    vectors = [m.sized(x.shape[-1:]) for _ in range(m.rng.randint(0, 2))]
    if m.rng.random() < 0.5:
        return m.emit(lambda v, *w: layer_norm(v, *w, eps=0.1), x, *vectors)
    return m.emit(lambda v, *w: rms_norm(v, *w, eps=0.1), x, *vectors[:1])


@makes("cumsum", "argmax", "sort", "topk")
def _order(m: Maker) -> Any:
    x = m.some(1)
    d = m.dim(x)
    k, transposed = m.rng.randint(min(1, x.shape[d]), x.shape[d]), m.rng.random() < 0.4
    options = (lambda v: cumsum(v, d, transposed), lambda v: argmax(v, d), lambda v: sort(v, d, transposed), lambda v: topk(v, k, d))
    return m.emit(m.rng.choice(options), x)


@makes("take")
def _take(m: Maker) -> Any:
    x = m.some(1)
    d = m.dim(x)
    if d == 0 and x.ndim == 2 and m.rng.random() < 0.3:
        return m.emit(lambda w, i: embedding(w, i, padding_idx=0), x, m.index(x.shape[0], m.shape(1, 2)))
    return m.emit(lambda v, i: take(v, i, d), x, m.index(x.shape[d], m.shape(0, 2)))


@makes("gather")
def _gather(m: Maker) -> Any:
    x = m.some(1)
    if m.rng.random() < 0.4:
        return m.emit(pick, x, m.index(x.shape[-1], x.shape[:-1]))
    d = m.dim(x)
    shape = tuple(m.rng.choice(m.sizes) if i == d else n for i, n in enumerate(x.shape))
    return m.emit(lambda v, i: gather(v, i, d), x, m.index(x.shape[d], shape))


@makes("put")
def _put(m: Maker) -> Any:
    x, rows = m.some(1), m.rng.choice(m.sizes)
    like = m.sized((rows,))
    return m.emit(lambda v, i, r: put(v, i, indices(r, 0), 0), x, m.index(rows, x.shape[:1]), like)


@makes("segment_max")
def _segment_max(m: Maker) -> Any:
    x, rows = m.some(1), m.rng.choice(m.sizes)
    return m.emit(lambda v, i, r: segment_max(v, i, indices(r, 0)), x, m.index(rows, x.shape[:1]), m.sized((rows,)))


@makes("scatter_sum")
def _scatter_sum(m: Maker) -> Any:
    x, rows = m.some(1), m.rng.choice(m.sizes)
    d, like = m.dim(x), m.sized((rows,))
    return m.emit(lambda v, i, r: scatter_sum(v, i, indices(r, 0), d), x, m.index(rows, x.shape), like)


@makes("scatter")
def _scatter(m: Maker) -> Any:
    """An index that names each row once: where a sort put them."""
    x = m.some(1)
    d = m.dim(x)
    _, order = m.emit(lambda v: sort(v, d), m.sized(x.shape))
    return m.emit(lambda v, i, s: scatter(v, i, s, d), x, order, m.sized(x.shape))


@makes("cross_entropy")
def _cross_entropy(m: Maker) -> Any:
    x = m.some(1)
    target, smoothing = m.index(x.shape[-1], x.shape[:-1]), m.rng.choice((0.0, 0.1))
    if m.rng.random() < 0.5:
        return m.emit(lambda v, t: token_losses(v, t, m.rng.choice((-100, 0)), smoothing), x, target)
    return m.emit(lambda v, t: cross_entropy(v, t, label_smoothing=smoothing), x, target)


# -- larger ones ---------------------------------------------------------------------------------------------------------------------


def _attention_inputs(m: Maker) -> tuple[Node, Node, Node]:
    b, g, r, s, t, d = (m.rng.randint(1, 3) for _ in range(6))
    return m.sized((b, g * r, s, d)), m.sized((b, g, t, d)), m.sized((b, g, t, m.rng.randint(1, 3)))


@makes("attention")
def _attention(m: Maker) -> Any:
    q, k, v = _attention_inputs(m)
    shifted = {"causal": True, "offset": k.shape[2] - q.shape[2]}
    options: dict[str, Any] = m.rng.choice(({}, {"causal": True}, {"window": 2, "causal": True}, shifted))
    fn = attention_over_keys if m.rng.random() < 0.3 else attention
    if m.rng.random() < 0.3:
        mask = m.sized((m.rng.choice((1, q.shape[0])), m.rng.choice((1, q.shape[1])), q.shape[2], k.shape[2]))
        return m.emit(lambda a, b, c, e: fn(a, b, c, mask=e, **options)[0], q, k, v, mask)
    both = m.rng.random() < 0.5
    return m.emit(lambda a, b, c: fn(a, b, c, **options) if both else fn(a, b, c, **options)[0], q, k, v)


@makes("rotary")
def _rotary(m: Maker) -> Any:
    x = m.some(2, 3, test=lambda n: n.shape[-1] % 2 == 0 and n.shape[-1] > 0)
    if x.shape[-1] % 2:
        x = m.input((*x.shape[:-1], 2 * m.rng.randint(1, 3)))
    return m.emit(lambda v: rotary(v, interleaved=m.rng.random() < 0.5, start=m.rng.randint(0, 2)), x)


@makes("expert_slots", "dispatch", "combine")
def _experts(m: Maker) -> Any:
    x = m.some(3, 3)
    e, c = m.rng.randint(1, 4), m.rng.randint(1, 3)
    logits = m.sized((*x.shape[:2], e))
    k = m.rng.randint(1, e)
    gates, choice, _ = m.emit(lambda v: top_k_gates(v, k), logits)
    slots = m.emit(lambda v: expert_slots(v, e, c), choice)
    y = m.emit(lambda v, s: dispatch(v, s, e, c), x, slots)
    return m.emit(combine, y, slots, gates)


def _through_experts(m: Maker) -> tuple[Node, list[Node], str]:
    """Tokens, then picks of experts, their weights and the experts', gated or not; and an activation."""
    x = m.some(2, 2, test=lambda n: min(n.shape) > 0)
    (t, d), e, f, k = x.shape, m.rng.randint(1, 4), m.rng.randint(1, 4), m.rng.randint(1, 3)
    more = [m.sized((e, f, d)), m.sized((e, d, f)), *(m.sized((e, f, d)) for _ in range(m.rng.randint(0, 1)))]
    return x, [m.index(e, (t, k)), m.sized((t, k)), *more], m.rng.choice(("silu", "gelu"))


@makes("experts")
def _dropless(m: Maker) -> Any:
    x, more, act = _through_experts(m)
    return m.emit(lambda *given: experts(*given, act=act), x, *more)


@makes("experts_backward")
def _dropless_backward(m: Maker) -> Any:
    x, more, act = _through_experts(m)
    return m.emit(lambda *given: experts_backward(*given, act=act), m.sized(x.shape), x, *more)


# -- images --------------------------------------------------------------------------------------------------------------------------


def _image(m: Maker) -> Node:
    return m.sized((m.rng.choice(m.sizes), m.rng.choice((2, 4)), m.rng.randint(3, 5), m.rng.randint(3, 5)))


@makes("conv2d")
def _conv(m: Maker) -> Any:
    x, groups = _image(m), m.rng.choice((1, 1, 2))
    w = m.sized((2 * m.rng.randint(1, 2), x.shape[1] // groups, m.rng.randint(1, 3), m.rng.randint(1, 3)))
    how = {"stride": m.rng.randint(1, 2), "padding": m.rng.randint(0, 1), "groups": groups}
    return m.emit(lambda a, b: conv2d(a, b, **how), x, w)


@makes("avg_pool2d")
def _avg_pool(m: Maker) -> Any:
    kernel, count = m.rng.randint(1, 3), m.rng.random() < 0.5
    return m.emit(lambda a: avg_pool2d(a, kernel, m.rng.randint(1, 2), m.rng.randint(0, kernel // 2), count_pad=count), _image(m))


@makes("adaptive_avg_pool2d")
def _adaptive(m: Maker) -> Any:
    return m.emit(lambda a: adaptive_avg_pool2d(a, (2, 3)), _image(m))


@makes("max_pool2d")
def _max_pool(m: Maker) -> Any:
    return m.emit(lambda a: max_pool2d(a, m.rng.randint(2, 3), m.rng.randint(1, 2)), _image(m))
