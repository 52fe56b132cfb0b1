"""What a page shows, whichever it is of: a plan that is predicted, or a run that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.program import Program
from weft.cost.timeline import Timeline


@dataclass(frozen=True)
class Figure:
    """A number that matters, said large."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class View:
    """Timelines that share one axis of time, by what they are: `predicted`, `measured`."""

    title: str
    lines: Mapping[str, Timeline]
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """Bytes over seconds; a stacked curve lies on the one before it."""

    label: str
    points: Sequence[tuple[float, float]]
    stacked: bool = False
    kind: str = ""  # what colours it, where that is not its label


@dataclass(frozen=True)
class Facts:
    """`tensors` are tensors as `weft.record.run` writes them; `repeats` says how often a folded layer stands in the full model."""

    title: str
    about: str
    figures: Sequence[Figure]
    plan: Sequence[tuple[str, str, str]]
    plan_head: tuple[str, str, str] = ("decision", "value", "meaning")
    refresh: int = 0  # seconds after which the page loads itself again, while a run is watched
    says: Sequence[str] = ()
    mesh: Mapping[str, int] = field(default_factory=dict)
    tensors: Sequence[Mapping[str, Any]] = ()
    repeats: float = 1.0
    stages: Sequence[float] = ()  # layers of each
    communication: Sequence[Mapping[str, Any]] = ()
    program: Program | None = None  # to be drawn op by op
    per_micro_batch: bool = False  # whether `communication` is of one micro-batch of several
    views: Sequence[View] = ()
    causes_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # predicted, measured
    memory: Sequence[Curve] = ()
    budget: float = 0.0
    memory_note: str = ""
    alternatives: Sequence[Mapping[str, Any]] = ()  # plan, step_ms, memory_gb, reason
    chosen: str = ""
    reasons: Sequence[Mapping[str, Any]] = ()
    verbs: Sequence[Mapping[str, Any]] = ()
    schedule: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Sequence[float]] = field(default_factory=dict)
    unit: str = ""


def perfetto(facts: Facts) -> dict[str, Any]:
    """The timelines of a page as one file that Perfetto and Chrome open: predicted and measured as processes side by side."""
    events: list[dict[str, Any]] = []
    process = 0
    for view in facts.views:
        for label, line in view.lines.items():
            events += line.chrome(process, f"{label}, {view.title}")["traceEvents"]
            process += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}
