"""`weft bench intervals --rows FILE ...`: how far predictions lie from measured steps, kind by kind, and how well their spread covers systems left out."""

from __future__ import annotations

import itertools
import json as json_
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

TAIL = 0.1  # at either end
ALSO = {"captured": ("dense",)}  # measured on devices that were calibrated first: on others no better known than these
KINDS = ("classic", "dense", "experts", "captured", "processor")
HERE = Path(__file__).parent
OWN = (HERE / "torchtitan_steps.csv", HERE.parent / "tests" / "plan" / "published.csv")
ORIGIN = (
    "weft bench intervals, over published and measured steps: VIA-Research/vTrain (MIT), Megatron-LM SC'21, Korthikanti 2022, Grattafiori 2024, "
    "MegaScale, nanotron, torchtitan and its users (BSD-3), NVIDIA-NeMo/Megatron-Bridge and MLCommons training_results_v5.1 (Apache-2.0), "
    "eth-easl/sailor (MIT), weft's own runs in docs/accuracy.md"
)
# docs/accuracy.md, on one H200: measured over predicted, step times of weft's own and memory as weft runs it
H200_TIME = (-4.5, 0.1, -10.0, -1.6, 0.7, -0.8, 4.5, 6.3, 9.8, -3.7, -1.9, 0.8, 3.5, 0.4, -2.0)
H200_MEMORY = (-1.6, -1.0, -4.3, -5.7, -2.5, -6.0, 4.6, -2.8, 4.8)
CPU_TIME = {  # of one machine, so that a model on so many processes stands for a system
    "10M on two processes": (-4.9, -4.6, -2.7, 1.6, 2.2, -3.8, -7.5),
    "30M on two processes": (-5.8, -8.2, -1.7, -0.6, -1.7, -6.1, -9.4),
    "10M on four processes": (-9.0, -9.3, -7.1, -12.2, -14.6, -9.6, -13.1),
}


@dataclass(frozen=True)
class Residual:
    """ln(measured / predicted) of one row."""

    measure: str
    kind: str
    system: str
    group: str
    value: float


def register(app: typer.Typer) -> None:
    app.command("intervals")(intervals)


def intervals(
    rows: list[str] = typer.Option([], "--rows", help="A CSV as of `bench accuracy`, or of steps with peak memory; may be repeated."),
    out: str = typer.Option("", "--out", help="Write the figures to this file, such as weft/cluster/residuals.json."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Compute the spread of every kind of prediction, and its coverage with entire systems left out."""
    from weft.cli.output import console, emit

    found = list(_own())
    for path in (*map(str, OWN), *rows):
        found += _of_file(path)
    figures = figures_of(found)
    for measure in ("time", "memory"):
        for kind, f in figures[measure].items():
            span = f"{math.exp(f['low']) - 1:+.0%} to {math.exp(f['high']) - 1:+.0%}"
            console.print(f"{measure} {kind}: {f['rows']} rows, {span}, {f['covered']:.0%} of systems left out", highlight=False)
    if out:
        Path(out).write_text(json_.dumps(figures, indent=1) + "\n")
    if json:
        emit({"bench": "intervals", **figures})


def figures_of(found: Sequence[Residual]) -> dict[str, Any]:
    """Spread and coverage of each measure and kind, and how far pairs of one group are off against each other."""
    made: dict[str, Any] = {"origin": ORIGIN}
    made["time"] = {kind: _figure([r for r in found if r.measure == "time"], kind) for kind in KINDS}
    made["memory"] = {"all": _figure([replace(r, kind="all") for r in found if r.measure == "memory"], "all")}  # so few were measured
    groups: dict[tuple[str, str], list[float]] = {}
    for r in found:
        if r.group and r.measure == "time":
            groups.setdefault((r.system, r.group), []).append(r.value)
    apart = [abs(a - b) for values in groups.values() for a, b in itertools.combinations(values, 2)]
    return {**made, "pairs": {"median": _round(statistics.median(apart)), "count": len(apart)}}


def _figure(found: Sequence[Residual], kind: str) -> dict[str, Any]:
    own = [r for r in found if r.kind == kind]
    pool = systems_of(r for r in found if r.kind in (kind, *ALSO.get(kind, ())))
    low, high = ends(pool)
    return {"low": _round(low), "high": _round(high), "rows": len(own), "systems": {s: len(v) for s, v in systems_of(own).items()},
            "covered": _round(coverage(pool, systems_of(own)))}  # fmt: skip


def systems_of(found: Iterable[Residual]) -> dict[str, list[float]]:
    systems: dict[str, list[float]] = {}
    for r in found:
        systems.setdefault(r.system, []).append(r.value)
    return systems


def ends(systems: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """What lies between holds all but the tails, every system weighing the same, and is widened by 1 + 1/n for one that is not among the n."""
    ordered = sorted((x, 1 / len(values)) for values in systems.values() for x in values)
    total, at, points = float(len(systems)), 0.0, []
    for x, weight in ordered:
        points.append(((at + weight / 2) / total, x))
        at += weight
    low, high = _at(points, TAIL), _at(points, 1 - TAIL)
    more = (high - low) / 2 / len(systems)
    return low - more, high + more


def _at(points: Sequence[tuple[float, float]], share: float) -> float:
    if share <= points[0][0]:
        return points[0][1]
    for (a, x), (b, y) in itertools.pairwise(points):
        if share <= b:
            return x + (y - x) * (share - a) / (b - a)
    return points[-1][1]


def coverage(pool: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]]) -> float:
    """Of all rows, those within the spread of the other systems."""
    inside = total = 0
    for system, values in own.items():
        rest = {s: v for s, v in pool.items() if s != system}
        if rest:
            low, high = ends(rest)
            inside += sum(low <= x <= high for x in values)
            total += len(values)
    return inside / total if total else 0.0


def _round(x: float) -> float:
    return float(f"{x:.3g}")


# --- residuals


def _own() -> Iterable[Residual]:
    yield from (Residual("time", "captured", "one H200", "", -math.log1p(x / 100)) for x in H200_TIME)
    yield from (Residual("time", "processor", system, "", -math.log1p(x / 100)) for system, errors in CPU_TIME.items() for x in errors)
    yield from (Residual("memory", "captured", "one H200", "", -math.log1p(x / 100)) for x in H200_MEMORY)


def _of_file(path: str) -> list[Residual]:
    return [r for row in _read(path) for r in _of_row(row)]


def _read(path: str) -> Iterable[Any]:
    from bench._rows import Row, read

    return (r for r in read(path) if isinstance(r, Row) and not r.lacks and not r.beside and not {"micro_batch", "global_batch"} & set(r.assumed))


def _of_row(row: Any) -> Iterable[Residual]:
    """Of a row whose every word is modelled."""
    from weft.cost.interval import kind_of

    kind = kind_of(row.setting.kernels, bool(row.shape.experts), False)
    file, _, source = row.case.partition(" ")
    system = source.split()[0].rstrip("0123456789") if source else file.split(":")[0]
    if kind == "experts":
        system = f"{system} on {row.cluster.device.name}"
    step = row.step()
    value = math.log(row.measured / row.metric(step)) * (-1 if row.faster else 1)
    yield Residual("time", kind, system, row.group, value)
    if row.held and row.setting.kernels != "eager":
        yield Residual("memory", kind, system, row.group, math.log(row.held / step.peak_memory.total))
