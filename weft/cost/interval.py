"""How far a prediction may be off, from what others measured.

Let r = ln(measured / predicted) of a published or measured step. The rows of one system (a publisher's runs, or its runs on one machine)
share their errors, so every system weighs the same: [low, high] holds eight tenths of r over the n systems of a kind of step, widened by
1 + 1/n for a system that is not among them. `covered` are the rows within the spread of the other systems. `weft bench intervals` writes all anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from weft import cluster

FILE = Path(cluster.__file__).parent / "residuals.json"
LONGER = ("step_ms",)  # grow with the time of a step; the others shrink
NOT_MODELLED = "not modelled: data loading, checkpoints, evaluation, stragglers, other jobs on the network"
SHORTER = ("tokens_per_s", "mfu", "useful_tokens_per_s")


@dataclass(frozen=True)
class Spread:
    """Of ln(measured / predicted) for one kind of prediction."""

    kind: str
    low: float
    high: float
    rows: int
    systems: Mapping[str, int]
    covered: float

    def of(self, value: float, shrinks: bool = False) -> tuple[float, float]:
        """What may be measured where `value` was predicted. `shrinks`: the value is a rate, which falls as time grows."""
        low, high = (-self.high, -self.low) if shrinks else (self.low, self.high)
        return float(f"{value * math.exp(low):.6g}"), float(f"{value * math.exp(high):.6g}")

    def __str__(self) -> str:
        return f"80% interval from {self.rows:,} measured steps of {len(self.systems)} systems ({self.kind})"


@cache
def _data() -> Any:
    return json.loads(FILE.read_text())


def spread(kind: str) -> Spread:
    """The spread of the time of a kind of step: `classic`, `dense`, `experts`, `captured`, or `processor` of one that was captured for processors."""
    return Spread(kind, **_data()["time"][kind])


def memory_spread() -> Spread:
    """Of peak memory, whatever the kind of step."""
    return Spread("memory", **_data()["memory"]["all"])


def kind_of(kernels: str, experts: bool, captured: bool, processor: bool = False) -> str:
    """Which rows a step is like."""
    return ("processor" if processor else "captured") if captured else "experts" if experts else "classic" if kernels == "classic" else "dense"


def equal_within() -> float:
    """Two plans of one model on one cluster whose predictions are nearer than this (in ln) are as often as not in the other order."""
    return float(_data()["pairs"]["median"])


def bounds(kind: str, predicted: Mapping[str, Any]) -> dict[str, float]:
    """Low and high of every predicted figure, as `step_ms_low`, `step_ms_high` and so on."""
    time, memory = spread(kind), memory_spread()
    found: dict[str, float] = {}
    for name in (*LONGER, *SHORTER, "memory_gb"):
        if predicted.get(name) is not None:
            of = memory if name == "memory_gb" else time
            found[f"{name}_low"], found[f"{name}_high"] = of.of(float(predicted[name]), shrinks=name in SHORTER)
    return found
