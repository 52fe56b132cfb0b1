"""The order of plans, predicted and measured: strict, with near pairs told beside it."""

from __future__ import annotations

from typing import Any

from bench._accuracy_tables import on_processor
from bench.orders import order

PLANS = ["dp2", "zero3", "tp2"]


def rows(**of: tuple[float, list[float]]) -> list[dict[str, Any]]:
    """Plans with what was predicted and the rounds that were measured."""
    made = {plan: {"predicted": p, "measured": sorted(r)[len(r) // 4], "rounds_ms": r} for plan, (p, r) in of.items()}
    return [{"case": f"gpt {plan}", "error": m["predicted"] / m["measured"] - 1, **m} for plan, m in made.items()]


def test_a_pair_within_the_spread_is_a_tie_and_still_out_of_order() -> None:
    found = order("10M", rows(dp2=(103.0, [100.0, 104.0, 99.0, 101.0]), zero3=(102.0, [101.0, 99.0, 103.0, 102.0]), tp2=(150.0, [140.0] * 4)), PLANS)
    assert found["measured"] == ["dp2", "zero3", "tp2"] and found["predicted"] == ["zero3", "dp2", "tp2"]
    assert not found["same"] and list(found["wrong"]) == ["dp2, zero3"]
    assert {pair: n["tie"] for pair, n in found["neighbours"].items()} == {"dp2, zero3": True, "zero3, tp2": False}


def test_steady_rounds_leave_no_tie() -> None:
    """What both plans share, a slow quarter of an hour say, is no spread of their ratio."""
    drift = [100.0, 110.0, 120.0, 130.0]
    found = order("10M", rows(dp2=(100.0, drift), zero3=(101.0, [1.01 * x for x in drift]), tp2=(150.0, [1.4 * x for x in drift])), PLANS)
    assert found["same"] and not any(n["tie"] for n in found["neighbours"].values())


def test_ties_are_told_in_the_documentation() -> None:
    made = rows(dp2=(103.0, [100.0, 104.0, 99.0, 101.0]), zero3=(102.0, [101.0, 99.0, 103.0, 102.0]), tp2=(150.0, [140.0] * 4))
    text = on_processor(made, {"10M x2": order("10M", made, PLANS)})
    assert "predicted the other way round: dp2, zero3 (1.0% apart)" in text
    assert "A tie within the spread of rounds: dp2, zero3" in text
