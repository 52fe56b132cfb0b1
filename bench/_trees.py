"""Random trees, and the Tree-LSTM that dynamic benchmarks time, as people write it: by recursion, and level by level.

A tree is nested tuples with input rows at its leaves. All versions use the weights of one cell and do the same products: a leaf has
no recurrent product, an inner vertex no input product.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.dynamic.tree_lstm import ChildSum
from weft.dynamic import Structure

Tree = Any


def uniform(leaves: int, start: int, rng: random.Random) -> Tree:
    """Every split equally likely."""
    if leaves == 1:
        return start
    cut = rng.randint(1, leaves - 1)
    return uniform(cut, start, rng), uniform(leaves - cut, start + cut, rng)


def skewed(leaves: int, start: int, rng: random.Random) -> Tree:
    """Splits near the ends are likelier: as deep as the parse trees of the Stanford Sentiment Treebank."""
    if leaves == 1:
        return start
    cut = min(leaves - 1, max(1, round(leaves * rng.betavariate(0.31, 0.31))))
    return skewed(cut, start, rng), skewed(leaves - cut, start + cut, rng)


def uniform_batch(count: int, rng: random.Random, leaves: int = 20) -> list[Tree]:
    return [uniform(leaves, i * leaves, rng) for i in range(count)]


def sst_like_batch(count: int, rng: random.Random) -> list[Tree]:
    """Sentence lengths and depths of the treebank: 19 leaves and depth 9.8 on average, 9 in 10 below 32 and 15."""
    out, start = list[Tree](), 0
    for _ in range(count):
        leaves = min(52, max(2, round(rng.gammavariate(4, 4.78))))
        out.append(skewed(leaves, start, rng))
        start += leaves
    return out


def long_tailed_batch(count: int, rng: random.Random) -> list[Tree]:
    """Skewed trees of which a few are much larger than the rest: half below 13 leaves, one in a hundred above 100."""
    out, start = list[Tree](), 0
    for _ in range(count):
        leaves = min(250, max(2, round(rng.lognormvariate(2.55, 0.9))))
        out.append(skewed(leaves, start, rng))
        start += leaves
    return out


def recursion(cell: ChildSum, trees: Sequence[Tree], x: Tensor) -> Tensor:
    """The naive loop: one vertex at a time."""

    def walk(tree: Tree) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            return gates(cell.word(x[tree : tree + 1]), None)
        (h0, c0), (h1, c1) = walk(tree[0]), walk(tree[1])
        kept = torch.sigmoid(cell.forget(h0)) * c0 + torch.sigmoid(cell.forget(h1)) * c1
        return gates(cell.below(h0 + h1) + cell.word.bias, kept)

    return torch.cat([walk(tree)[0] for tree in trees])


def gates(iou: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    i, o, u = iou.chunk(3, dim=1)
    c = torch.sigmoid(i) * torch.tanh(u)
    c = c if kept is None else c + kept
    return torch.sigmoid(o) * torch.tanh(c), c


class Levels:
    """Which rows each level reads, for the version batched by hand."""

    def __init__(self, s: Structure, device: torch.device | str = "cpu") -> None:
        order = np.argsort(s.depth, kind="stable")
        place = np.empty(s.vertices, np.int64)
        place[order] = np.arange(s.vertices)
        bounds = np.searchsorted(s.depth[order], np.arange(int(s.depth.max()) + 2))
        self.rows = torch.from_numpy(s.row[order[: bounds[1]]]).to(device)
        inner = [order[a:b] for a, b in pairwise(bounds[1:])]
        self.children = [
            (torch.from_numpy(place[s.child[s.first[v]]]).to(device), torch.from_numpy(place[s.child[s.first[v] + 1]]).to(device))
            for v in inner
        ]
        self.roots = torch.from_numpy(place[s.roots]).to(device)


def level_by_level(cell: ChildSum, levels: Levels, x: Tensor) -> Tensor:
    """All vertices of a level at once, in plain torch with autograd."""
    h, c = gates(cell.word(x[levels.rows]), None)
    for left, right in levels.children:
        h0, h1, c0, c1 = h[left], h[right], c[left], c[right]
        kept = torch.sigmoid(cell.forget(h0)) * c0 + torch.sigmoid(cell.forget(h1)) * c1
        new_h, new_c = gates(cell.below(h0 + h1) + cell.word.bias, kept)
        h, c = torch.cat([h, new_h]), torch.cat([c, new_c])
    return h[levels.roots]


def products(leaves: int, inner: int, size: int, device: torch.device | str = "cpu") -> list[Callable[[], Tensor]]:
    """The matrix products of one forward and backward pass, each in one call over all vertices: no batching can do with less.

    Input products at leaves (3 gates), recurrent ones at inner vertices (3 gates) and at their 2 children (1 gate);
    gradients of all weights and of all hidden states.
    """

    def make(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device)

    x, h, e = make(leaves, size), make(inner, size), make(2 * inner, size)
    gx, gh, ge = make(leaves, 3 * size), make(inner, 3 * size), make(2 * inner, size)
    w3, w1 = make(size, 3 * size), make(size, size)
    pairs = [(x, w3), (h, w3), (e, w1), (gh, w3.t()), (ge, w1.t()), (x.t(), gx), (h.t(), gh), (e.t(), ge)]
    outs = [torch.empty(a.shape[0], b.shape[1], device=device) for a, b in pairs]
    return [lambda a=a, b=b, out=out: torch.mm(a, b, out=out) for (a, b), out in zip(pairs, outs, strict=True)]
