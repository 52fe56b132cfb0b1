"""Partitions against all there are."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.plan.partition import early, even, partition


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_part_is_as_fast_as_can_be(seed: int) -> None:
    """Costs that differ by part, longest parts, and parts that may be empty, against every partition."""
    rng = random.Random(seed)
    length, parts, most = rng.randint(1, 9), rng.randint(1, 4), rng.randint(2, 9)
    rate, once = ([rng.choice((0.0, 1.0, 1.0, 2.5)) for _ in range(parts)] for _ in range(2))
    weights, empty = [rng.choice((1.0, 1.0, 3.0)) for _ in range(length)], rng.random() < 0.5

    def cost(i: int, a: int, b: int) -> float | None:
        return None if b - a > most else rate[i] * sum(weights[a:b]) + once[i]

    found = partition(length, parts, cost, (lambda i, a: range(a, length + 1)) if empty else None, even)
    every = [
        costs
        for cuts in itertools.combinations_with_replacement(range(length + 1), parts - 1)
        if None not in (costs := [cost(i, a, b) for i, (a, b) in enumerate(itertools.pairwise((0, *cuts, length)))])
        and (empty or all(a < b for a, b in itertools.pairwise((0, *cuts, length))))
    ]
    if not every:
        assert found is None
        return
    assert found is not None and found[-1] == length
    own = [cost(i, a, b) for i, (a, b) in enumerate(itertools.pairwise((0, *found)))]
    assert max(own) == min(max(costs) for costs in every)  # type: ignore[type-var]


def test_of_equal_partitions_the_tie_decides() -> None:
    weights = [9.0, 1.0, 1.0, 1.0, 1.0]

    def cost(i: int, a: int, b: int) -> float:
        return sum(weights[a:b])

    assert partition(5, 3, cost, tie=even) == (1, 3, 5)
    assert partition(5, 3, cost, tie=early) == (1, 2, 5)
    assert partition(5, 3, cost, lambda i, a: (1,), even) == (1, 1, 5)
    assert partition(2, 3, cost) is None
