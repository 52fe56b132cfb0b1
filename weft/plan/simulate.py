"""A training step on a cluster: stages of a pipeline, each one device standing for all that do the same.

Step = pipeline of passes, then gradients over the copies, then the optimizer. Data-, tensor- and context-parallel ranks of
a stage are the same, so a step on any number of devices costs as much to simulate as its stages times its micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.cluster.kernels import WIDTH, kept_width
from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.cost.pipeline import neighbours, passes
from weft.cost.price import Costs
from weft.cost.timeline import Task, Timeline, run
from weft.cost.walk import Phase, minus
from weft.cost.work import Collective, MemoryBound
from weft.plan.memory import Memory, stage_memory
from weft.plan.partition import even_layers
from weft.plan.phase import LayerRun, Pass, gathers, phase, reductions, walk
from weft.plan.schedules import Order
from weft.plan.setting import Setting
from weft.plan.stage_partitioner import stage_devices
from weft.plan.workload import Workload

PASSES = 1 << 17  # of a step that are walked one by one


@dataclass(frozen=True)
class SimulatedStep:
    """What is predicted of one step."""

    seconds: float
    tokens: int
    model_flops: float  # of the step, over all devices
    peak_flops: float  # per second, over all devices
    causes: Mapping[str, float]  # seconds of the busiest stage by what they were for; they sum to `seconds`
    hidden: Mapping[str, float]  # communication of that stage that ran overlapped with compute
    memory: tuple[Memory, ...]  # per stage
    timeline: Timeline = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / self.seconds / self.peak_flops

    def busy(self, stage: int) -> float:
        """Seconds that a stage computes and waits for its own collectives."""
        return self.timeline.busy(f"stage {stage}")

    @property
    def peak_memory(self) -> Memory:
        return max(self.memory, key=lambda m: m.total)


def simulate(
    work: Workload, setting: Setting, cluster: Cluster, known: dict[object, Phase] | None = None
) -> SimulatedStep:
    """Predict one step. Layers are shared out evenly where the workload does not say its stages; passes are kept in `known`, which
    settings may share that do the same work on devices that lie in the same places."""
    _check(setting, cluster)
    return _Simulation(work, setting, cluster, {} if known is None else known).step()


def held(work: Workload, setting: Setting, cluster: Cluster) -> float:
    """Bytes of the fullest device alone, which takes no walk through the step."""
    return memory_of(work, setting, cluster).total


def memory_of(work: Workload, setting: Setting, cluster: Cluster) -> Memory:
    """What the fullest device holds."""
    _check(setting, cluster)
    return max(_Simulation(work, setting, cluster).memory, key=lambda m: m.total)


def _check(setting: Setting, cluster: Cluster) -> None:
    setting.check()
    if setting.devices != cluster.devices:
        raise PlanError(
            "the setting does not fill the cluster",
            needed=f"dp x tp x pp x cp = {cluster.devices} devices of {cluster.text}",
            found=f"{setting.replicas} x {setting.tp} x {setting.pp} x {setting.cp} = {setting.devices}",
            try_=_filled(setting, cluster.devices),
        )


def _filled(s: Setting, devices: int) -> str:
    """What would fill the cluster: other copies, or where they do not come out even, the next smaller degree that divides."""
    for axis in ("tp", "cp", "pp"):
        others = s.tp * s.pp * s.cp // s.size(axis)
        if devices % (s.tp * s.pp * s.cp) and devices % others == 0:
            size = max(n for n in range(1, s.size(axis) + 1) if devices // others % n == 0)
            return f"--{axis} {size} --dp {devices // others // size}"
    return f"--dp {max(1, devices // (s.tp * s.pp * s.cp))}"


def detail(work: Workload, setting: Setting, cluster: Cluster) -> dict[str, Timeline]:
    """The first layer's passes op by op: what the host issues, the device computes and the links carry."""
    made = _Simulation(work, setting, cluster)
    return {f"one layer, {kind}": walk(made.costs[0], [LayerRun(work.layer, 1)], made._way(kind), []).line for kind in ("forward", "backward")}


