"""Rows of experts taken, activated and summed by kernels that stop at the rows held: how many these are is known on the device alone.

Everything behind the last row held is left as it lies, and read by nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.runtime.custom_ops import define

KINDS = {"silu": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "clamped": 4}
SOME = 8  # rows of one program


@triton.jit
def _take(X, ORDER, COUNT, OUT, K, D, ROWS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    count = tl.load(COUNT)
    if tl.program_id(0) * ROWS < count:
        column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        inside = (i[:, None] < count) & (column[None, :] < D)
        token = tl.load(ORDER + i, mask=i < count, other=0) // K
        tl.store(OUT + i[:, None] * D + column[None, :], tl.load(X + token[:, None] * D + column[None, :], mask=inside, other=0.0), mask=inside)


@triton.jit
def _sum(ROWS, MORE, PLACE, WEIGHTS, COUNT, OUT, K, D, TWO: tl.constexpr, WEIGHED: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    t, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total, count = tl.zeros([WIDE], tl.float32), tl.load(COUNT)
    for j in range(K):
        at = tl.load(PLACE + t * K + j)
        here = (column < D) & (at < count)
        row = tl.load(ROWS + at * D + column, mask=here, other=0.0).to(tl.float32)
        if TWO:
            row += tl.load(MORE + at * D + column, mask=here, other=0.0).to(tl.float32)
        if WEIGHED:
            row *= tl.load(WEIGHTS + t * K + j).to(tl.float32)
        total += row
    tl.store(OUT + t * D + column, total.to(OUT.dtype.element_ty), mask=column < D)


@triton.jit
def _act(x, KIND: tl.constexpr, slope, limit):  # type: ignore[no-untyped-def]
    """An activation and its derivative."""
    if KIND == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    elif KIND == 1:
        return tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif KIND == 2:
        half = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * half, half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == 3:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        half = tl.sigmoid(2 * inner)
        return x * half, half + x * half * (1 - half) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    else:
        c = tl.minimum(x, limit)
        s = tl.sigmoid(slope * c)
        return c * s, tl.where(x <= limit, s + slope * c * s * (1 - s), 0.0)


@triton.jit
def _activate(UP, GATE, COUNT, OUT, F, slope, limit, shift, GATED: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    count = tl.load(COUNT)
    if tl.program_id(0) * ROWS < count:
        column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        inside = (i[:, None] < count) & (column[None, :] < F)
        at = i[:, None] * F + column[None, :]
        up = tl.load(UP + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            if KIND == 4:
                up = tl.minimum(tl.maximum(up, -limit), limit) + shift
            out = _act(tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32), KIND, slope, limit)[0] * up
        else:
            out = _act(up, KIND, slope, limit)[0]
        tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _activate_back(  # type: ignore[no-untyped-def]
    UP, GATE, BACK, WEIGHTS, COUNT, H, DUP, DGATE, DW, F, slope, limit, shift,
    GATED: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The hidden rows times their weights, what comes back to both parts, and the gradient of the weights."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    count = tl.load(COUNT)
    if tl.program_id(0) * ROWS < count:
        weight = tl.load(WEIGHTS + i, mask=i < count, other=0.0).to(tl.float32)[:, None]
        dots = tl.zeros([ROWS, WIDE], tl.float32)
        for start in range(0, F, WIDE):
            column = start + tl.arange(0, WIDE)
            inside = (i[:, None] < count) & (column[None, :] < F)
            at = i[:, None] * F + column[None, :]
            up = tl.load(UP + at, mask=inside, other=0.0).to(tl.float32)
            back = tl.load(BACK + at, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                value, slant = _act(tl.load(GATE + at, mask=inside, other=0.0).to(tl.float32), KIND, slope, limit)
                passes = 1.0
                if KIND == 4:
                    passes = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
                    up = tl.minimum(tl.maximum(up, -limit), limit) + shift
                h = value * up
                tl.store(DGATE + at, (back * weight * up * slant).to(DGATE.dtype.element_ty), mask=inside)
                d_up = back * weight * value * passes
            else:
                h, slant = _act(up, KIND, slope, limit)
                d_up = back * weight * slant
            dots += h * back
            tl.store(DUP + at, d_up.to(DUP.dtype.element_ty), mask=inside)
            tl.store(H + at, (h * weight).to(H.dtype.element_ty), mask=inside)
        tl.store(DW + i, tl.sum(dots, 1), mask=i < count)


# -- the ops -------------------------------------------------------------------------------------------------------------------


def _wide(columns: int, most: int) -> int:
    return min(most, triton.next_power_of_2(columns))


def _run_take(x: Tensor, order: Tensor, count: Tensor, k: int) -> Tensor:
    x, (n, d) = x.contiguous(), (order.numel(), x.shape[1])
    out, wide = x.new_empty(n, d), _wide(d, 512)
    _take[(triton.cdiv(n, SOME), triton.cdiv(d, wide))](x, order, count, out, k, d, ROWS=SOME, WIDE=wide)
    return out


def _run_sum(rows: list[Tensor], place: Tensor, count: Tensor, weights: Tensor | None) -> Tensor:
    (t, k), d = place.shape, rows[0].shape[1]
    out, wide = rows[0].new_empty(t, d), _wide(d, 2048)
    weighed = weights.contiguous() if weights is not None else rows[0]
    meta = {"TWO": len(rows) > 1, "WEIGHED": weights is not None, "WIDE": wide}
    _sum[(t, triton.cdiv(d, wide))](rows[0], rows[-1], place, weighed, count, out, k, d, **meta)
    return out


def _settings(parts: list[Tensor], act: str, wide: int) -> tuple[tuple[float, ...], dict[str, Any]]:
    kind, *numbers = act.split(":")
    slope, limit, shift = map(float, numbers) if numbers else (0.0, 0.0, 0.0)
    return (slope, limit, shift), {"GATED": len(parts) > 1, "KIND": KINDS[kind], "ROWS": SOME, "WIDE": wide}


def _run_act(parts: list[Tensor], count: Tensor, act: str) -> Tensor:
    n, f = parts[0].shape
    out, wide = torch.empty_like(parts[0]), _wide(f, 256)
    numbers, meta = _settings(parts, act, wide)
    _activate[(triton.cdiv(n, SOME), triton.cdiv(f, wide))](parts[0], parts[-1], count, out, f, *numbers, **meta)
    return out


def _run_act_back(parts: list[Tensor], back: Tensor, weights: Tensor, count: Tensor, act: str) -> list[Tensor]:
    n, f = back.shape
    numbers, meta = _settings(parts, act, _wide(f, 256))
    h, *given = (torch.empty_like(back) for _ in range(1 + len(parts)))
    dots = torch.zeros(n, dtype=torch.float32, device=back.device)
    _activate_back[(triton.cdiv(n, SOME),)](parts[0], parts[-1], back, weights, count, h, given[0], given[-1], dots, f, *numbers, **meta)
    return [h, dots, *given]


take = define(
    "expert_take(Tensor x, Tensor order, Tensor count, int k) -> Tensor", _run_take,
    lambda x, order, count, k: x.new_empty(order.numel(), x.shape[1]),
)  # fmt: skip
sums = define(
    "expert_sums(Tensor[] rows, Tensor place, Tensor count, Tensor? weights) -> Tensor", _run_sum,
    lambda rows, place, count, weights: rows[0].new_empty(place.shape[0], rows[0].shape[1]),
)  # fmt: skip
activate = define(
    "expert_activate(Tensor[] parts, Tensor count, str act) -> Tensor", _run_act, lambda parts, count, act: parts[0].new_empty(parts[0].shape)
)
activate_back = define(
    "expert_activate_back(Tensor[] parts, Tensor back, Tensor weights, Tensor count, str act) -> Tensor[]", _run_act_back,
    lambda parts, back, weights, count, act: [
        back.new_empty(back.shape), back.new_empty(back.shape[:1], dtype=torch.float32), *(x.new_empty(x.shape) for x in parts)
    ],
)  # fmt: skip
