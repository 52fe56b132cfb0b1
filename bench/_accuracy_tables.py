"""Tables of what was predicted and measured on the machine at hand, for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WAYS = {"eager": "as torch runs it", "compiled": "compiled", "weft": "as weft runs it"}


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """By name, of a result of `bench.gpu_accuracy` or of `weft bench cpu-accuracy`."""
    rows = found["rows"]
    if found["bench"] == "cpu-accuracy":
        yield "cpu-accuracy", on_processor(rows, found["order"])
        return
    if any("measured_ms" in r for r in rows):
        yield "gpu-accuracy time", times([r for r in rows if "measured_ms" in r])
    held = [r for r in rows if "measured_gb" in r and "measured_ms" not in r]  # a row with neither was not reached in time
    if held:
        yield "gpu-accuracy memory", memory(held)


def times(rows: Sequence[Mapping[str, Any]]) -> str:
    read = sorted((r for r in rows if r.get("error") is not None), key=lambda r: r["case"])
    lines = [[r["case"], f"{r['measured_ms']:.2f}", f"{r['predicted_ms']:.2f}", f"{r['error']:+.1%}"] for r in read]
    errors = [abs(r["error"]) for r in read]
    last = [f"median and worst of {len(read)}", "", "", f"{statistics.median(errors):.1%}, {max(errors):.1%}"]
    return _table(["step", "measured ms", "predicted ms", "error"], [*lines, last])


def memory(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a setting, one column a way to run it."""
    settings: dict[str, dict[str, str]] = {}
    for row in rows:
        error = row.get("memory_error")
        name = row["case"].replace(f" {row['way']}", "")
        settings.setdefault(name, {})[row["way"]] = f"{error:+.1%}" if error is not None else "not predicted"
    lines = [[name, *(ways.get(way, "") for way in WAYS)] for name, ways in sorted(settings.items())]
    return _table(["setting", *WAYS.values()], lines)


def on_processor(rows: Sequence[Mapping[str, Any]], orders: Mapping[str, Mapping[str, Any]]) -> str:
    """Row by row, and below what was predicted in another order than measured."""
    read = [r for r in rows if r.get("error") is not None]
    lines = [[r["case"], f"{r['measured']:.1f}", f"{r['predicted']:.1f}", f"{r['error']:+.1%}"] for r in read]
    errors = [abs(r["error"]) for r in read]
    last = [f"median and worst of {len(read)}", "", "", f"{statistics.median(errors):.1%}, {max(errors):.1%}"]
    said = [f"- {name}: {_order(found)}{_ties(found)}" for name, found in orders.items()]
    return _table(["step", "measured ms", "predicted ms", "error"], [*lines, last]) + "\n\nOrder of the five kinds:\n\n" + "\n".join(said)


def _order(found: Mapping[str, Any]) -> str:
    measured = " < ".join(found["measured"])
    if found["same"]:
        return f"{measured}, as predicted"
    return f"{measured}; predicted the other way round: " + "; ".join(f"{pair} ({by:.1%} apart)" for pair, by in found["wrong"].items())


def _ties(found: Mapping[str, Any]) -> str:
    """Neighbours that were nearer to one another than their ratio varied from round to round."""
    ties = {pair: n for pair, n in found.get("neighbours", {}).items() if n["tie"]}
    said = "; ".join(f"{pair} ({n['apart']:.1%} apart, spread {n['spread']:.1%})" for pair, n in ties.items())
    return f". A tie within the spread of rounds: {said}" if said else ""


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]).replace("| --- ", "|---").replace("|--- |", "|---|")
