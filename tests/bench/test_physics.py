"""What must hold of any simulated step, on settings drawn at random."""

from __future__ import annotations

import random

import pytest

from bench.physics import check, draw


@pytest.mark.parametrize("seed", [11, 12])
def test_nothing_better_makes_a_step_slower(seed: int) -> None:
    broken = [b for shape, setting, place in draw(20, random.Random(seed)) for b in check(shape, setting, place)]
    assert not broken
