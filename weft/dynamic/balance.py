"""Who gets which graphs: samples given to steps and ranks so that no rank waits long for another.

A rank's time for a set of samples is predicted as
    t = a * max over samples of levels + b * sum over samples of vertices + c,
a for a round, b for a vertex; `Cost.fit` finds a, b, c from measured runs. A step takes as long as its slowest rank, so the sum over
steps of the largest t over ranks is made small: samples of like depth share a step (then few rounds are wasted on one deep graph),
and within a step the largest go first to the rank with least to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import StructureError
from weft.dynamic.native import Ints
from weft.dynamic.structure import Structure

Assignment = list[list[Ints]]  # step -> rank -> samples


@dataclass(frozen=True)
class Cost:
    """Milliseconds per round, per vertex, and per run."""

    level: float = 0.15
    vertex: float = 0.007
    run: float = 0.0

    def of(self, sizes: Sizes, samples: Sequence[int] | Ints) -> float:
        """The predicted time of one rank for these samples."""
        if len(samples) == 0:
            return 0.0
        picked = np.asarray(samples)
        return self.level * int(sizes.levels[picked].max()) + self.vertex * int(sizes.vertices[picked].sum()) + self.run

    @classmethod
    def fit(cls, runs: Sequence[tuple[int, int, float]]) -> Cost:
        """From measured (levels, vertices, milliseconds); a negative share is noise and counts as none."""
        if len(runs) < 3:
            raise StructureError("too few runs to fit a cost", needed="3 or more of different sizes", found=str(len(runs)))
        levels, vertices, times = (np.array(column, float) for column in zip(*runs, strict=True))
        known = np.stack([levels, vertices, np.ones_like(levels)], axis=1)
        use = [0, 1, 2]
        found: NDArray[np.float64] = np.zeros(3)
        while use:  # drop the most negative share until none is left
            part, *_ = np.linalg.lstsq(known[:, use], times, rcond=None)
            if (part >= 0).all():
                found[use] = part
                break
            use.pop(int(part.argmin()))
        return cls(*found.tolist())


@dataclass(frozen=True)
class Sizes:
    """Levels and vertices of every sample."""

    levels: Ints
    vertices: Ints

    @classmethod
    def of(cls, s: Structure) -> Sizes:
        vertices = np.diff(s.sample)
        levels = np.zeros(len(s), np.int64)
        some = vertices > 0
        if some.any():
            levels[some] = np.maximum.reduceat(s.depth, s.sample[:-1][some]) + 1
        return cls(levels, vertices)


def assign(
    graphs: Structure | Sizes, ranks: int, per_rank: int, *, cost: Cost | None = None, mixing: float = 0.0, seed: int = 0
) -> Assignment:
    """Steps of `ranks * per_rank` samples, each split over the ranks by predicted time; the steps come in random order.

    `mixing` (0 to 1) is the share of samples that go to a random step instead: more like a shuffled epoch, less balanced.
    A rank may get more samples than another; weigh gradients by samples, not by ranks.
    """
    sizes = graphs if isinstance(graphs, Sizes) else Sizes.of(graphs)
    cost, rng = cost or Cost(), np.random.default_rng(seed)
    total, per_step = len(sizes.levels), ranks * per_rank
    if not 0 <= mixing <= 1:
        raise StructureError("mixing is a share of the samples", needed="between 0 and 1", found=str(mixing))
    order = np.lexsort((rng.random(total), sizes.levels))
    moved = rng.random(total) < mixing
    order[moved] = rng.permutation(order[moved])
    steps = [order[i : i + per_step] for i in range(0, total, per_step)]
    return [assign_samples(sizes, steps[i], ranks, cost) for i in rng.permutation(len(steps))]


def assign_samples(sizes: Sizes, samples: Ints, ranks: int, cost: Cost) -> list[Ints]:
    """Give the samples of one step to ranks: the largest first, each to the rank that then ends soonest."""
    order = samples[np.argsort(-sizes.vertices[samples], kind="stable")]
    hands: list[list[int]] = [[] for _ in range(ranks)]
    levels, vertices = [0] * ranks, [0] * ranks
    for sample, deep, large in zip(order.tolist(), sizes.levels[order].tolist(), sizes.vertices[order].tolist(), strict=True):
        after = [cost.level * max(a, deep) + cost.vertex * (b + large) for a, b in zip(levels, vertices, strict=True)]
        rank = after.index(min(after))
        hands[rank].append(sample)
        levels[rank] = max(levels[rank], deep)
        vertices[rank] += large
    return [np.array(hand, np.int64) for hand in hands]
