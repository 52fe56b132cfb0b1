"""What must hold of any simulated step, on settings drawn at random."""

from __future__ import annotations

import random

import pytest

from bench.physics import _step, check, draw
from weft.plan import phase


@pytest.mark.parametrize("seed", [11, 12])
def test_nothing_better_makes_a_step_slower(seed: int) -> None:
    broken = [b for shape, setting, place in draw(20, random.Random(seed)) for b in check(shape, setting, place)]
    assert not broken


def test_layers_that_are_not_walked_count_as_if_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = list(draw(12, random.Random(7)))
    short = [_step(*drawn).seconds for drawn in settings]
    monkeypatch.setattr(phase, "settled", lambda *_: False)
    assert short == pytest.approx([_step(*drawn).seconds for drawn in settings], rel=1e-9)
