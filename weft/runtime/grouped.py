"""Experts as grouped products, nothing of it on the host: picks are sorted by expert, and sizes stay on the device.

A rank holds the experts `first`, `first + 1`, ... of all; rows that picked another come last, and no product reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Sorted:
    """The picks of all tokens, [tokens * k], in the order of the experts held."""

    order: Tensor  # which pick stands at each place
    place: Tensor  # at which place each pick stands
    ends: Tensor  # of every expert's rows
    held: Tensor  # [tokens * k, 1], whether the expert of the row is held here
    k: int

    def rows(self, x: Tensor) -> Tensor:
        """The token of every pick."""
        return x[self.order // self.k]

    def of_picks(self, weights: Tensor) -> Tensor:
        return weights.reshape(-1)[self.order].unsqueeze(-1)

    def kept(self, rows: Tensor) -> Tensor:
        """Zeros where no product has written."""
        return torch.where(self.held, rows, torch.zeros((), dtype=rows.dtype, device=rows.device))

    def sums(self, rows: Tensor) -> Tensor:
        """What the picks of each token add up to."""
        return rows[self.place].unflatten(0, (-1, self.k)).sum(1)


def by_expert(picks: Tensor, first: int, count: int) -> Sorted:
    """Picks sorted by expert, those of experts not held last; within an expert in the order of the tokens."""
    at = picks.reshape(-1).long() - first
    at = torch.where((at < 0) | (at >= count), count, at)
    sorted_at, order = torch.sort(at, stable=True)
    numbers = torch.arange(count, device=picks.device)
    ends = torch.searchsorted(sorted_at, numbers, right=True).to(torch.int32)
    places = torch.arange(order.numel(), device=picks.device)
    place = torch.empty_like(order).scatter(0, order, places)
    return Sorted(order, place, ends, (sorted_at < count).unsqueeze(-1), picks.shape[1])


def _products(rows: Tensor, weight: Tensor, s: Sorted) -> Tensor:
    """Each expert's rows [n, a] times its matrix [a, b]."""
    return torch._grouped_mm(rows, weight, offs=s.ends)


def _gradient(left: Tensor, right: Tensor, s: Sorted) -> Tensor:
    """Per expert the product [a, n] x [n, b] of what stands in its rows; nothing for one that nobody picked."""
    out = torch._grouped_mm(left.t(), right, offs=s.ends)
    begins = torch.cat([s.ends.new_zeros(1), s.ends[:-1]])
    picked = (s.ends > begins)[:, None, None]
    return torch.where(picked, out, torch.zeros((), dtype=out.dtype, device=out.device))


def _hidden(rows: Tensor, up: Tensor, gate: tuple[Tensor, ...], s: Sorted) -> list[Tensor]:
    return [_products(rows, w.transpose(1, 2), s) for w in (up, *gate)]


def _activated(y: Tensor, *gate: Tensor, act: str) -> Tensor:
    if act.startswith("clamped:"):
        slope, limit, shift = map(float, act.split(":")[1:])
        g = gate[0].clamp(max=limit)
        return g * torch.sigmoid(slope * g) * (y.clamp(-limit, limit) + shift)
    f = ACTIVATIONS[act]
    return f(gate[0]) * y if gate else f(y)


def experts(x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, down: Tensor, *gate: Tensor, act: str, first: int = 0) -> Tensor:
    """x [t, d], picks and weights [t, k], up and gate [e, f, d], down [e, d, f] -> the sum over picks of experts held, [t, d]."""
    s = by_expert(picks, first, up.shape[0])
    h = _activated(*_hidden(s.rows(x), up, gate, s), act=act)
    out = _products(h, down.transpose(1, 2), s)
    return s.sums(s.kept(out * s.of_picks(weights)))


def experts_backward(
    ct: Tensor, x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, down: Tensor, *gate: Tensor, act: str, first: int = 0
) -> tuple[Tensor, ...]:
    """The gradients by x, weights, up, down and gate. The hidden rows are computed again."""
    s = by_expert(picks, first, up.shape[0])
    rows, ct_rows = s.rows(x), s.rows(ct)
    with torch.enable_grad():
        parts = [p.detach().requires_grad_() for p in _hidden(rows, up, gate, s)]
        h = _activated(*parts, act=act)
    back = _products(ct_rows, down, s)  # by the hidden rows, before the weights of their picks
    d_weights = s.kept((h.detach() * back).sum(-1, keepdim=True))[s.place].reshape(weights.shape)
    scale = s.of_picks(weights)
    d_down = _gradient(ct_rows * scale, h.detach(), s)
    d_parts = torch.autograd.grad(h, parts, back * scale)
    d_rows = sum(_products(d, w, s) for d, w in zip(d_parts, (up, *gate), strict=True))
    d_up, *d_gate = (_gradient(d, rows, s) for d in d_parts)
    return s.sums(s.kept(d_rows)), d_weights.to(weights.dtype), d_up, d_down, *d_gate
