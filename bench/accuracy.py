"""`weft bench accuracy --rows FILE`: predict every row of measured or published runs and say how far off it is."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from weft.cli.output import console, emit

SMALLEST_GROUP = 5  # rows from which an order is worth comparing
MARKS = "<!-- bench accuracy: begin -->", "<!-- bench accuracy: end -->"


def register(app: typer.Typer) -> None:
    app.command("accuracy")(accuracy)


def accuracy(
    rows: list[str] = typer.Option(..., "--rows", help="A CSV of iteration times or of published steps; may be repeated."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
    doc: str = typer.Option("", "--doc", help="Write the tables into this page, between its marks."),
) -> None:
    """Predict every row of a file and compare with what was measured."""
    found = {Path(path).stem: [predict(row) for row in _read(path)] for path in rows}
    everything = [row for part in found.values() for row in part]
    groups = summary(found)
    _show(everything, groups)
    if doc:
        _write(Path(doc), found, groups)
    if json:
        whole = _figures([r for r in everything if r["error"] is not None])
        emit({"bench": "accuracy", "machine": platform.processor() or platform.machine(), "rows": everything, "groups": groups, **whole,
              "files": {name: len(part) for name, part in found.items()}, "classes": by_class(found)})  # fmt: skip


def _read(path: str) -> list[Any]:
    from bench._rows import read
    from weft.core.errors import WeftError

    if not Path(path).is_file():
        raise WeftError(f"no file {path}", needed="a CSV of iteration times or of published steps", found="nothing there")
    found = read(path)
    if not found:
        console.print(f"{path} has no rows", markup=False)
    return found


def predict(row: Any) -> dict[str, Any]:
    """One row of the result; an unreadable one has no error but a reason."""
    from bench._rows import Unreadable
    from weft.core.errors import WeftError

    nothing: dict[str, Any] = {"case": row.case, "group": None, "measured": None, "predicted": None, "error": None}
    if isinstance(row, Unreadable):
        return {**nothing, "reason": row.reason}
    try:
        step = row.step()
        predicted = row.metric(step)
    except Exception as error:  # one row that cannot be simulated must not lose the others
        said = str(error).splitlines()[0] if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
        return {**nothing, "group": row.group, "measured": None if row.lacks else row.measured, "reason": said}
    if row.lacks:
        return {**nothing, "group": row.group, "predicted": predicted, "reason": row.lacks, "assumed": dict(row.assumed)}
    return {
        "case": row.case, "group": row.group, "unit": row.unit, "measured": row.measured, "predicted": predicted,
        "error": predicted / row.measured - 1, "assumed": dict(row.assumed), "class": class_of(row),
        **({"memory_error": step.peak_memory.total / row.held - 1} if row.held else {}),
    }  # fmt: skip


def class_of(row: Any) -> list[str]:
    """Kind of model, dtype and device: what errors are gathered by."""
    shape = row.shape
    kind = "adapters" if row.lora[0] else "mamba and experts" if hasattr(shape, "mamba") else "experts" if shape.experts else "dense"
    return [f"{kind}, classic kernels" if row.setting.kernels == "classic" else kind, row.setting.dtype, row.cluster.groups[0].profile.device.name]


def by_class(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Figures of each class of each file; the bias is that of the time of a step or of what was stated, whichever was measured."""
    classes: dict[tuple[str, ...], list[float]] = {}
    for name, part in found.items():
        for row in part:
            if row["error"] is not None:
                classes.setdefault((name, *row["class"]), []).append(row["error"])
                classes.setdefault((name, "all", "", ""), []).append(row["error"])
    return [
        {"file": NAMES.get(key[0], key[0]), "model": key[1], "dtype": key[2], "device": key[3]} | {
            "count": len(e), "median": statistics.median(map(abs, e)), "p90": percentile(sorted(map(abs, e)), 0.9), "bias": statistics.median(e),
        }
        for key, e in sorted(classes.items())
    ]  # fmt: skip


