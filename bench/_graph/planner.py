"""A plan for any model that can be captured: every baseline and weft's own ways priced the same, the best taken and written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bench._graph.rules import joint
from bench._graph.search import Candidate, GraphSearch
from bench._graph.task import CapturedTask, example_size
from bench._graph.units import Units
from weft.cluster.spec import Cluster
from weft.core.layout import R
from weft.plan.plan import Plan, nine_digits, rounded_ms, with_groups, zero_levels
from weft.plan.schedules import PLAIN
from weft.plan.setting import Setting
from weft.plan.spec import MIXED
from weft.rewrite.updates import by_definition

if TYPE_CHECKING:
    from weft.plan.space import Limits

Say = Callable[[str], None]


def task_of(model: str, cluster: Cluster, batch: int, dtype: str, optimizer: str = "adam") -> CapturedTask:
    """The model at a batch: as many samples on every device as its example has, where none is given."""
    return CapturedTask(model, cluster, batch or example_size(model) * cluster.devices, dtype, optimizer)


def make_plan(task: CapturedTask, limits: Limits, say: Say, objective: str = "time") -> Plan | dict[str, str]:
    """The best way found, or why each system has none."""
    search = GraphSearch(task, limits.room(task.cluster))
    found = all_ways(search, say)
    ways = {name: way for name, way in found.items() if isinstance(way, Candidate)}
    lacking = {name: why for name, why in found.items() if isinstance(why, str)}
    if not ways:
        return lacking
    best = min(ways.values(), key=lambda w: (nine_digits(w.memory if objective == "memory" else w.seconds), w.name != "weft"))
    others = {name: rounded_ms(way.seconds) for name, way in ways.items() if name != "weft"}
    return record(task, limits, best, others, {k: v for k, v in lacking.items() if k != "weft"}, objective)


def all_ways(search: GraphSearch, say: Say) -> dict[str, Candidate | str]:
    """The best way of every system, or why it has none. Of weft and of Unity, which know rules, the faster with and without."""
    say("baselines")
    found = {**search.baselines(), **search.free(say)}
    say("rules")
    for name, way in joint(search).items():
        plain = found.get(name)
        if way.memory <= search.memory and (not isinstance(plain, Candidate) or nine_digits(way.seconds) < nine_digits(plain.seconds)):
            found[name] = way
            say(f"{name}: {way.seconds * 1e3:,.1f} ms, {way.describe()}")
    return found


def record(task: CapturedTask, limits: Limits, way: Candidate, others: Mapping[str, float], lacking: Mapping[str, str], objective: str) -> Plan:
    from weft.ops.registry import flops

    work = sum(flops(n) for n in task.captured().program.nodes)
    peak = task.cluster.devices * task.cluster.device.peak(task.dtype)
    predicted = {
        "step_ms": rounded_ms(way.seconds), "tokens_per_s": float(f"{task.batch / way.seconds:.6g}"),
        "mfu": float(f"{work / way.seconds / peak:.4g}"), "memory_gb": float(f"{way.memory / 1e9:.4g}"), "gap": 0.0,
        "causes_ms": {k: rounded_ms(v) for k, v in sorted(way.causes.items()) if v > 1e-9}, "memory_parts_gb": {},
    }  # fmt: skip
    layouts = layouts_of(way)
    setting = with_groups(replace(setting_of(task, way), stages=tuple(_pieces(way)) if way.staged else ()), layouts)
    return Plan(
        task.model, task.cluster.text, 0, objective, way.name, setting, limits.data(), predicted, others, lacking, layouts,
    )  # fmt: skip


def setting_of(task: CapturedTask, way: Candidate) -> Setting:
    """The degrees of a way in the words of a setting; `layouts` say the rest."""
    sizes = way.mesh.sizes
    dp, tp = sizes.get("dp", 1), sizes.get("tp", 1)
    levels = Counter(zero_levels(way.placed.program).values())
    zero = max(levels, key=lambda z: (levels[z], z), default=0)  # of most parameters; a plan names the others
    own = task.batch // (way.rounds * dp)
    micro = own if own and task.batch % (dp * own) == 0 else 1
    again = way.staged is not None and any(s.again for s in way.staged.stages)
    schedule = way.staged.schedule if way.staged else PLAIN
    return Setting.counted(
        global_batch=task.batch, micro_batch=micro, dp=dp, tp=tp, pp=way.pp, zero=zero, recompute=MIXED if again else "none",
        schedule=schedule, dtype=task.dtype, overlap_sends=bool(way.overlap),
    )  # fmt: skip


def layouts_of(way: Candidate) -> dict[str, Any]:
    """The mesh of a stage, how every input that is not replicated is laid out on it, what is gathered again, the rules used, with the moves where they
    led to another step, what runs overlapped with compute, and the program so placed, updates by rows written as what they stand for."""
    inputs = {
        name: {axis: str(place) for axis, place in node.layout.placements.items() if place != R}
        for name, node in way.placed.program.input_names.items()
    }
    moves = None if way.moves is None else [move.data() for move in way.moves]
    ends = {"units": unit_ends(way)} if way.staged else {}
    return {
        "mesh": dict(way.mesh.sizes), "inputs": {k: v for k, v in inputs.items() if v}, "again": sorted(way.placed.again),
        "rules": list(way.rules), "moves": moves, "micro_batches": way.rounds, "beside": sorted(way.overlap),
        "program": by_definition(way.placed.program).text,
        **ends,
    }  # fmt: skip


def unit_ends(way: Candidate) -> list[int]:
    """The values that all units but the last hand on, by their numbers among the nodes of the program."""
    units, at = Units(way.placed, way.overlap), {n: i for i, n in enumerate(way.placed.program.nodes)}
    return [at[units.cuts[u.last][1]] for u in units.all[:-1]]


def _pieces(way: Candidate) -> list[tuple[tuple[str, str, int], ...]]:
    assert way.staged is not None
    made = []
    for stage in way.staged.stages:
        kinds = [(f"unit{i}", "full" if i in stage.again else "none", 1) for i in range(stage.first, stage.last)]
        made.append(tuple(kinds))
    return made
