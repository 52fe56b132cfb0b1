"""One traced step: every statement of one program or, in micro-batches, every pass of every stage and the update behind them.

Ranks of one host share a clock; between hosts, clocks are set to zero where all meet before a traced step. A pass is timed as one; its
memory is counted at each statement.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft.api.bands import Span, bands, labelled, params_of
from weft.api.compiled import Compiled
from weft.api.runner import Values
from weft.core.node import Node
from weft.core.program import Group, Program
from weft.core.text import node_names
from weft.cost.pipeline import pass_name
from weft.cost.simulate import cause_of
from weft.cost.staged import StagedStep
from weft.cost.timeline import Seen, Task, Timeline
from weft.plan.schedules import Action
from weft.runtime.agree import from_all, world
from weft.runtime.trace import Trace, live_bytes, synchronize, traced

if TYPE_CHECKING:
    from weft.api.step import Step


@dataclass(frozen=True)
class Passed:
    """One pass: when it ran, and the bytes in use at each of its statements."""

    stage: int
    action: Action
    began: float
    ended: float
    bytes_in_use: list[int]


class TracedStep:
    """Runs one step with its statements and every pass of a stage timed, or with memory counted at every statement."""

    update: Trace  # of the program that all steps have: all of one, or what follows the last micro-batch

    def __init__(self, step: Step, memory: bool) -> None:
        self.step, self.memory, self.device = step, memory, step.compiled.device
        self.runner = step.micro_batches.runner if step.micro_batches is not None else None
        self.passes: list[Passed] = []
        self.zero = self.ended = 0.0

    def run(self, given: Mapping[str, Any], state: Values) -> Values:
        runner, compiled = self.runner, self.step.compiled
        plain, usual = compiled._step, runner.call if runner is not None else None
        if dist.is_initialized():
            dist.barrier()  # the clocks of all ranks begin here
        self.zero = time.perf_counter()
        compiled._step, self.update = traced(plain, compiled.code.text, self.device, memory=self.memory)
        if runner is not None:
            runner.call = self._pass
        try:
            out = self.step.run(given, state)
            self.ended = self._now()
        finally:
            compiled._step = plain
            if runner is not None and usual is not None:
                runner.call = usual
        return out

    @property
    def updating(self) -> float:
        """When the update began."""
        return self.ended - (self.update.ended[-1] if self.update.ended else 0.0)

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter() - self.zero

    def _pass(self, g: int, action: Action, step: Compiled, given: Values) -> Values:
        began, memory = self._now(), list[int]()
        out = self._counted(step, given, memory) if self.memory else step(given)
        self.passes.append(Passed(g, action, began, self._now(), memory))
        return out

    def _counted(self, step: Compiled, given: Values, memory: list[int]) -> Values:
        plain = step._step
        step._step, trace = traced(plain, step.code.text, self.device, memory=True)
        workspace = live_bytes(self.runner and self.runner.alive, self.device, without=given)
        try:
            out = step(given)
        finally:
            step._step = plain
        memory += [b + workspace for b in trace.bytes_in_use]
        return out


# --- statements


def measured_line(program: Program, trace: Trace, starts: Mapping[str, float] | None = None) -> tuple[Timeline, dict[str, float]]:
    """Statements of the rank; a collective is in flight from its start until the rank waits for it, then exposed. Above them phases and layers.

    `starts` says when the last rank started each collective: until then this one waits for the others, and no byte moves."""
    units, causes, params = _by_variable(program), dict[str, float](), params_of(program)
    tasks: list[tuple[Task, float]] = []
    started: dict[str, tuple[float, str, str]] = {}
    spans: list[Span] = []

    def add(name: str, stream: str, cause: str, began: float, ended: float) -> None:
        if stream == "compute":
            causes[cause] = causes.get(cause, 0.0) + (ended - began) * 1e3
        if ended > began or stream == "compute":
            tasks.append((Task(name, stream, ended - began, (), cause), began))

    for statement, began, ended in zip(trace.statements, trace.began, trace.ended, strict=True):
        unit = units.get(statement.text.partition("(")[0]) or units.get(statement.made)
        name, cause = (labelled(unit, params), cause_of(unit)) if unit is not None else (statement.text[:40], "compute")
        spans.append((unit, began, ended))
        late = min(max(began, (starts or {}).get(statement.made, 0.0)), ended) if statement.axis or statement.waits else began
        if statement.axis:
            started[statement.made], cause = (ended, name, statement.axis), statement.axis
        elif statement.waits and statement.made in started:
            start, name, cause = started.pop(statement.made)
            add(name, "communication", "in flight", start, began)
            add(name, "communication", cause, max(late, start), ended)
            name = f"wait for {name}"
        if late > began:
            add(f"wait for other ranks: {name}", "compute", "peers", began, late)
        add(name, "compute", cause, late, ended)
    tasks += bands(program, spans)
    return arranged(tasks), {k: v for k, v in causes.items() if v > 0}


def arranged(tasks: Sequence[tuple[Task, float]]) -> Timeline:
    """Tasks with their starts as a timeline, bands first."""
    order = sorted(tasks, key=lambda item: (item[1], {"phase": 0, "layer": 1}.get(item[0].stream, 2)))
    return Timeline(tuple(t for t, _ in order), tuple(b for _, b in order), tuple(b + t.seconds for t, b in order))


def last_starts(step: Step, trace: Trace, after: float = 0.0) -> dict[str, float]:
    """When the last of its ranks started each collective of the traced step, by the name it binds. All ranks must ask.

    Their clocks began where all met before the step, the trace's `after` seconds later. Nothing is said where ranks run different statements."""
    own = {s.made: (s.axis, after + began) for s, began in zip(trace.statements, trace.began, strict=True) if s.axis}
    if world() == 1:
        return {}
    every = from_all((step.compiled.coords, own))
    mine = step.compiled.coords
    found: dict[str, float] = {}
    for name, (axis, _) in own.items():
        peers = [theirs for coords, theirs in every if all(coords[a] == mine[a] for a in mine if a != axis)]
        if all(theirs.get(name, ("", 0.0))[0] == axis for theirs in peers):
            found[name] = max(theirs[name][1] for theirs in peers) - after
    return found


