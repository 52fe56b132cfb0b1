"""Transformer blocks as one device would write them, and with the sum over tp where Megatron has it; bias, dropout, residual, norm."""

from __future__ import annotations

from typing import Any

from weft import lang as w
from weft.core.layout import Mesh, P, S
from weft.core.program import Program
from weft.frontend.trace import tensor, trace
from weft.ops.attention import attention
from weft.ops.norm import layer_norm

DROPOUT = 0.1


def close(y: Any, bias: Any, residual: Any, seed: Any, gain: Any, shift: Any, p: float, site: int) -> Any:
    """What follows the matmul of a block: bias, dropout, residual, norm."""
    return layer_norm(w.dropout(y + bias, seed, p=p, site=site) + residual, gain, shift)


def heads(x: Any, n: int) -> Any:
    """[b, s, n * d] as [b, n, s, d]"""
    b, s, h = x.shape
    return w.permute(w.reshape(x, b, s, n, h // n), 0, 2, 1, 3)


def unheads(x: Any) -> Any:
    b, n, s, d = x.shape
    return w.reshape(w.permute(x, 0, 2, 1, 3), b, s, n * d)


def mlp(
    mesh: Mesh, batch: int, seq: int, hidden: int, *, ffn: int | None = None, p: float = DROPOUT, dtype: str = "f32", tp: str | None = "tp"
) -> Program:
    """The feed-forward block. With `tp`, its weights are sharded column then row and its sum is there; without, it is replicated."""
    f = ffn or 4 * hidden

    def block(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, gain: Any, shift: Any, seed: Any) -> Any:
        y = w.gelu(x @ w1 + b1) @ w2
        return close(w.all_reduce(y, tp) if tp else y, b2, x, seed, gain, shift, p, 0)

    t, d = _typed(dtype), tp
    shard = (lambda k: {d: S(k)}) if d else (lambda k: {})
    return trace(
        block,
        mesh,
        name="mlp",
        x=t(batch, seq, hidden),
        w1=t(hidden, f, **shard(1)),
        b1=t(f, **shard(0)),
        w2=t(f, hidden, **shard(0)),
        b2=t(hidden),
        gain=t(hidden),
        shift=t(hidden),
        seed=tensor("i64"),
    )


def self_attention(
    mesh: Mesh,
    batch: int,
    seq: int,
    hidden: int,
    *,
    n_heads: int = 4,
    p: float = DROPOUT,
    causal: bool = True,
    dtype: str = "f32",
    tp: str | None = "tp",
) -> Program:
    """The self-attention block, heads sharded over `tp` where given."""

    def block(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, bo: Any, gain: Any, shift: Any, seed: Any) -> Any:
        q, k, v = (heads(x @ m, n_heads) for m in (wq, wk, wv))
        out, _ = attention(q, k, v, causal=causal)
        y = unheads(out) @ wo
        return close(w.all_reduce(y, tp) if tp else y, bo, x, seed, gain, shift, p, 1)

    t = _typed(dtype)
    col, row = ({tp: S(1)}, {tp: S(0)}) if tp else ({}, {})
    column = t(hidden, hidden, **col)
    return trace(
        block,
        mesh,
        name="self_attention",
        x=t(batch, seq, hidden),
        wq=column,
        wk=column,
        wv=column,
        wo=t(hidden, hidden, **row),
        bo=t(hidden),
        gain=t(hidden),
        shift=t(hidden),
        seed=tensor("i64"),
    )


def projection(
    mesh: Mesh, batch: int, seq: int, hidden: int, *, inner: int | None = None, p: float = DROPOUT, dtype: str = "f32", tp: str = "tp"
) -> Program:
    """CoCoNet's model-parallel segment: a matmul whose inner dim is sharded, its sum, bias, dropout and residual."""

    def segment(x: Any, m: Any, b: Any, r: Any, seed: Any) -> Any:
        return w.dropout(w.all_reduce(x @ m, tp) + b, seed, p=p, site=0) + r

    t, k = _typed(dtype), inner or hidden
    return trace(
        segment,
        mesh,
        name="projection",
        x=t(batch, seq, k, **{tp: S(2)}),
        m=t(k, hidden, **{tp: S(0)}),
        b=t(hidden),
        r=t(batch, seq, hidden),
        seed=tensor("i64"),
    )


def boundary(
    mesh: Mesh, batch: int, seq: int, hidden: int, *, p: float = DROPOUT, dtype: str = "f32", tp: str = "tp", pp: str = "pp"
) -> Program:
    """The pipeline boundary: a sum over tp at one stage, bias, dropout and residual, and the send to the next."""
    from weft.core.layout import O

    def segment(y: Any, b: Any, r: Any, seed: Any) -> Any:
        return w.send(w.dropout(w.all_reduce(y, tp) + b, seed, p=p, site=0) + r, pp, to=1)

    t, here = _typed(dtype), {pp: O(0)}
    return trace(
        segment,
        mesh,
        name="boundary",
        y=t(batch, seq, hidden, **{tp: P()}, **here),
        b=t(hidden, **here),
        r=t(batch, seq, hidden, **here),
        seed=tensor("i64"),
    )


def _typed(dtype: str) -> Any:
    return lambda *shape, **places: tensor(dtype, *shape, **places)