@dataclass(frozen=True)
class _StageTask:
    """A task of a stage and the phase it stands for."""

    stage: int
    task: Task
    phase: Phase


@dataclass
class _Simulation:
    work: Workload
    setting: Setting
    cluster: Cluster
    _phases: dict[object, Phase] = field(default_factory=dict)
    _links: list[Task] = field(default_factory=list)  # what is sent meanwhile

    def step(self) -> SimulatedStep:
        s = self.setting
        if s.virtual_stages * s.micro_batches > PASSES:
            raise PlanError(
                "the step has too many passes to be walked one by one", needed=f"stages x micro-batches of at most {PASSES:,}",
                found=f"{s.virtual_stages * s.micro_batches:,}", try_=f"--micro-batch {s.micro_batch * 2} or more, or a smaller --batch",
            )  # fmt: skip
        pieces = self._passes()
        ends = self._finish(pieces)
        line = run([*(p.task for p in pieces), *self._links, *(p.task for p in ends)])
        pieces += ends
        causes, hidden = self._busiest(pieces, line.seconds)
        tokens = self.work.tokens * s.replicas * s.micro_batches
        peak = sum(costs.device.peak(s.dtype) for costs in self.costs) * s.devices / s.pp
        return SimulatedStep(line.seconds, tokens, self.work.model_flops * tokens, peak, causes, hidden, self.memory, line)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        return tuple(stage_memory(self.setting, self.parts[i :: self.setting.pp], order) for i, order in enumerate(self.orders))

    # --- what each stage holds

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        return self.setting.pipeline.orders(self.setting.pp, self.setting.micro_batches, self.setting.chunks)

    @cached_property
    def parts(self) -> list[list[LayerRun]]:
        """Layers of each virtual stage, by its number."""
        places = self.setting.pipeline.places(self.setting.pp, self.setting.chunks)
        return [part for _, part in sorted(zip(places, self._in_order(), strict=True), key=lambda x: x[0])]

    def _in_order(self) -> list[list[LayerRun]]:
        """Layers of each virtual stage, first to last; the first also looks up words, the last also computes the loss."""
        virtual = self.setting.virtual_stages
        if self.work.stages:
            return [[LayerRun(block, n) for block, n in stage] for stage in self.work.stages]
        ends = virtual == self.work.depth + 2  # one layer each, but for embedding and head, which are stages of their own
        if virtual > self.work.depth and not ends:
            raise PlanError("more stages than layers", needed=f"pp x virtual at most {self.work.depth}", found=str(virtual))
        counts = even_layers(self.work.depth, virtual)
        starts = itertools.accumulate(counts, initial=0)
        stages = [[LayerRun(*run) for run in self.work.layers(start, n)] for start, n in zip(starts, counts, strict=False)]
        stages[0].insert(0, LayerRun(self.work.first, 1))
        stages[-1].append(LayerRun(self.work.last, 1))
        return stages

    @cached_property
    def costs(self) -> list[Costs]:
        """Of each stage, on the slowest kind of device among its ranks."""
        devices = stage_devices(self.cluster, self.setting)
        known = {d.name: Costs(self.cluster, d, self.setting.place) for d in devices}
        return [known[d.name] for d in devices]

    def stage_parts(self, stage: int) -> list[LayerRun]:
        return [part for chunk in self.parts[stage :: self.setting.pp] for part in chunk]

    @property
    def copies(self) -> int:
        return self.setting.size("data")

    # --- passes

    @cached_property
    def how(self) -> Pass:
        s = self.setting
        reduce = "all_reduce" if s.zero == 0 else "reduce_scatter"
        return Pass("forward", s.again, param_bytes=kept_width(s.dtype), grad_bytes=float(WIDTH[s.grad_dtype]), reduce=reduce)

    def _passes(self) -> list[_StageTask]:
        s, first = self.setting, self.setting.pp
        send = self.costs[0].send(self.work.boundary) if s.pp > 1 else 0.0

        def seconds(g: int, kind: str) -> float:
            return self._phase(g, self._way(kind)).seconds

        made = passes(self.orders, seconds, neighbours(s.pipeline.places(s.pp, s.chunks), s.pp, lambda k: send), s.overlap_sends, first)
        stage = [(i, self._phase(a.chunk * s.pp + i, self._way(a.kind))) for i, order in enumerate(self.orders) for a in order]
        pieces = [_StageTask(i, task, phase) for (i, phase), task in zip(stage, made, strict=False)]
        self._links = made[len(pieces) :]
        return [self._head(i) for i in range(s.pp)] + pieces

    def _way(self, kind: str) -> Pass:
        """How a pass is made in the middle of the step. Sharded parameters are gathered and gradients reduced in each."""
        s = self.setting
        split = s.pipeline.defers_weights
        direction = "input" if split and kind == "backward" else kind
        gather = self.copies > 1 and s.zero == 3 and not s.gather_once and kind != "weight"
        ends = kind == ("weight" if split else "backward")
        reduce = self.copies > 1 and ends and s.zero >= 2 and not s.gather_once
        summed = self._summed / (self.copies if reduce else 1) if ends and s.micro_batches > 1 else 0.0
        return replace(self.how, direction=direction, gather=gather, frozen=gather, reduce=self.how.reduce if reduce else "", summed_bytes=summed)

    @property
    def _summed(self) -> float:
        """Bytes touched to add one gradient to the sum of earlier micro-batches: it is read, and the sum is read and written."""
        return (kept_width(self.setting.dtype) + 2 * WIDTH[self.setting.grad_dtype]) * self.costs[0].device.get("gradients.summed", 1.0)

    def _phase(self, g: int, how: Pass) -> Phase:
        costs = self.costs[g % self.setting.pp]
        key = (tuple((p.block.name, p.block.again, p.count) for p in self.parts[g]), costs.device.name, how, self.setting.overlap_grads)
        if key not in self._phases:
            self._phases[key] = self._reducing(g, how) if how.reduce else phase(costs, self.parts[g], how)
        return self._phases[key]

    def _reducing(self, g: int, how: Pass) -> Phase:
        """A pass that reduces gradients: layer by layer overlapped with what follows, or all of them after it, whichever is sooner."""
        costs, parts = self.costs[g % self.setting.pp], self.parts[g]
        seconds = self._at_once(costs, parts)
        after = phase(costs, parts, replace(how, reduce="")) + Phase(seconds, {"dp": seconds})
        return min(phase(costs, parts, how), after, key=lambda p: p.seconds) if self.setting.overlap_grads else after

    def _at_once(self, costs: Costs, parts: Sequence[LayerRun]) -> float:
        """Reduction of the gradients of some layers in one collective for each axis."""
        sizes: dict[str, float] = {}
        for part in parts:
            for op in reductions(part.block, self.how):
                sizes[op.axis] = sizes.get(op.axis, 0.0) + op.bytes * part.count
        return sum(costs.seconds(Collective(self.how.reduce, size, axis)) for axis, size in sizes.items())

    def _beyond(self, stage: int, plain: Pass, fuller: Pass) -> Phase:
        """What the fuller pass over all chunks of a stage costs more than the plain one."""
        chunks = range(stage, len(self.parts), self.setting.pp)
        return sum((minus(self._phase(g, fuller), self._phase(g, plain)) for g in chunks), Phase(0.0))

    def _head(self, stage: int) -> _StageTask:
        """Gathering of updated parameters that the first forward does not hide; it needs nothing of other stages."""
        s, mode = self.setting, self._way("forward")
        once = s.zero in (1, 2) and s.overlap_params or s.zero == 3 and s.gather_once
        made = self._beyond(stage, mode, replace(mode, gather=True)) if once and self.copies > 1 else Phase(0.0)
        return _StageTask(stage, Task("gather parameters", f"stage {stage}", made.seconds, (), "dp"), made)

    def _tail(self, stage: int) -> Phase:
        """Reduction of gradients that the last backward does not hide."""
        s, mode = self.setting, self._way("weight" if self.setting.pipeline.defers_weights else "backward")
        if self.copies == 1 or not s.overlap_grads or mode.reduce:
            return Phase(0.0)
        return self._beyond(stage, mode, replace(mode, reduce=self.how.reduce))

    # --- the end of the step

    def _finish(self, pieces: list[_StageTask]) -> list[_StageTask]:
        """Gradients that were not hidden, then the optimizer once every stage is done, since it needs the norm."""
        s, base = self.setting, len(pieces) + len(self._links)
        last = {p.stage: i for i, p in enumerate(pieces)}
        everyone = tuple(range(base, base + s.pp))
        reduced = [self._piece(st, "reduce gradients", self._reduced(st), (last[st],), "dp") for st in range(s.pp)]
        updated = [self._piece(st, "optimizer", self._optimizer(st), everyone, "optimizer") for st in range(s.pp)]
        spread = [self._piece(st, "gather parameters", self._spread(st), (base + s.pp + st,), "dp") for st in range(s.pp)]
        return reduced + updated + spread

    def _piece(self, stage: int, name: str, made: Phase, after: tuple[int, ...], cause: str) -> _StageTask:
        return _StageTask(stage, Task(name, f"stage {stage}", made.seconds, after, cause), made)

    def _reduced(self, stage: int) -> Phase:
        seconds = self._gradients(stage)
        return self._tail(stage) + Phase(seconds, {"dp": seconds})

    def _gradients(self, stage: int) -> float:
        """Reduction left when the backward is done, and the word gradients that first and last stage share."""
        s, costs = self.setting, self.costs[stage]
        seconds = 0.0
        if self.copies > 1 and not s.overlap_grads and (s.zero < 2 or s.gather_once):  # else in each pass
            seconds = self._at_once(costs, self.stage_parts(stage))
        if s.pp > 1 and stage in (0, s.pp - 1) and self.work.shared:
            seconds += 2 * costs.send(self.work.shared * self.how.grad_bytes)
        return seconds

    def _optimizer(self, stage: int) -> Phase:
        """Adam on what this rank holds: state read and written, gradient read for the norm and for the update."""
        s, parts = self.setting, self.stage_parts(stage)
        dense, expert = (sum(p.block.learnt[i] * p.count for p in parts) for i in (0, 1))
        bytes_stored = dense / (self.copies if s.zero else 1) + expert / (s.size("edp") if s.zero else 1)
        touched = bytes_stored * (26 + 2 * WIDTH[s.grad_dtype])
        seconds = self.costs[stage].seconds(MemoryBound("optimizer", touched, launches=4))
        return Phase(seconds, {"optimizer": seconds})

    def _spread(self, stage: int) -> Phase:
        """Gathering of updated parameters that the next forward does not hide."""
        s = self.setting
        if s.zero not in (1, 2) or self.copies == 1 or s.overlap_params:
            return Phase(0.0)
        costs = self.costs[stage]
        seconds = sum(costs.seconds(op) * p.count for p in self.stage_parts(stage) for op in gathers(p.block, self.how))
        return Phase(seconds, {"dp": seconds})

    def _busiest(self, pieces: list[_StageTask], seconds: float) -> tuple[dict[str, float], dict[str, float]]:
        """Causes of the stage that works longest; what is missing from its step is the bubble."""
        busy = [sum(p.task.seconds for p in pieces if p.stage == st) for st in range(self.setting.pp)]
        stage = busy.index(max(busy))
        causes: dict[str, float] = {}
        hidden: dict[str, float] = {}
        for piece in pieces:
            if piece.stage == stage:
                sent = {"pp": piece.task.seconds - piece.phase.seconds}
                for total, parts in ((causes, piece.phase.causes), (hidden, piece.phase.hidden), (causes, sent)):
                    for key, value in parts.items():
                        total[key] = total.get(key, 0.0) + value
        causes["bubble"] = max(0.0, seconds - busy[stage])
        return causes, hidden
