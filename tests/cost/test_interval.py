"""The spread of predictions: from whole systems, covering those left out; figures that come with every prediction."""

from __future__ import annotations

import math
import random

import pytest

from bench.intervals import KINDS, coverage, ends
from weft.cost.interval import bounds, equal_within, kind_of, memory_spread, spread
from weft.plan.planner import choose
from weft.plan.search import Found
from weft.plan.setting import Setting


def drawn(rng: random.Random, rows: int) -> list[float]:
    """Rows of one system share an error of their own."""
    shared = rng.gauss(0.1, 0.1)
    return [shared + rng.gauss(0, 0.05) for _ in range(rows)]


def test_systems_not_seen_are_covered() -> None:
    """Over many draws of seven systems, the rows of an eighth lie within in about eight of ten cases."""
    rng = random.Random(0)
    inside = []
    for _ in range(300):
        low, high = ends({str(i): drawn(rng, rng.randint(2, 30)) for i in range(7)})
        inside += [low <= x <= high for x in drawn(rng, 5)]
    assert 0.75 <= sum(inside) / len(inside) <= 0.9


def test_a_large_system_weighs_no_more_than_a_small_one() -> None:
    assert ends({"a": [0.0] * 1000, "b": [1.0]})[1] > 0.9
    assert coverage({"a": [0.0], "b": [1.0], "c": [0.5]}, {"c": [0.5]}) == 1.0


def test_shipped_spreads_cover_systems_left_out() -> None:
    for found in (*map(spread, KINDS), memory_spread()):
        assert found.low < 0 < found.high and found.rows == sum(found.systems.values())
        assert 0.75 <= found.covered <= (1.0 if found.kind == "captured" else 0.95), found.kind
    assert 0.02 < equal_within() < 0.1


def test_bounds_of_every_figure() -> None:
    made = bounds("dense", {"step_ms": 100.0, "tokens_per_s": 1000.0, "mfu": 0.5, "memory_gb": 10.0, "gap": 0.0})
    assert set(made) == {f"{k}_{e}" for k in ("step_ms", "tokens_per_s", "mfu", "memory_gb") for e in ("low", "high")}
    assert made["step_ms_low"] < 100 < made["step_ms_high"]
    assert made["step_ms_high"] * made["tokens_per_s_low"] == pytest.approx(1e5, rel=1e-5), "the slowest step has the lowest rate"
    assert [kind_of("compiled", False, False), kind_of("classic", False, False), kind_of("compiled", True, False), kind_of("compiled", True, True)] == [
        "dense", "classic", "experts", "captured",
    ]  # fmt: skip
    assert kind_of("compiled", True, True, processor=True) == "processor"


def found(seconds: float, **changes: object) -> Found:
    return Found(Setting.counted(**changes), seconds, 1e9)  # type: ignore[arg-type]


def test_of_equal_plans_the_simplest_is_taken() -> None:
    near, far = math.exp(equal_within()) * 0.999, math.exp(equal_within()) * 1.001
    pool = {"weft": found(1.0, dp=2, tp=2, pp=2), "zero1": found(near, dp=8, zero=1), "data parallel": found(far, dp=8)}
    assert choose(pool, "time") == ("zero1", ["weft"])
    assert choose(pool, "time", fastest=True) == ("weft", [])
    assert choose(pool, "memory") == ("weft", [])


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        ({"dp": 8}, {"dp": 4, "tp": 2}), ({"tp": 2}, {"tp": 2, "pp": 2}), ({"tp": 4}, {"pp": 4}), ({"dp": 8, "zero": 1}, {"dp": 8, "zero": 3}),
        ({"dp": 8}, {"dp": 8, "recompute": "full"}), ({"pp": 2}, {"pp": 2, "schedule": "interleaved", "virtual": 2}),
    ],
)  # fmt: skip
def test_the_order_of_simplicity(simpler: dict, other: dict) -> None:
    assert choose({"a": found(1.0, **other), "b": found(1.01, **simpler)}, "time")[0] == "b"
