"""Charts as SVG: bytes over time, what the time is for, times of steps, batches of a dynamic model. Colours come from the style."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from weft.report.facts import Curve
from weft.report.tags import Markup, join, tag
from weft.report.words import colour, means, ms, size

WIDTH, HEIGHT = 1040, 260
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 14, 30
POINTS = 480  # of a curve; more would not be seen


def ticks(most: float, about: int = 5, least: float = 0.0) -> list[float]:
    """Round numbers between the least and the most, about so many."""
    if most <= least:
        return [least]
    raw = (most - least) / about
    scale = 10 ** math.floor(math.log10(raw))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= raw)
    return [i * step for i in range(math.ceil(least / step - 1e-9), int(most / step * (1 + 1e-9)) + 1)]


def clock(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


class Frame:
    """A box with axes: x from 0 to `span`, y from `least` to `most`."""

    def __init__(self, span: float, most: float, height: int = HEIGHT, least: float = 0.0) -> None:
        self.span, self.least, self.height = span or 1.0, least, height
        self.most = most if most > least else least + 1.0

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.span

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (self.height - BOTTOM - TOP) * (value - self.least) / (self.most - self.least)

    def axes(self, across: Callable[[float], str], up: Callable[[float], str], about: int = 4) -> Markup:
        rows = [
            [
                tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=self.y(v), y2=self.y(v), cls="grid"),
                tag("text", up(v), x=LEFT - 8, y=self.y(v) + 4, text_anchor="end"),
            ]
            for v in ticks(self.most, about, self.least)
        ]
        marks = ticks(self.span, 6)[1:]
        ends = ["end" if self.x(v) > WIDTH - RIGHT - 30 else "middle" for v in marks]  # the last one stays within the picture
        columns = [tag("text", across(v), x=self.x(v), y=self.height - 8, text_anchor=end) for v, end in zip(marks, ends, strict=True)]
        return join([rows, columns])

    def draw(self, label: str, *inner: object) -> Markup:
        body = tag("svg", tag("title", label), *inner, viewBox=f"0 0 {WIDTH} {self.height}", role="img", aria_label=label, cls="chart")
        return tag("div", body, cls="scroll", tabindex=0, role="region", aria_label=label)


def memory(curves: Sequence[Curve], budget: float) -> Markup:
    """Bytes held over one step: stacked parts as areas, other curves as lines, and the budget where it is near."""
    span = max(t for c in curves for t, _ in c.points)
    thinned = {c.label: thin(c.points, span) for c in curves}
    top = _stacked_top([thinned[c.label] for c in curves if c.stacked])
    highest = max([*(b for c in curves if not c.stacked for _, b in thinned[c.label]), *top, 0.0])
    shown = budget if 0 < budget < 4 * highest else 0.0
    frame = Frame(span, max(highest, shown) * 1.08)
    areas, below = [], [0.0] * (POINTS + 1)
    for c in curves:
        if c.stacked:
            above = [low + b for low, (_, b) in zip(below, _grid(thinned[c.label], span), strict=True)]
            areas.append(_area(frame, span, below, above, c.label))
            below = above
    lines = [tag("polyline", points=_steps(frame, thinned[c.label]), cls=f"line {colour(c.kind or c.label)}") for c in curves if not c.stacked]
    line = _budget(frame, shown) if shown else None
    return frame.draw("memory over one step", frame.axes(clock, size), areas, lines, line)


def thin(points: Sequence[tuple[float, float]], span: float) -> list[tuple[float, float]]:
    """At most POINTS points, each the highest of its stretch, so that no peak is lost."""
    if len(points) <= POINTS:
        return list(points)
    best: dict[int, tuple[float, float]] = {}
    for t, b in points:
        k = int(t / span * (POINTS - 1)) if span else 0
        if k not in best or b > best[k][1]:
            best[k] = (t, b)
    return [best[k] for k in sorted(best)]


def _grid(points: Sequence[tuple[float, float]], span: float) -> list[tuple[float, float]]:
    """The curve read at evenly spaced times; it holds its value until the next point."""
    out, i = [], 0
    for k in range(POINTS + 1):
        t = span * k / POINTS
        while i + 1 < len(points) and points[i + 1][0] <= t:
            i += 1
        out.append((t, points[i][1]))
    return out


def _stacked_top(curves: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    if not curves:
        return []
    span = max(c[-1][0] for c in curves)
    return [sum(b) for b in zip(*([b for _, b in _grid(c, span)] for c in curves), strict=True)]


def _area(frame: Frame, span: float, below: Sequence[float], above: Sequence[float], label: str) -> Markup:
    xs = [frame.x(span * k / POINTS) for k in range(POINTS + 1)]
    up = " ".join(f"{x:.1f},{frame.y(b):.1f}" for x, b in zip(xs, above, strict=True))
    down = " ".join(f"{x:.1f},{frame.y(b):.1f}" for x, b in reversed(list(zip(xs, below, strict=True))))
    summary = f"{label}: at most {size(max(a - b for a, b in zip(above, below, strict=True)))}"
    return tag("polygon", tag("title", summary), points=f"{up} {down}", cls=f"area {colour(label)}")


def _steps(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    """A stair: a value holds until the next."""
    out, last = [], None
    for t, b in points:
        if last is not None:
            out.append(f"{frame.x(t):.1f},{frame.y(last):.1f}")
        out.append(f"{frame.x(t):.1f},{frame.y(b):.1f}")
        last = b
    return " ".join(out)


def _budget(frame: Frame, budget: float) -> Markup:
    y = frame.y(budget)
    text = tag("text", f"budget {size(budget)}", x=WIDTH - RIGHT - 6, y=y - 6, text_anchor="end", cls="budget-text")
    return join([tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="budget"), text])


# --- what the time is for


def shares(causes_ms: Mapping[str, Mapping[str, float]]) -> Markup:
    """A bar for each of predicted and measured, on one scale, split by cause."""
    most = max(sum(parts.values()) for parts in causes_ms.values())
    rows = [_bar(label, parts, most) for label, parts in causes_ms.items()]
    seen = dict.fromkeys(c for parts in causes_ms.values() for c, v in parts.items() if v > 0)
    key = [tag("span", tag("i", cls=f"swatch {colour(c)}"), means(c), cls="key") for c in seen]
    return tag("div", rows, tag("p", key, cls="legend"), cls="shares")


def _bar(label: str, parts: Mapping[str, float], most: float) -> Markup:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    pieces = [
        tag("span", cls=f"piece {colour(c)}", style=f"width:{100 * v / most:.3f}%", title=f"{means(c)}: {ms(v)}") for c, v in ordered if v > 0
    ]
    total = sum(parts.values())
    return tag("div", tag("span", label, cls="bar-label"), tag("div", pieces, cls="bar"), tag("span", ms(total), cls="num"), cls="bar-row")


# --- times of steps


def series(values: Sequence[float], label: str, up: Callable[[float], str], kind: str, from_zero: bool = True, first: int = 1) -> Markup:
    """One value per step, the first of which is step `first`."""
    room = 0.08 * (max(values) - min(values))
    frame = Frame(max(1, len(values) - 1), max(values) + room, 180, 0.0 if from_zero else min(values) - room)
    points = " ".join(f"{frame.x(i):.1f},{frame.y(v):.1f}" for i, v in enumerate(values))
    axes = frame.axes(lambda v: f"step {v + first:.0f}" if v == int(v) else "", up, 3)
    return frame.draw(label, axes, tag("polyline", points=points, cls=f"line {colour(kind)}"))


# --- batches of a dynamic model


def rounds(schedule: Mapping[str, object]) -> Markup:
    """A column per batch in the order they run, as high as it has rows; the scale is logarithmic, since rounds thin out fast."""
    found: Sequence[tuple[str, int, int]] = schedule["rounds"]  # type: ignore[assignment]
    kinds = list(dict.fromkeys(name for name, _, _ in found))
    most = max((rows for _, rows, _ in found), default=1)
    frame = Frame(max(1, len(found)), math.log2(most + 1) * 1.05)
    wide = max(1.0, (WIDTH - LEFT - RIGHT) / max(1, len(found)) - 1)
    columns = [
        tag(
            "rect", tag("title", f"batch {i}: {name}, {rows:,} rows, {edges:,} edges"), x=frame.x(i), y=frame.y(math.log2(rows + 1)),
            width=wide, height=max(1.0, frame.y(0) - frame.y(math.log2(rows + 1))), cls=f"k{kinds.index(name) % 6}",
        )
        for i, (name, rows, edges) in enumerate(found)
    ]  # fmt: skip
    powers = [2**p for p in range(0, 31, 2) if 2**p <= most + 1]
    grid = [
        [
            tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=frame.y(math.log2(n + 1)), y2=frame.y(math.log2(n + 1)), cls="grid"),
            tag("text", f"{n:,} rows" if n > 1 else "1 row", x=LEFT - 8, y=frame.y(math.log2(n + 1)) + 4, text_anchor="end"),
        ]
        for n in powers
    ]
    numbers = [v for v in ticks(len(found), 6) if v == int(v) and v < len(found)]
    names = [tag("text", f"batch {v:.0f}", x=frame.x(v + 0.5), y=frame.height - 8, text_anchor="middle") for v in numbers]
    key = [tag("span", tag("i", cls=f"swatch k{i % 6}"), name, cls="key") for i, name in enumerate(kinds)]
    return join([frame.draw("batches in the order they run", grid, columns, names), tag("p", key, cls="legend")])
