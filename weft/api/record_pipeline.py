"""What a training step in micro-batches writes about itself: every pass of every stage, predicted and measured.

Ranks of one host share a clock; between hosts, clocks are set to zero where all meet before a traced step. A pass is timed as one; its
memory is counted at each statement.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft.api.compiled import Compiled
from weft.api.pipeline_plans import predicted
from weft.api.record import (
    HELD,
    TIMED,
    Recorder,
    _taken,
    communication,
    last_starts,
    measured_line,
    model_flops,
    options_of,
    rewrite_rules_used,
    tensors,
)
from weft.api.runner import Values
from weft.cluster.spec import Cluster
from weft.cost.pipeline import pass_name
from weft.cost.staged import StagedStep
from weft.cost.timeline import Seen, Task, Timeline
from weft.ops.registry import nbytes
from weft.plan.schedules import SCHEDULES, Action
from weft.plan.spec import Spec
from weft.runtime.agree import from_all
from weft.runtime.trace import Trace, live_bytes, synchronize, traced

if TYPE_CHECKING:
    from weft.api.pipelined import PipelinedStep

SPLIT = (
    "Each stage is a stretch of the captured forward pass with its own gradient, and losses of micro-batches are averaged; "
    "step.check(batch) compares all of it with one device."
)


def split(micro_batches: int, stages: int) -> dict[str, Any]:
    """How a step is split, among the verbs of its page."""
    words = f"{micro_batches} micro-batches" + (f" through {stages} stages" if stages > 1 else "")
    return {"step": words, "same": False, "said": SPLIT}


class PipelineRecorder(Recorder):
    """Watches the calls of one step in micro-batches."""

    step: PipelinedStep

    def _traced(self, n: int, given: Mapping[str, Any], state: Values) -> Values:
        watch = Watch(self.step, memory=n == HELD)
        self._traces[n] = watch  # type: ignore[assignment]
        return watch.run(given, state)

    def _predict(self, cluster: Cluster) -> Seen:
        step = self.step
        self.staged = StagedStep(step.line.stages, step.line.update, step.runner.orders, step.runner.routes, cluster)
        return self.staged.seen

    def _seen(self) -> Seen:
        """The traced step of every stage; what one stage did is reported of the one predicted to be the busiest, or the fullest."""
        timed, memory = self._traces.pop(TIMED), self._traces.pop(HELD)
        records = _from_every_stage(self.step, timed, memory)  # type: ignore[arg-type]
        known = hasattr(self, "staged")
        busy, full = (records[self.staged.busiest], records[self.staged.fullest]) if known else (records[0], records[0])
        seconds = max(t.ended for t in records.values())
        causes = {**busy.causes, "bubble": max(0.0, seconds - sum(busy.causes.values()))}
        tasks = [item for t in records.values() for item in t.tasks]
        line = Timeline(tuple(t for t, _ in tasks), tuple(b for _, b in tasks), tuple(b + t.seconds for t, b in tasks))
        return Seen(seconds * 1e3, max(b for _, b in full.memory) / 1e9, {k: v * 1e3 for k, v in causes.items()}, line, full.memory)

    def _about(self) -> dict[str, Any]:
        step, one = self.step, self.step.captured.program
        many = step.plan.micro_batches
        unit, per_step = _taken(one)
        return {
            "program": hashlib.sha256(step.line.text.encode()).hexdigest()[:16], "unit": unit, "per_step": many * per_step,
            "flops": many * model_flops(one), "tensors": [*_batch(step), *tensors(step.program, step.captured.states)],
            "communication": _communication_of(step), "verbs": [*rewrite_rules_used(step.moves), split(many, step.plan.virtual_stages)],
        }  # fmt: skip

    def _others(self, cluster: Cluster) -> list[dict[str, Any]]:
        """The other schedules for the same degrees."""
        plan, predicted_before = self.step.plan, self.predicted

        def seen(other: Spec) -> Seen:
            checked = Spec.parse(str(other))
            return predicted(self.step.under_plan(checked), checked, cluster)

        others = (replace(plan, schedule=name, virtual=0, micro=plan.micro_batches) for name in SCHEDULES if plan.pp > 1 and name != plan.schedule)
        own = {str(plan): lambda: predicted_before} if predicted_before is not None else {}
        return options_of({**own, **{str(other): partial(seen, other) for other in others}})


# --- what is there


def _batch(step: PipelinedStep) -> list[dict[str, Any]]:
    """The tensors of a micro-batch, as the first stage that reads them holds them."""
    found: dict[str, dict[str, Any]] = {}
    for stage in step.line.stages:
        for t in tensors(stage.phases[0], {}):
            if t["role"] == "batch":
                found.setdefault(t["name"], t)
    return list(found.values())


def _communication_of(step: PipelinedStep) -> list[dict[str, Any]]:
    """Collectives of all stages and messages between them, in one step."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    many = step.plan.micro_batches
    for program, times in [*((p, many) for s in step.line.stages for p in s.phases), (step.line.update, 1)]:
        for c in communication(program):
            count[c["kind"], c["axis"]] += times * c["count"]
            size[c["kind"], c["axis"]] += times * c["bytes"]
    for (g, _), readers in step.runner.routes.items():
        for dst, names in readers.items():
            if step.line.stages[g].rank != step.line.stages[dst].rank:
                count["message", "pp"] += many
                size["message", "pp"] += many * sum(nbytes(step.line.stages[dst].types[n]) for n in names)
    return [{"kind": kind, "axis": axis, "count": n, "bytes": size[kind, axis]} for (kind, axis), n in count.most_common()]


