"""Chunked pipelines: the same work on every chunk, each chunk giving way to the next while its collective is under way.

The work is a generator that yields where it would have to wait. Chunks are started in order and resumed in order, on every
rank the same, so collectives meet and nothing can wait in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., Generator[None, None, Any]]


@dataclass(frozen=True)
class Chunks:
    """How a local tensor is divided: along `dim`, which is `parts` slices side by side, each in as many chunks."""

    dim: int
    parts: int = 1

    def take(self, x: Tensor, chunk: int, chunks: int) -> Tensor:
        """Chunk number `chunk` of every slice."""
        size = x.shape[self.dim] // (self.parts * chunks)
        if self.parts == 1:
            return x.narrow(self.dim, chunk * size, size)
        return x.unflatten(self.dim, (self.parts, chunks, size)).select(self.dim + 1, chunk).flatten(self.dim, self.dim + 1)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor from its chunks."""
        if self.parts == 1:
            return torch.cat(list(pieces), self.dim)
        return torch.stack([p.unflatten(self.dim, (self.parts, -1)) for p in pieces], self.dim + 1).flatten(self.dim, self.dim + 2)


def run(work: Work, chunks: int, sharded: Sequence[tuple[Any, Chunks]], full: Sequence[Any], joins: Sequence[Chunks]) -> tuple[Any, ...]:
    """`work(number, *chunk of every sharded argument, *the others)` on all chunks; its results put together."""
    pieces = [[how.take(x, c, chunks) for x, how in sharded] for c in range(chunks)]
    results = run_staggered([work(c, *pieces[c], *full) for c in range(chunks)])
    return tuple(how.join([r[k] for r in results]) for k, how in enumerate(joins))


def run_staggered(works: Sequence[Generator[None, None, Any]]) -> list[Any]:
    """Start each; after each start let every earlier one take one more step, oldest first; then finish what is left."""
    results: list[Any] = [None] * len(works)
    under_way: list[int] = []
    for started in range(len(works)):
        earlier = list(under_way)
        under_way.append(started)
        for k in [started, *earlier]:
            _advance(works, k, results, under_way)
    while under_way:
        for k in under_way.copy():
            _advance(works, k, results, under_way)
    return results


def _advance(works: Sequence[Any], k: int, results: list[Any], under_way: list[int]) -> None:
    if not isinstance(works[k], Generator):  # a rank that has nothing to wait for
        results[k] = works[k]
        under_way.remove(k)
        return
    try:
        next(works[k])
    except StopIteration as end:
        results[k] = end.value
        under_way.remove(k)