def _by_variable(program: Program) -> dict[str, Node | Group]:
    """What each variable of the generated code stands for: a node, or the group it is in. A group's kernel has its name."""
    grouped = {n: g for g in program.groups for n in g.nodes}
    named = {g.name: g for g in program.groups if g.kind == "fuse"}
    return {**named, **{f"t{name[1:]}": grouped.get(n, n) for n, name in node_names(program).items() if name[1:2].isdigit()}}


# --- stages


def seen_of_stages(step: Step, timed: TracedStep, memory: TracedStep, predicted: StagedStep | None) -> Seen:
    """The traced step of every stage; what one stage did is reported of the one predicted to be the busiest, or the fullest."""
    records = _from_every_stage(step, timed, memory)
    busy, full = (records[predicted.busiest], records[predicted.fullest]) if predicted is not None else (records[0], records[0])
    seconds = max(t.ended for t in records.values())
    causes = {**busy.causes, "bubble": max(0.0, seconds - sum(busy.causes.values()))}
    tasks = [item for t in records.values() for item in t.tasks]
    line = Timeline(tuple(t for t, _ in tasks), tuple(b for _, b in tasks), tuple(b + t.seconds for t, b in tasks))
    return Seen(seconds * 1e3, max(b for _, b in full.memory) / 1e9, {k: v * 1e3 for k, v in causes.items()}, line, full.memory)


@dataclass
class StageRecord:
    """What one stage tells of the traced step."""

    tasks: list[tuple[Task, float]] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)
    memory: list[tuple[float, float]] = field(default_factory=list)
    ended: float = 0.0
    host: str = ""
    zero: float = 0.0

    def later(self, by: float) -> StageRecord:
        """The same, given by a clock that began so much earlier."""
        tasks, memory = [(t, at + by) for t, at in self.tasks], [(at + by, b) for at, b in self.memory]
        return StageRecord(tasks, self.causes, memory, self.ended + by, self.host, self.zero)


def _from_every_stage(step: Step, timed: TracedStep, memory: TracedStep) -> dict[int, StageRecord]:
    """By rank of the pipeline, from the ranks that are first along every other axis. All ranks must ask."""
    coords = step.compiled.coords
    rank = coords.get("pp", 0)
    starts = last_starts(step, timed.update, timed.updating)
    own = None if any(c for a, c in coords.items() if a != "pp") else (rank, _stage_report(step, rank, timed, memory, starts))
    records: dict[int, StageRecord] = dict(part for part in from_all(own) if part is not None)
    first = min(t.zero for t in records.values())
    one_host = len({t.host for t in records.values()}) == 1
    return {r: t.later(t.zero - first) if one_host else t for r, t in sorted(records.items())}


def _stage_report(step: Step, rank: int, timed: TracedStep, memory: TracedStep, starts: Mapping[str, float]) -> StageRecord:
    row, several = f"stage {rank}", step.plan.chunks > 1
    made = StageRecord(ended=timed.ended, host=socket.gethostname(), zero=timed.zero)
    for p, counted in zip(timed.passes, memory.passes, strict=True):
        kind, took = p.action.kind, p.ended - p.began
        made.tasks.append((Task(pass_name(kind, p.action.micro, p.action.chunk, several), row, took, (), kind), p.began))
        made.causes[kind] = made.causes.get(kind, 0.0) + took
        made.memory += _spread(counted.bytes_in_use, p.began, p.ended)
    for task, began in _update_tasks(measured_line(step.program, timed.update, starts)[0], row):
        made.tasks.append((task, timed.updating + began))
        made.causes[task.cause] = made.causes.get(task.cause, 0.0) + task.seconds
    made.memory += _spread(memory.update.bytes_in_use, timed.updating, timed.ended)
    return made


def _update_tasks(line: Timeline, row: str) -> list[tuple[Task, float]]:
    """What the update computes, and apart from it what it waits for, neighbours of one cause as one."""
    found: list[tuple[Task, float]] = []
    for task, began in zip(line.tasks, line.start, strict=True):
        if task.stream != "compute":
            continue
        cause = "optimizer" if task.cause == "compute" else task.cause
        if found and found[-1][0].cause == cause == "optimizer":
            first, at = found[-1]
            found[-1] = replace(first, seconds=began + task.seconds - at), at
        else:
            found.append((Task("update" if cause == "optimizer" else task.name, row, task.seconds, (), cause), began))
    return found


def _spread(memory: list[int], began: float, ended: float) -> list[tuple[float, float]]:
    """Bytes at the statements of a pass, evenly over the time it took."""
    return [(began + (ended - began) * i / max(1, len(memory) - 1), float(b)) for i, b in enumerate(memory)]
