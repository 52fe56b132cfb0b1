"""Vertex functions drawn at random against themselves on one vertex at a time in plain torch, values and gradients in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dynamic.graphs import assert_same
from tests.dynamic.test_any_function import Cell, alone, graphs
from weft import dynamic

WIDTH = 6
ONE: list[Callable[[Cell, Tensor], Tensor]] = [
    lambda c, t: torch.tanh(t), lambda c, t: F.gelu(t), lambda c, t: torch.exp(-t.abs()), lambda c, t: t * t * 0.3, lambda c, t: t.detach() - t,
    lambda c, t: t.clamp(-0.7, 0.9), lambda c, t: t.flip(1), lambda c, t: t.cumsum(1) * 0.3, lambda c, t: F.softmax(t, 1), lambda c, t: c.m[2](t),
    lambda c, t: c.m[0](t), lambda c, t: torch.where(t > 0.1, t, t * 0.2), lambda c, t: t - t.mean(1, keepdim=True), lambda c, t: t * c.m[0].bias,
    lambda c, t: c.m[2].weight * 2 - t, lambda c, t: t.view(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH), lambda c, t: c.m[1](t).chunk(3, 1)[1],
    lambda c, t: torch.einsum("rik,kl->ril", t.unflatten(1, (3, 2)), c.m[0].weight[:2, :2]).flatten(1), lambda c, t: t.roll(2, 1),
    lambda c, t: torch.cat([t[:, 3:], t[:, :3] * 2], 1), lambda c, t: gated(*c.m[1](t).chunk(3, 1)), lambda c, t: t / (t.norm(dim=1, keepdim=True) + 1),
    lambda c, t: t.amax(1, keepdim=True) - t, lambda c, t: F.pad(t[:, 1:4], (1, 2)) + t * 0.1, lambda c, t: t.sum(1, keepdim=True).tanh().expand(-1, WIDTH),
    lambda c, t: t.repeat_interleave(2, 1)[:, ::2], lambda c, t: torch.stack([t[:, :3], t[:, 3:]], 2).flatten(1),
]  # fmt: skip
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum, lambda a, b: a / (b * b + 1), lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: (a[:, :, None] * b[:, None, :]).mean(1),
]  # fmt: skip


def gated(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.sigmoid(a) * torch.tanh(b) + c * 0.1


def drawn(seed: int, by_child: bool) -> Callable[[Cell, Any], None]:
    def function(c: Cell, v: Any) -> None:
        rng, edges = random.Random(seed), list[Tensor]()
        rows = [v.pull("x", optional=True)]
        if by_child:
            rows += [v.gather("h", 0, optional=True), v.gather("k", 1, optional=True)]
        else:
            edges += [v.gather("h"), v.gather("k")]

        def over(e: Tensor) -> Tensor:
            return v.reduce(e, rng.choice(["sum", "mean", "max"]))

        for _ in range(rng.randint(4, 9)):
            of = edges if edges and rng.random() < 0.4 else rows
            of.append(rng.choice(ONE)(c, rng.choice(of)) if rng.random() < 0.6 else rng.choice(TWO)(rng.choice(of), rng.choice(of)))
            if edges and rng.random() < 0.4:
                rows.append(over(rng.choice(edges)) if rng.random() < 0.7 else v.reduce(v.softmax(rng.choice(edges)) * rng.choice(edges)))
                edges.append(v.spread(rng.choice(rows)))
        rows += map(over, edges[-1:])
        h, k = torch.tanh(rows[0] + rows[-1] + rows[-2]), torch.tanh(rng.choice(rows)) * 0.7
        v.scatter(h=h, k=k if rng.random() < 0.8 else h)
        v.push(h=rng.choice([h, rows[-1]]), sums=rng.choice(rows).sum(1), some=rng.choice(rows))

    return function


@pytest.mark.parametrize("seed", range(24))
def test_a_random_function_equals_each_vertex_by_itself(seed: int) -> None:
    torch.manual_seed(seed)
    by_child, how = seed % 3 == 2, [dict[str, Any](), {}, {"replay": True}, {"fuse": False}][seed % 4]
    cell, states = Cell(drawn(seed, by_child), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)), {"h": WIDTH, "k": WIDTH}
    s = graphs(seed, 2 if by_child else 3, by_child)
    x = torch.randn(s.vertices, WIDTH, dtype=torch.float64, requires_grad=True)
    theirs, model = alone(cell, s, {"x": x}, states), dynamic.Model(cell, states, **how)
    ours = model(s, x, at="all")
    both = [torch.cat([flat[n].reshape(s.vertices, -1) for n in ours], 1) for flat in (ours, {n: torch.cat([o.pushed[n] for o in theirs]) for n in ours})]
    assert_same(*both, [x, *cell.parameters()], 1e-9)