def summary(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Figures of each file, then of each model and cluster of at least five rows."""
    groups: dict[str, dict[str, Any]] = {}
    for name, part in found.items():
        read = [r for r in part if r["error"] is not None]
        groups[name] = {**_figures(read), "unreadable": len(part) - len(read)}
    for name, part in found.items():
        members: dict[str, list[Mapping[str, Any]]] = {}
        for row in part:
            if row["error"] is not None:
                members.setdefault(row["group"], []).append(row)
        for group, those in sorted(members.items()):
            if len(those) >= SMALLEST_GROUP:
                groups[f"{name}: {group}"] = _figures(those)
    return groups


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"count": 0, "median_error": None, "p90_error": None, "rank_correlation": None}
    errors = sorted(abs(r["error"]) for r in rows)
    order = spearman([r["measured"] for r in rows], [r["predicted"] for r in rows]) if len(rows) >= SMALLEST_GROUP else None
    return {
        "count": len(rows), "median_error": statistics.median(errors), "p90_error": percentile(errors, 0.9),
        "rank_correlation": order, **_memory_figures(rows),
    }  # fmt: skip


def _memory_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of rows that say what the fullest device held."""
    errors = sorted(abs(r["memory_error"]) for r in rows if "memory_error" in r)
    return {"memory_count": len(errors), "median_memory_error": statistics.median(errors)} if errors else {}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Correlation of the ranks; equal values share their mean rank."""
    a, b = _ranks(xs), _ranks(ys)
    return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


# --- for people


def _show(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.table import Table

    worst = sorted((r for r in rows if r["error"] is not None), key=lambda r: -abs(r["error"]))[:10]
    table = Table("row", "measured", "predicted", "error", title="furthest off")
    for r in worst:
        table.add_row(r["case"], f"{r['measured']:,.4g}", f"{r['predicted']:,.4g}", f"{r['error']:+.1%}")
    console.print(table)
    table = Table("rows of", "count", "median", "90th percentile", "rank correlation", title="error")
    for name, g in groups.items():
        table.add_row(name, str(g["count"]), _percent(g["median_error"]), _percent(g["p90_error"]), _number(g["rank_correlation"]))
    console.print(table)
    for r in rows:
        if r["error"] is None:
            which = "not predicted" if r["predicted"] is None else f"predicted {r['predicted']:,.4g}, not compared"
            console.print(f"{which}: {r['case']}: {r['reason']}", markup=False)


def _percent(x: float | None) -> str:
    return "-" if x is None else f"{x:.1%}"


def _four(x: float) -> str:
    """Four digits, without an exponent."""
    return f"{float(f'{x:.4g}'):,.0f}" if abs(x) >= 1e4 else f"{x:,.4g}"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}"


def _write(page: Path, found: Mapping[str, Sequence[Mapping[str, Any]]], groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace what lies between the marks."""
    from weft.core.errors import WeftError

    text = page.read_text() if page.is_file() else ""
    begin, end = MARKS
    if begin not in text or end not in text:
        raise WeftError(f"{page} has no place for the tables", needed=f"the lines {begin} and {end}", found="neither or one of them")
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text("\n".join([f"{head}{begin}", "", tables(found, groups), "", f"{end}{tail}"]))


NAMES = {
    "a100_single_node_iterations": "vTrain, one node", "a100_multi_node_iterations": "vTrain, several nodes", "published_steps": "published runs",
    "published_steps_2": "newer published runs", "sailor_steps": "Sailor", "sailor_memory": "Sailor, memory",
}  # fmt: skip


def tables(found: Mapping[str, Sequence[Mapping[str, Any]]], groups: Mapping[str, Mapping[str, Any]]) -> str:
    """How far off each file and group is, and published runs one by one."""
    lines = ["| measured steps | count | median error | 90th percentile | rank correlation |", "|---|---|---|---|---|"]
    lines += [
        f"| {_named(name)} | {g['count']} | {_percent(g['median_error'])} | {_percent(g['p90_error'])} | {_number(g['rank_correlation'])} |"
        for name, g in groups.items()
    ]
    return "\n".join([*lines, *_published(found)])


def _named(group: str) -> str:
    """`vTrain, one node: GPT of 24 layers, hidden 2048, sequence 1024, 8 A100` for a file's name and 24x2048 s1024 on 8."""
    name, _, of = group.partition(": ")
    shape = re.fullmatch(r"(\d+)x(\d+) s(\d+)(?: on (\d+))?", of)
    on = f", {shape[4]} A100" if shape and shape[4] else ""
    more = f": GPT of {shape[1]} layers, hidden {shape[2]}, sequence {shape[3]}{on}" if shape else f": {of}" if of else ""
    return NAMES.get(name, name) + more


def _published(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Published runs one by one, with their units."""
    lines = []
    for name, rows in found.items():
        if name.startswith("published"):
            lines += ["", f"{NAMES.get(name, name).capitalize()}, one by one:", "", "| run | unit | measured | predicted | error |", "|---|---|---|---|---|"]
            for r in (r for r in rows if r["error"] is not None):
                case = re.sub(r"^\w+:\d+ ", "", r["case"])
                lines.append(f"| {case} | {r.get('unit', '')} | {_four(r['measured'])} | {_four(r['predicted'])} | {r['error']:+.1%} |")
    return lines
