"""Attention inside packed documents by kernels of our own: a query sees the keys of its document, up to itself if it is causal.

Documents are numbers of tokens, in any order. Of every few rows the keys whose numbers may meet their own are found on the device, and only
these are read, without a look at numbers where all are one document's: exact for every numbering, and as much work as the documents are long
where they lie end to end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.runtime.custom_ops import define

FEW = 64  # tokens that are looked at together
SIZES = {  # rows and keys of a block, warps and stages of each kernel: the fastest of some on an H200
    "attend": {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3},
    "to_queries": {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3},
    "to_keys": {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3},
}
WIDE = {  # of heads above 64
    "attend": {"M": 128, "num_warps": 8, "num_stages": 2},
    "to_queries": {"M": 128, "num_warps": 8, "num_stages": 2},
    "to_keys": {"num_stages": 2},
}


@triton.jit
def _tile(base, first, count, step, D: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, D] of a tensor whose rows are `step` apart; zeros below its end."""
    at = first + tl.arange(0, N)
    return tl.load(base + at[:, None] * step + tl.arange(0, D)[None, :], mask=at[:, None] < count, other=0.0)


@triton.jit
def _seen(rows, keys, of_rows, of_keys, S, T, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows and keys along two dims, whichever is first."""
    same = (of_rows == of_keys) & (rows < S) & (keys < T)
    if CAUSAL:
        same = same & (keys <= rows)
    return same


@triton.jit
def _range(MET, at, count, MINE: tl.constexpr, THEIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks that a block of MINE tokens reads: from, to, and those between that need no look at numbers."""
    few: tl.constexpr = MINE // 64
    each: tl.constexpr = THEIRS // 64
    g = at * few + tl.arange(0, few)
    first = tl.min(tl.load(MET + g, mask=g < count, other=1 << 30)) // each
    last = tl.cdiv(tl.max(tl.load(MET + count + g, mask=g < count, other=0)), each)
    begin = tl.cdiv(tl.max(tl.load(MET + 2 * count + g, mask=g < count, other=0)), each)
    end = tl.min(tl.load(MET + 3 * count + g, mask=g < count, other=0)) // each
    begin = tl.minimum(tl.maximum(begin, first), tl.maximum(last, first))
    return first, tl.maximum(last, first), begin, tl.maximum(begin, tl.minimum(end, last))


@triton.jit
def _look(  # type: ignore[no-untyped-def]
    q, K, V, OF_KEYS, of_rows, rows, peak, total, out, start, stop, gap, over, S, T, k_s, v_s, scale,
    LOOK: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    for n in range(start, stop):
        j = n + tl.where(n >= gap, over, 0)
        k, v = _tile(K, j * N, T, k_s, D, N), _tile(V, j * N, T, v_s, D, N)
        s = tl.dot(q, tl.trans(k)) * scale
        if LOOK:
            keys = j * N + tl.arange(0, N)
            of_keys = tl.load(OF_KEYS + keys, mask=keys < T, other=0)
            s = tl.where(_seen(rows[:, None], keys[None, :], of_rows[:, None], of_keys[None, :], S, T, CAUSAL), s, float("-inf"))
        now = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(now == float("-inf"), 0.0, now) if LOOK else now
        p, left = tl.exp2(s - safe[:, None]), tl.exp2(peak - safe)
        out = tl.dot(p.to(v.dtype), v, out * left[:, None])
        total, peak = total * left + tl.sum(p, 1), now
    return peak, total, out


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    Q, K, V, OF_ROWS, OF_KEYS, MET, OUT, LSE, S, T, H, R, of_rows_step, of_keys_step, scale, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    rows = i * M + tl.arange(0, M)
    q = _tile(Q + b * q_b + h * q_h, i * M, S, q_s, D, M)
    of_rows = tl.load(OF_ROWS + b * of_rows_step + rows, mask=rows < S, other=0)
    peak, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    count = tl.cdiv(S, 64)
    first, last, begin, end = _range(MET + b * 4 * count, i, count, M, N)
    K, V, OF_KEYS = K + b * k_b + h // R * k_h, V + b * v_b + h // R * v_h, OF_KEYS + b * of_keys_step
    by = scale * 1.4426950408889634
    over = end - begin
    peak, total, out = _look(q, K, V, OF_KEYS, of_rows, rows, peak, total, out, begin, end, end, 0, S, T, k_s, v_s, by, False, CAUSAL, D, N)
    peak, total, out = _look(q, K, V, OF_KEYS, of_rows, rows, peak, total, out, first, last - over, begin, over, S, T, k_s, v_s, by, True, CAUSAL, D, N)
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(LSE + bh * S + rows, tl.where(total == 0.0, float("-inf"), (peak + tl.log2(some)) / 1.4426950408889634), mask=rows < S)
    at = (b * S + rows[:, None]) * H * D + h * D + tl.arange(0, D)[None, :]
    tl.store(OUT + at, (out / some[:, None]).to(OUT.dtype.element_ty), mask=rows[:, None] < S)


@triton.jit
def _weights(s, of_rows, of_keys, lse, rows, keys, S, T, scale, LOOK: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """From scores of queries and keys, along two dims, and the log-sum-exp again; 0 where nothing is seen."""
    p = tl.exp2(s * (scale * 1.4426950408889634) - lse * 1.4426950408889634)
    if LOOK:
        p = tl.where(_seen(rows, keys, of_rows, of_keys, S, T, CAUSAL), p, 0.0)
    return p


@triton.jit
def _some_queries(  # type: ignore[no-untyped-def]
    q, do, K, V, OF_KEYS, of_rows, rows, lse, delta, dq, start, stop, gap, over, S, T, k_s, v_s, scale,
    LOOK: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    for n in range(start, stop):
        j = n + tl.where(n >= gap, over, 0)
        keys = j * N + tl.arange(0, N)
        k, v = _tile(K, j * N, T, k_s, D, N), _tile(V, j * N, T, v_s, D, N)
        of_keys = tl.load(OF_KEYS + keys, mask=keys < T, other=0)
        s, at = tl.dot(q, tl.trans(k)), keys[None, :]
        p = _weights(s, of_rows[:, None], of_keys[None, :], lse[:, None], rows[:, None], at, S, T, scale, LOOK, CAUSAL)
        ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    return dq


@triton.jit
def _to_queries(  # type: ignore[no-untyped-def]
    DO, Q, K, V, OF_ROWS, OF_KEYS, MET, LSE, OUT, DELTA, DQ, S, T, H, R, of_rows_step, of_keys_step, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, r_b, r_h, r_s,
    CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Leaves in DELTA the sum of each row of its result times its gradient, for the kernel of the keys."""
    i, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    rows = i * M + tl.arange(0, M)
    q, do = _tile(Q + b * q_b + h * q_h, i * M, S, q_s, D, M), _tile(DO + b * o_b + h * o_h, i * M, S, o_s, D, M)
    of_rows = tl.load(OF_ROWS + b * of_rows_step + rows, mask=rows < S, other=0)
    lse = tl.load(LSE + bh * S + rows, mask=rows < S, other=0.0)
    delta = tl.sum(do.to(tl.float32) * _tile(OUT + b * r_b + h * r_h, i * M, S, r_s, D, M).to(tl.float32), 1)
    tl.store(DELTA + bh * S + rows, delta, mask=rows < S)
    dq = tl.zeros([M, D], tl.float32)
    count = tl.cdiv(S, 64)
    first, last, begin, end = _range(MET + b * 4 * count, i, count, M, N)
    K, V, OF_KEYS = K + b * k_b + h // R * k_h, V + b * v_b + h // R * v_h, OF_KEYS + b * of_keys_step
    over = end - begin
    dq = _some_queries(q, do, K, V, OF_KEYS, of_rows, rows, lse, delta, dq, begin, end, end, 0, S, T, k_s, v_s, scale, False, CAUSAL, D, N)
    dq = _some_queries(q, do, K, V, OF_KEYS, of_rows, rows, lse, delta, dq, first, last - over, begin, over, S, T, k_s, v_s, scale, True, CAUSAL, D, N)
    at = (b * S + rows[:, None]) * H * D + h * D + tl.arange(0, D)[None, :]
    tl.store(DQ + at, (dq * scale).to(DQ.dtype.element_ty), mask=rows[:, None] < S)


@triton.jit
def _some_keys(  # type: ignore[no-untyped-def]
    k, v, Q, DO, OF_ROWS, LSE, DELTA, of_keys, keys, dk, dv, start, stop, gap, over, S, T, q_s, o_s, scale,
    LOOK: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    for n in range(start, stop):
        i = n + tl.where(n >= gap, over, 0)
        rows = i * M + tl.arange(0, M)
        q, do = _tile(Q, i * M, S, q_s, D, M), _tile(DO, i * M, S, o_s, D, M)
        of_rows = tl.load(OF_ROWS + rows, mask=rows < S, other=0)
        lse, delta = tl.load(LSE + rows, mask=rows < S, other=0.0), tl.load(DELTA + rows, mask=rows < S, other=0.0)
        s, at = tl.dot(k, tl.trans(q)), keys[:, None]  # keys first, as the sums over rows read them
        p = _weights(s, of_rows[None, :], of_keys[:, None], lse[None, :], rows[None, :], at, S, T, scale, LOOK, CAUSAL)
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def _to_keys(  # type: ignore[no-untyped-def]
    DO, Q, K, V, OF_ROWS, OF_KEYS, MET, LSE, DELTA, DK, DV, S, T, H, R, of_rows_step, of_keys_step, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    j, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = group // (H // R), group % (H // R)
    keys = j * N + tl.arange(0, N)
    k, v = _tile(K + b * k_b + g * k_h, j * N, T, k_s, D, N), _tile(V + b * v_b + g * v_h, j * N, T, v_s, D, N)
    of_keys = tl.load(OF_KEYS + b * of_keys_step + keys, mask=keys < T, other=0)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    count = tl.cdiv(T, 64)
    first, last, begin, end = _range(MET + b * 4 * count, j, count, N, M)
    OF, over = OF_ROWS + b * of_rows_step, end - begin
    for r in range(R):
        h = g * R + r
        at, Qh, Oh = (b * H + h) * S, Q + b * q_b + h * q_h, DO + b * o_b + h * o_h
        L, Z = LSE + at, DELTA + at
        dk, dv = _some_keys(k, v, Qh, Oh, OF, L, Z, of_keys, keys, dk, dv, begin, end, end, 0, S, T, q_s, o_s, scale, False, CAUSAL, D, M)
        dk, dv = _some_keys(k, v, Qh, Oh, OF, L, Z, of_keys, keys, dk, dv, first, last - over, begin, over, S, T, q_s, o_s, scale, True, CAUSAL, D, M)
    at = ((b * T + keys[:, None]) * (H // R) + g) * D + tl.arange(0, D)[None, :]
    tl.store(DK + at, (dk * scale).to(DK.dtype.element_ty), mask=keys[:, None] < T)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=keys[:, None] < T)


# -- which blocks meet ---------------------------------------------------------------------------------------------------------


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of every few tokens, [batch, blocks]."""
    short = -x.shape[1] % FEW
    blocks = torch.cat([x, x[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, FEW)) if short else x.unflatten(1, (-1, FEW))
    return blocks.amin(-1), blocks.amax(-1)


def _runs(met: Tensor, same: Tensor) -> Tensor:
    """[batch, 4, blocks]: the first that is met, the one after the last, and a run of those that are one document with it."""
    n = met.shape[-1]
    count = torch.arange(n, device=met.device)
    first, last = torch.where(met, count, n).amin(-1), torch.where(met, count + 1, 0).amax(-1)
    begin = torch.where(same, count, n).amin(-1)
    end = torch.where(~same & (count > begin.unsqueeze(-1)), count, n).amin(-1)
    return torch.stack([first.minimum(last), last, begin, end], 1).to(torch.int32)


def ranges(rows: Tensor, keys: Tensor, causal: bool) -> list[Tensor]:
    """Of every few rows the keys they read, and of every few keys the rows that read them."""
    (r_least, r_most), (k_least, k_most) = _bounds(rows), _bounds(keys)
    met = (r_least[:, :, None] <= k_most[:, None]) & (r_most[:, :, None] >= k_least[:, None])
    same = (r_least[:, :, None] == k_most[:, None]) & (r_most[:, :, None] == k_least[:, None])
    i, j = torch.arange(met.shape[1], device=rows.device)[:, None], torch.arange(met.shape[2], device=rows.device)
    same = same & ((i + 1) * FEW <= rows.shape[1]) & ((j + 1) * FEW <= keys.shape[1])
    if causal:
        met, same = met & (j <= i), same & (j < i)
    return [_runs(met, same), _runs(met.transpose(1, 2), same.transpose(1, 2))]


# -- the calls -----------------------------------------------------------------------------------------------------------------


def _meta(kernel: str, q: Tensor, causal: bool) -> dict[str, Any]:
    return {"CAUSAL": causal, "D": q.shape[-1], **SIZES[kernel], **(WIDE[kernel] if q.shape[-1] > 64 else {})}


def _sizes(q: Tensor, k: Tensor, rows: Tensor, keys: Tensor) -> tuple[int, ...]:
    (_, h, s, _), (_, g, t, _) = q.shape, k.shape
    return s, t, h, h // g, rows.stride(0) if rows.shape[0] > 1 else 0, keys.stride(0) if keys.shape[0] > 1 else 0


def _by_tokens(x: Tensor) -> Tensor:
    """Room for a result like x [b, h, s, d] that lies token by token, as what follows reads it."""
    b, h, s, d = x.shape
    return x.new_empty(b, s, h, d).transpose(1, 2)


def _full_blocks(*xs: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in xs]


def _run(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, met: list[Tensor], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = _full_blocks(q, k, v)
    b, h, s, _ = q.shape
    out, lse = _by_tokens(q), torch.empty((b, h, s), dtype=torch.float32, device=q.device)
    rest = (*_sizes(q, k, rows, keys), scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    meta = _meta("attend", q, causal)
    _attend[(triton.cdiv(s, meta["M"]), b * h)](q, k, v, rows, keys, met[0], out, lse, *rest, **meta)
    return out, lse


def _run_back(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Tensor, keys: Tensor, met: list[Tensor], scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (do, q, k, v, out), lse = _full_blocks(do, q, k, v, out), lse.contiguous()
    delta = torch.empty_like(lse)
    (b, h, s, _), (_, g, t, _) = q.shape, k.shape
    dq, dk, dv = map(_by_tokens, (q, k, v))
    rest = (*_sizes(q, k, rows, keys), scale, *(n for x in (q, k, v, do) for n in x.stride()[:3]))
    one, other = _meta("to_queries", q, causal), _meta("to_keys", q, causal)
    _to_queries[(triton.cdiv(s, one["M"]), b * h)](do, q, k, v, rows, keys, met[0], lse, out, delta, dq, *rest, *out.stride()[:3], **one)
    _to_keys[(triton.cdiv(t, other["N"]), b * g)](do, q, k, v, rows, keys, met[1], lse, delta, dk, dv, *rest, **other)
    return dq, dk, dv


_forward: Any = define(
    "documents(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor keys, Tensor[] met, float scale, bool causal) -> (Tensor, Tensor)",
    _run, lambda q, *_: (_by_tokens(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)  # fmt: skip
_backward: Any = define(
    "documents_backward(Tensor d, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rows, Tensor keys, Tensor[] met, float scale,"
    " bool causal) -> (Tensor, Tensor, Tensor)",
    _run_back, lambda d, q, k, v, *_: tuple(map(_by_tokens, (q, k, v))),
)  # fmt: skip


def _heads(x: Tensor) -> Tensor:
    return x.flatten(1, 2)


def document_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor, *, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q [b, g, r, s, d], k and v [b, g, t, d], documents of rows [b or 1, s] and of keys [b or 1, t] -> result and log-sum-exp."""
    met = [x.expand(q.shape[0], -1, -1).contiguous() for x in ranges(rows, keys, causal)]
    out, lse = _forward(_heads(q), k, v, rows, keys, met, scale, causal)
    return out.unflatten(1, q.shape[1:3]), lse.unflatten(1, q.shape[1:3])


def document_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Tensor, keys: Tensor, *, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    met = [x.expand(q.shape[0], -1, -1).contiguous() for x in ranges(rows, keys, causal)]
    dq, dk, dv = _backward(_heads(do), _heads(q), k, v, _heads(out), lse.flatten(1, 2), rows, keys, met, scale, causal)
    return dq.unflatten(1, q.shape[1:3]), dk, dv
