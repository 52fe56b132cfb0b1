"""The timelines of a page as one file that Perfetto and Chrome open: predicted and measured as processes side by side."""

from __future__ import annotations

from typing import Any

from weft.report.facts import Facts


def perfetto(facts: Facts) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    process = 0
    for view in facts.views:
        for label, line in view.lines.items():
            events += line.chrome(process, f"{label}, {view.title}")["traceEvents"]
            process += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}
