"""Numbers and names as a person reads them: units said, three digits that matter, causes in words."""

from __future__ import annotations

import re
from collections.abc import Callable

from weft.cost.simulate import FUSED

AXES = ("dp", "tp", "pp", "cp", "ep")
MEANS = {
    "compute": "compute", "forward": "forward", "backward": "backward", "weight": "weight gradients", "host": "kernel launch overhead",
    "bubble": "pipeline bubble", "optimizer": "optimizer", FUSED: "update and its communication, one kernel",
    "peers": "waiting for other ranks", "layer": "layer",
    "input": "waiting for input", "in flight": "communication, overlapped", "rounds": "rounds forward", "back": "rounds backward", "rest": "all else",
    "prepare": "schedule and index arrays", "loss": "loss and its gradient", "update": "weight gradients and update",
    **{axis: f"exposed communication, {axis}" for axis in AXES},
}  # fmt: skip


def means(cause: str) -> str:
    return MEANS.get(cause, cause)


def ms(value: float) -> str:
    """Milliseconds; seconds from ten of them on."""
    if abs(value) >= 1e4:
        return f"{value / 1e3:,.2f} s"
    return f"{value:,.0f} ms" if abs(value) >= 1e3 else f"{value:.3g} ms"


def size(bytes_: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(bytes_) >= scale:
            return f"{bytes_ / scale:,.1f} {unit}"
    return f"{bytes_:,.0f} B"


def signed(value: float, how: Callable[[float], str]) -> str:
    """A difference, its sign said."""
    return f"{'+' if value >= 0 else '−'}{how(abs(value))}"


def count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def colour(cause: str) -> str:
    """The class that colours a cause or an axis: its own name, made safe."""
    return "c-" + re.sub(r"\W+", "-", cause.lower())
