"""A plan of a captured program as facts for a page: the program it was made of, read back and run through the same clock as then."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.cluster.spec import Cluster, cluster
from weft.core.errors import PlanError, WeftError
from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.memory import needed, room
from weft.cost.timeline import Timeline
from weft.ops.registry import nbytes
from weft.plan.graph.stages import FULL, MIXED, Stager, UnitStage, timeline
from weft.plan.graph.timing import PlacedProgram
from weft.plan.graph.units import Units
from weft.plan.layouts.lifetimes import Lifetimes
from weft.plan.plan import Plan, step_of
from weft.plan.space import Limits
from weft.report.facts import Curve, View
from weft.rewrite.updates import by_rows, rules

DRAWN = 4  # rounds of micro-batches of a step that are drawn; the rest repeats
HELD = {Role.PARAMETER: "parameters", Role.BUFFER: "parameters", Role.CONSTANT: "parameters", Role.BATCH: "batch"}


def of_captured(plan: Plan, run_model: bool = False) -> dict[str, Any]:
    """What a page tells beyond decisions: the model and its layouts, stages, the step in time, memory, and why it is right."""
    if "program" not in plan.layouts:
        return {"says": ["This plan was saved without its program; plan again to see its tensors and its step."]}
    known = _Known(plan)
    known.require_room()
    seen = known.piped() if known.stages and plan.setting.pp > 1 else known.whole()
    return {**_held(known), **seen, **_right(plan, known.program, run_model)}


def _right(plan: Plan, program: Program, run_model: bool) -> dict[str, Any]:
    """Whether the plan's program is what the model's own file gives today, communication aside."""
    from weft.api.record import ruled, verbs
    from weft.plan.graph.planner import task_of
    from weft.plan.replay import moves_of, rewritten

    try:
        plan.require_may_run(run_model)
        task = task_of(plan.model, cluster(plan.cluster), plan.setting.global_batch, plan.setting.dtype)
        step, moves = rewritten(task.captured(plan.layouts["micro_batches"]), moves_of(plan.layouts))
        steps = verbs(program, step.program)
    except WeftError as error:
        advice = f" (`{error.repairs[0]}`)" if error.repairs else ""
        return {"says": [f"The plan is not compared with its model here: {error.message}{advice}."]}
    if not all(step["same"] for step in steps):
        return {"says": [f"{plan.model} is no longer the model that was planned; plan again."]}
    return {"verbs": [*ruled(moves), *steps]}


# --- the program, its stages, its tensors


@dataclass(frozen=True, eq=False)
class _Known:
    """What the file holds, read back."""

    plan: Plan

    @cached_property
    def program(self) -> Program:
        program, known = step_of(self.plan.layouts["program"]), {rule.name for rule in rules()}
        return by_rows(program) if known.intersection(self.plan.layouts["rules"]) else program

    @cached_property
    def cluster(self) -> Cluster:
        return cluster(self.plan.cluster)

    def require_room(self) -> None:
        """A program is placed on a mesh of the entire cluster, or of a stage of it."""
        needed, mesh = self.plan.setting.pp * math.prod(self.plan.layouts["mesh"].values()), self.program.mesh.sizes
        if needed != self.cluster.devices or dict(mesh) != dict(self.plan.layouts["mesh"]):
            raise PlanError(
                "the plan does not go with its cluster", needed=f"{needed} devices, a program on {self.plan.layouts['mesh']}",
                found=f"{self.cluster.devices} devices of {self.plan.cluster}, a program on {dict(mesh)}",
            )  # fmt: skip

    @cached_property
    def placed(self) -> PlacedProgram:
        pp = self.plan.setting.pp
        part = self.cluster if pp == 1 else self.cluster.slice(0, self.cluster.devices // pp)
        return PlacedProgram(self.program, part, frozenset(self.plan.layouts["again"]))

    @property
    def overlap(self) -> frozenset[str]:
        return frozenset(self.plan.layouts["beside"])

    @property
    def rounds(self) -> int:
        return int(self.plan.layouts["micro_batches"])

    @property
    def budget(self) -> float:
        return Limits.of(self.plan.limits).room(self.cluster)

    @cached_property
    def units(self) -> Units:
        return Units(self.placed, self.overlap)

    @cached_property
    def stages(self) -> list[UnitStage]:
        """The stages as they were split, with what each recomputes."""
        told, setting = self.plan.stages, self.plan.setting
        again = FULL if told and all(how == "full" for stage in told for _, how, _ in stage) else MIXED
        stager = Stager(self.units.all, self.budget, self.rounds, again, setting.schedule)
        found, first = list[UnitStage](), 0
        for pieces, alive in zip(told, setting.pipeline.in_flight(max(1, len(told)), self.rounds), strict=False):
            made = stager.stage(first, first + len(pieces), alive)
            found += [made] if made is not None else []
            first += len(pieces)
        return found

    def stage_of(self, node: Node) -> int | None:
        """The stage that holds an input: the one that reads it first."""
        at = self.units.of.get(node)
        if at is None:
            return None
        unit = next((i for i, u in enumerate(self.units.all) if u.last >= at), len(self.units.all) - 1)
        return next((i for i, s in enumerate(self.stages) if s.first <= unit < s.last), None)

    # --- the step

    def whole(self) -> dict[str, Any]:
        """One stage: every op where it runs, and memory meanwhile."""
        ran = self.placed.run(self.overlap, once=True)
        ran.run()
        title = "one step" if self.rounds == 1 else "the last micro-batch"
        note = "" if self.rounds == 1 else f"The last of {self.rounds} micro-batches and the update; the others repeat it without."
        again = self.stages[0].more if self.stages else 0.0
        if again:
            note = f"{note} {len(self.stages[0].again)} parts are recomputed, {again * 1e3:.3g} ms beyond what is drawn.".strip()
        memory = [] if again else list(_memory(self.placed, ran.began, ran.now, self.rounds))
        return {"views": [View(title, {"predicted": ran.line}, note)], "memory": memory, "budget": self.budget,
                "memory_note": "Of the busiest device, by what it holds."}  # fmt: skip

    def piped(self) -> dict[str, Any]:
        """Several stages: every pass where it runs, one micro-batch op by op, and memory of the fullest stage."""
        count = len(self.stages)
        few = min(self.rounds, DRAWN * count)
        schedule = self.plan.setting.schedule
        line = timeline(self.stages, self.cluster, few, schedule, bool(self.overlap))
        note = f"The first {few} of {self.rounds} micro-batches; the rest repeats them." if few < self.rounds else ""
        ops = self.placed.run(self.overlap, once=False)
        ops.run()
        views = [View("the full step", {"predicted": line}, note),
                 View("one micro-batch, op by op", {"predicted": ops.line}, "The stages one after the other, as if they were one.")]  # fmt: skip
        fullest = max(range(count), key=lambda i: self.stages[i].memory)
        return {"views": views, "memory": list(self._stage_memory(fullest, line)), "budget": self.budget,
                "causes_ms": {"predicted": _causes(line, count)}, "memory_note": f"Of stage {fullest}, the fullest of {count}. {note}".strip()}  # fmt: skip

    def _stage_memory(self, i: int, line: Timeline) -> Iterator[Curve]:
        stage, units, end = self.stages[i], self.units.all, line.seconds
        own = range(stage.first, stage.last)
        kept = {u: units[u - 1].sent * (u > 0) if u in stage.again else units[u].saved for u in own}
        passing = 2 * stage.total.work + max((units[u].saved for u in stage.again), default=0.0)
        parts = {"state": stage.total.state, "gradients": stage.total.grads if self.rounds > 1 else 0.0, "temporaries": passing}
        yield from (Curve(name, [(0.0, held), (end, held)], stacked=True) for name, held in parts.items() if held)
        now, points = 0.0, [(0.0, 0.0)]
        for k in sorted(line.on(f"stage {i}"), key=line.start.__getitem__):
            if line.tasks[k].cause in ("forward", "backward"):
                comes = line.tasks[k].cause == "forward"
                now += sum(kept.values()) * (1 if comes else -1)
                points.append((line.start[k] if comes else line.end[k], now))
        yield Curve("activations", [*points, (end, now)], stacked=True)
        spare = stage.memory - room(stage.memory)
        yield Curve("safety margin", [(0.0, spare), (end, spare)], stacked=True)


def _causes(line: Timeline, stages: int) -> dict[str, float]:
    """Milliseconds of the busiest stage by pass, and what it waits."""
    busiest = max(range(stages), key=lambda i: line.busy(f"stage {i}"))
    found: dict[str, float] = defaultdict(float)
    for k in line.on(f"stage {busiest}"):
        found[line.tasks[k].cause] += line.tasks[k].seconds * 1e3
    return {**found, "bubble": line.seconds * 1e3 - sum(found.values())}


def _held(known: _Known) -> dict[str, Any]:
    """Every tensor with its layout, stages among it, and what is sent."""
    from weft.api.record import communication, tensors

    program, pp = known.program, known.plan.setting.pp
    states = {i: "" for _, i in program.state if program.input_names[i].role not in HELD}
    held = tensors(program, states)
    if pp > 1:
        homes = {n.partition(".")[2]: known.stage_of(x) for n, x in program.inputs_for(Role.PARAMETER, Role.BUFFER).items()}
        held = [{**t, "places": {**_at(homes.get(t["name"])), **t["places"]}} for t in held]
    mesh = {"pp": pp, **program.mesh.sizes} if pp > 1 else dict(program.mesh.sizes)
    return {"held": held, "mesh": mesh, "communication": communication(program), "program": program, "per_micro_batch": known.rounds > 1}


def _at(stage: int | None) -> dict[str, str]:
    return {} if stage is None else {"pp": f"O({stage})"}


def _memory(placed: PlacedProgram, began: dict[Node, float], seconds: float, rounds: int) -> Iterator[Curve]:
    """What is in memory over the pass, by what it is; gradients of earlier micro-batches, and the safety margin, throughout."""
    order = [*placed.program.inputs, *placed.roles.order]
    clock, now = list[float](), 0.0
    for node in order:
        now = max(now, began.get(node, now))  # a slice takes no time of its own
        clock.append(now)
    spans = Lifetimes(placed.program)
    spans.time = {n: t for t, n in enumerate(order)}
    changes: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for node in order:
        for index, type_ in enumerate(node.types):
            for start, stop in placed._spans(spans, node, index):
                changes[_kind(placed, node)][start] += nbytes(type_)
                changes[_kind(placed, node)][stop] -= nbytes(type_)
    for name in ("parameters", "optimizer state", "batch", "activations", "gradients"):
        if name in changes:
            yield Curve(name, [*_summed(changes[name], clock), (seconds, 0.0)], stacked=True)
    if rounds > 1:
        yield Curve("sums of gradients", [(0.0, placed.accumulated), (seconds, placed.accumulated)], stacked=True)
    used = placed.peak + (placed.accumulated if rounds > 1 else 0.0)
    spare = needed(used) - used
    yield Curve("safety margin", [(0.0, spare), (seconds, spare)], stacked=True)


def _kind(placed: PlacedProgram, node: Node) -> str:
    if node in placed.program.input_set:
        return HELD.get(node.role, "optimizer state")
    return "activations" if node in placed.roles.forward else "gradients"


def _summed(changes: dict[int, float], clock: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Bytes after every change, in the order of the nodes; what ends with the step is in memory until then."""
    now = 0.0
    for at in sorted(changes):
        if at < len(clock):
            now += changes[at]
            yield clock[at], now