# --- the traced step


@dataclass(frozen=True)
class Passed:
    """One pass: when it ran, and the bytes held at each of its statements."""

    stage: int
    action: Action
    began: float
    ended: float
    held: list[int]


class Watch:
    """Runs one step with every pass timed, or with memory counted at every statement."""

    def __init__(self, step: PipelinedStep, memory: bool) -> None:
        self.step, self.memory, self.device = step, memory, step.compiled.device
        self.passes: list[Passed] = []
        self.zero = self.ended = 0.0
        self.update: Trace | None = None

    def run(self, given: Mapping[str, Any], state: Values) -> Values:
        runner, compiled = self.step.runner, self.step.compiled
        plain, usual = compiled._step, runner.call
        if dist.is_initialized():
            dist.barrier()
        self.zero = time.perf_counter()
        compiled._step, self.update = traced(plain, compiled.code.text, self.device, memory=self.memory)
        runner.call = self._pass
        try:
            out = self.step.run(given, state)
            self.ended = self._now()
        finally:
            compiled._step, runner.call = plain, usual
        return out

    @property
    def updating(self) -> float:
        """When the update began."""
        assert self.update is not None
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
        workspace = live_bytes(self.step.runner.alive, self.device, without=given)
        try:
            out = step(given)
        finally:
            step._step = plain
        memory += [b + workspace for b in trace.held]
        return out


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


def _from_every_stage(step: PipelinedStep, timed: Watch, memory: Watch) -> dict[int, StageRecord]:
    """By rank of the pipeline, from the ranks that are first along every other axis. All ranks must ask."""
    coords = step.compiled.coords
    rank = coords.get("pp", 0)
    starts = last_starts(step, timed.update, timed.updating) if timed.update is not None else {}
    own = None if any(c for a, c in coords.items() if a != "pp") else (rank, _stage_report(step, rank, timed, memory, starts))
    records: dict[int, StageRecord] = dict(part for part in from_all(own) if part is not None)
    first = min(t.zero for t in records.values())
    together = len({t.host for t in records.values()}) == 1
    return {r: t.later(t.zero - first) if together else t for r, t in sorted(records.items())}


def _stage_report(step: PipelinedStep, rank: int, timed: Watch, memory: Watch, starts: Mapping[str, float]) -> StageRecord:
    row, several = f"stage {rank}", step.plan.chunks > 1
    made = StageRecord(ended=timed.ended, host=socket.gethostname(), zero=timed.zero)
    for p, counted in zip(timed.passes, memory.passes, strict=True):
        kind, took = p.action.kind, p.ended - p.began
        made.tasks.append((Task(pass_name(kind, p.action.micro, p.action.chunk, several), row, took, (), kind), p.began))
        made.causes[kind] = made.causes.get(kind, 0.0) + took
        made.memory += _spread(counted.held, p.began, p.ended)
    assert timed.update is not None and memory.update is not None
    for task, began in _update_tasks(measured_line(step.program, timed.update, starts)[0], row):
        made.tasks.append((task, timed.updating + began))
        made.causes[task.cause] = made.causes.get(task.cause, 0.0) + task.seconds
    made.memory += _spread(memory.update.held, timed.updating, timed.ended)
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
