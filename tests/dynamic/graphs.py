"""Random graphs for the tests, and the judge: one vertex at a time, sample by sample, in plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.dynamic import Builder, Structure

SHAPES = ("tree", "binary", "dag", "forest", "chain", "single", "empty")


def sample(build: Builder, rng: random.Random, shape: str, words: str, size: int) -> None:
    """One random graph. `words` says which vertices read an input: all, leaves, or some."""
    build.sample()
    if shape == "empty":
        return
    if shape == "single":
        size = 1
    if shape == "binary":
        _tree(build, rng, size, 2, words)
    elif shape == "tree":
        _tree(build, rng, size, rng.randint(2, 4), words)
    elif shape == "forest":
        for _ in range(rng.randint(1, 3)):
            _tree(build, rng, rng.randint(1, size), 2, words)
    else:
        for v in range(size):
            below = [v - 1] if shape == "chain" and v else []
            if shape == "dag" and v:
                below = rng.sample(range(v), rng.randint(0, min(v, 3)))
                below += rng.choices(below, k=1) if below and rng.random() < 0.2 else []  # the same child twice
            _add(build, rng, below, words)


def _tree(build: Builder, rng: random.Random, leaves: int, arity: int, words: str) -> int:
    if leaves == 1:
        return _add(build, rng, [], words)
    cuts = sorted(rng.sample(range(1, leaves), min(arity, leaves) - 1))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, leaves], strict=True)]
    return _add(build, rng, [_tree(build, rng, n, arity, words) for n in parts], words)


def _add(build: Builder, rng: random.Random, below: list[int], words: str) -> int:
    has = words == "all" or (words == "leaves" and not below) or (words == "some" and rng.random() < 0.5)
    return build.add(below, row=build.vertices if has else None)


def graphs(seed: int, count: int, shapes: tuple[str, ...], words: str, largest: int = 9) -> Structure:
    """A batch of `count` random graphs of the given shapes."""
    rng, build = random.Random(seed), Builder()
    for _ in range(count):
        sample(build, rng, rng.choice(shapes), words, rng.randint(1, largest))
    return build.done()


def by_hand(s: Structure, x: Tensor, alone: Callable[[Tensor | None, list[Any]], Any]) -> list[Any]:
    """What every vertex scatters, by a recursion that knows nothing of batches."""
    done: dict[int, Any] = {}

    def at(v: int) -> Any:
        if v not in done:
            below = [at(int(c)) for c in s.child[s.first[v] : s.first[v + 1]]]
            done[v] = alone(x[int(s.row[v])] if s.row[v] >= 0 else None, below)
        return done[v]

    return [at(v) for v in range(s.vertices)]


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], tolerance: float = 1e-9) -> None:
    """Equal values, and equal gradients of every input for one random gradient of the result."""
    assert ours.shape == theirs.shape
    if ours.numel():
        assert float((ours - theirs).detach().abs().max()) < tolerance
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal(tuple(theirs.shape)))
    mine = torch.autograd.grad(ours, inputs, weight, allow_unused=True)
    judge = torch.autograd.grad(theirs, inputs, weight, allow_unused=True)
    for i, (a, b) in enumerate(zip(mine, judge, strict=True)):
        a, b = (torch.zeros_like(inputs[i]) if g is None else g for g in (a, b))
        assert float((a - b).abs().max()) < tolerance * max(1.0, float(b.abs().max())), f"gradient of input {i}"
