"""Two plans or runs on one page: figures and decisions side by side, their steps on one axis of time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from weft.report.facts import Curve, Facts, Figure, View


def compared(a: Facts, b: Facts, names: tuple[str, str]) -> Facts:
    """The facts of both, by name; `names` are made different where they are equal."""
    first, second = names if names[0] != names[1] else (f"{names[0]} (1)", f"{names[1]} (2)")
    return Facts(
        title=f"{first} and {second}", about=_about(a.about, b.about, first, second), figures=list(_figures(a.figures, b.figures, first, second)),
        plan=_decisions(a.plan, b.plan), plan_head=("decision", first, second), says=[*(f"{first}: {x}" for x in a.says), *(f"{second}: {x}" for x in b.says)],
        views=_views(a, b, first, second), causes_ms={**_named(a.causes_ms, first), **_named(b.causes_ms, second)},
        memory=[Curve(name, _total(f.memory), kind=kind) for name, f, kind in ((first, a, "dp"), (second, b, "tp")) if f.memory],
        budget=max(a.budget, b.budget),
        memory_note="Peak and course of the memory of a device.", steps={},
    )  # fmt: skip


def _about(a: str, b: str, first: str, second: str) -> str:
    """What each is, and the sentences that stand in both once."""
    x, y = (re.split(r"(?<=\.) ", text) for text in (a, b))
    both = [s for s in x if s in y]
    own = (f"{name}: {' '.join(s for s in of if s not in both)}" for name, of in ((first, x), (second, y)))
    return " ".join([*own, *both])


def _figures(a: Sequence[Figure], b: Sequence[Figure], first: str, second: str) -> list[Figure]:
    other = {f.label: f for f in b}
    pairs = [(f, other[f.label]) for f in a if f.label in other]
    kinds = {"step, predicted", "step, measured"}
    steps = [f for f in (*a, *b) if f.label in kinds]
    if len(steps) == 2 and steps[0].label != steps[1].label:  # a plan and a run
        pairs.insert(0, (steps[0], steps[1]))
    return [Figure(x.label, x.value, f"{second}: {y.value}" + (f" ({y.label})" if y.label != x.label else "")) for x, y in pairs]


def _decisions(a: Sequence[tuple[str, str, str]], b: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    x, y = ({name: value for name, value, _ in rows} for rows in (a, b))
    return [(name, x.get(name, "-"), y.get(name, "-")) for name in dict.fromkeys((*x, *y))]


def _named(parts: Mapping[str, Mapping[str, float]], name: str) -> dict[str, Mapping[str, float]]:
    """What was measured, or else predicted."""
    chosen = parts.get("measured") or parts.get("predicted")
    return {name: chosen} if chosen else {}


def _views(a: Facts, b: Facts, first: str, second: str) -> list[View]:
    lines = {}
    for name, f in ((first, a), (second, b)):
        if f.views and f.views[0].lines:
            lines[name] = f.views[0].lines.get("measured") or next(iter(f.views[0].lines.values()))
    return [View("one step", lines, "Both steps on one axis of time.")] if lines else []


def _total(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """The sum of stacked curves at the times of all of them; else the first."""
    stacked = [c for c in curves if c.stacked]
    if not stacked:
        return list(next((c for c in curves if c.label == "measured"), curves[0]).points)
    times = sorted({t for c in stacked for t, _ in c.points})
    return [(t, sum(_at(c.points, t) for c in stacked)) for t in times]


def _at(points: Sequence[tuple[float, float]], time: float) -> float:
    return next((b for t, b in reversed(points) if t <= time), 0.0)
