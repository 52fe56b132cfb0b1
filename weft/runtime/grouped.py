"""Experts as grouped matmuls, nothing of it on the host: picks are sorted by expert, and sizes stay on the device.

A rank holds the experts `first`, `first + 1`, ... of all; rows that picked another come last, and nothing reads or writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sorted:
    """The picks of all tokens, [tokens * k], in the order of the experts held."""

    order: Tensor  # which pick stands at each place
    place: Tensor  # [tokens, k], at which place each pick stands
    ends: Tensor  # of every expert's rows
    count: Tensor  # of the rows of all experts held
    k: int


def by_expert(picks: Tensor, first: int, count: int) -> Sorted:
    """Picks sorted by expert, those of experts not held last; within an expert in the order of the tokens."""
    at = picks.reshape(-1).long() - first
    at = torch.where((at < 0) | (at >= count), count, at)
    sorted_at, order = torch.sort(at, stable=True)
    numbers = torch.arange(count, device=picks.device)
    ends = torch.searchsorted(sorted_at, numbers, right=True).to(torch.int32)
    places = torch.arange(order.numel(), device=picks.device)
    place = torch.empty_like(order).scatter(0, order, places)
    return Sorted(order, place.view(picks.shape), ends, ends[-1:], picks.shape[1])


def _expert_matmuls(rows: Tensor, weight: Tensor, s: Sorted) -> Tensor:
    """Each expert's rows [n, a] times its matrix [a, b]."""
    return torch._grouped_mm(rows, weight, offs=s.ends)


def _gradient(left: Tensor, right: Tensor, s: Sorted) -> Tensor:
    """Per expert the matmul [a, n] x [n, b] of what stands in its rows; nothing for one that nobody picked."""
    out = torch._grouped_mm(left.t(), right, offs=s.ends)
    begins = torch.cat([s.ends.new_zeros(1), s.ends[:-1]])
    picked = (s.ends > begins)[:, None, None]
    return torch.where(picked, out, torch.zeros((), dtype=out.dtype, device=out.device))


def _hidden(rows: Tensor, up: Tensor, gate: tuple[Tensor, ...], s: Sorted) -> list[Tensor]:
    return [_expert_matmuls(rows, w.transpose(1, 2), s) for w in (up, *gate)]


def _kernels() -> Any:
    from weft.runtime import expert_rows  # Triton's, which not every machine has

    return expert_rows


def experts(x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, down: Tensor, *gate: Tensor, act: str, first: int = 0) -> Tensor:
    """x [t, d], picks and weights [t, k], up and gate [e, f, d], down [e, d, f] -> the sum over picks of experts held, [t, d]."""
    s, by = by_expert(picks, first, up.shape[0]), _kernels()
    h = by.activate(_hidden(by.take(x, s.order, s.count, s.k), up, gate, s), s.count, act)
    return by.sums([_expert_matmuls(h, down.transpose(1, 2), s)], s.place, s.count, weights)  # type: ignore[no-any-return]


def experts_backward(
    ct: Tensor, x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, down: Tensor, *gate: Tensor, act: str, first: int = 0
) -> tuple[Tensor, ...]:
    """The gradients by x, weights, up, down and gate. The hidden rows are computed again."""
    s, by = by_expert(picks, first, up.shape[0]), _kernels()
    rows, ct_rows = (by.take(v, s.order, s.count, s.k) for v in (x, ct))
    back = _expert_matmuls(ct_rows, down, s)  # by the hidden rows, before the weights of their picks
    h, dots, *parts = by.activate_back(_hidden(rows, up, gate, s), back, weights.reshape(-1)[s.order], s.count, act)
    dx = by.sums([_expert_matmuls(d, w, s) for d, w in zip(parts, (up, *gate), strict=True)], s.place, s.count, None)
    d_up, *d_gate = (_gradient(d, rows, s) for d in parts)
    return dx, dots[s.place].to(weights.dtype), d_up, _gradient(ct_rows, h, s), *d_gate
