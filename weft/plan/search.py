"""The best setting of a space: branch and bound over every candidate, so the answer is that of a full sweep, to a third of a percent.

For a candidate with M micro-batches on p stages let f, b be the plain passes of a stage over one micro-batch (no communication
between copies), R and G the time its gradients and parameters need on their link. On stage i, with j running over earlier ones,

    step >= sum_{j<i} f_j + M * max(f, G') + M * max(b, G' + R') + sum_{j<i} b_j + outside(R, G)

where G', R' are what is sent in every micro-batch (ZeRO-2/3) and `outside` what one pass cannot hide of what is sent once.
Candidates are simulated in the order of this bound until it comes near the best step found; memory is bounded the same way
first. If the work allowed is spent before, the best so far is the answer, with its gap.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weft.cluster.kernels import WIDTH
from weft.cluster.profile import Device
from weft.cluster.spec import Cluster
from weft.core.errors import WeftError
from weft.cost.memory import room
from weft.cost.pipeline import STEADY, repeated
from weft.cost.price import Costs
from weft.cost.timeline import Timeline
from weft.cost.walk import Phase
from weft.cost.work import Collective
from weft.plan.memory import saved, stage_memory
from weft.plan.once import Once
from weft.plan.partition import even_layers
from weft.plan.phase import LayerRun, Pass, gathers, reductions
from weft.plan.plain_times import OpTimes, PlainTimes
from weft.plan.plan import nine_digits
from weft.plan.schedules import Action
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, held, simulate
from weft.plan.space import LATER, Limits, PlanProblem, Space, candidates, shardings
from weft.plan.spec import MIXED, OFFLOAD, OFFLOADED, RECOMPUTE
from weft.plan.stage_partitioner import (
    Measure,
    Piece,
    StagePartitioner,
    Times,
    by_kind,
    layers_of,
    least_more,
    mean_front,
    stage_devices,
    staged,
)
from weft.plan.workload import Block, Workload, padded

CLOSE = 0.003  # a bound this near the best found is not followed further
WORK = 40_000  # tasks of all simulations of one space; what is then left unproved is reported as the gap
NEAREST = 16  # of the settings that do not fit, whose memory is reported
CANDIDATE, BOUNDED, MEASURED = range(3)  # what is known of a setting: that it divides, its bound, its stages
Stages = tuple[tuple[Piece, ...], ...]


@dataclass(frozen=True)
class Bounded:
    """A candidate and what it cannot go below."""

    setting: Setting
    seconds: float
    memory: float

    def key(self, objective: str) -> float:
        return self.memory if objective == "memory" else self.seconds


@dataclass(frozen=True)
class Found(Bounded):
    """A setting that fits, its step and the bytes of its fullest device. It says what stages are made of where they are uneven."""

    gap: float = 0.0  # how far below it the best setting could still lie, as a share


@dataclass(frozen=True)
class Nothing:
    """No setting fits. `least` is the smallest memory any candidate needs, with that candidate."""

    reason: str
    least: float = math.inf
    nearest: Setting | None = None


@dataclass
class Search(Once):
    """Prices settings of one problem; remembers passes that many settings share."""

    problem: PlanProblem
    limits: Limits = field(default_factory=Limits)
    simulated: int = 0
    wider: Search | None = None  # one of the same problem within wider limits
    views: list[Search] = field(default_factory=list)  # as if all devices were of one kind, for each kind (`plan.stages`)
    _ranked: dict[tuple[Space, str], list[Bounded]] = field(default_factory=dict)
    _works: dict[object, Workload] = field(default_factory=dict)
    _known: dict[object, Any] = field(default_factory=dict)  # of the model on this cluster

    @cached_property
    def memory(self) -> float:
        """Bytes a device may use."""
        return self.limits.room(self.problem.cluster)

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    def best(self, space: Space, objective: str = "time", progress: Callable[[str], None] | None = None) -> Found | Nothing:
        """The best setting of the space that fits. A candidate is opened into its shardings when its turn comes."""
        queue = self.ranked(space, objective)
        if not queue:
            return Nothing(self._why_empty(space))
        heap = [(c.key(objective), n, c, CANDIDATE) for n, c in enumerate(queue)]  # sorted, so already a heap
        found: Found | None = None
        count, work, key = len(heap), 0, heap[0][0]
        while heap:
            key, _, c, state = heapq.heappop(heap)
            if found is not None and (key > found.key(objective) * (1 - CLOSE) or work > WORK):
                break
            if state == CANDIDATE:
                made = self._opened(space, c.setting)
                state = BOUNDED
            elif state == BOUNDED and c.setting.recompute == MIXED and objective != "memory":
                made = self._measured(c, space.measure)
                state = MEASURED
            else:
                before = self.simulated
                found = self._better(c.setting, found, objective, space.measure)
                work += _tasks(c.setting) if self.simulated > before else 0
                if progress and self.simulated % 25 == 0:
                    progress(f"{self.simulated} simulated of {len(queue)} candidates")
                continue
            for b in made:
                heapq.heappush(heap, (max(key, b.key(objective)), count, b, state))
                count += 1
        return replace(found, gap=max(0.0, 1 - key / found.key(objective))) if found else self._too_large(space, queue)

    def _opened(self, space: Space, setting: Setting) -> list[Bounded]:
        """A candidate with every way its copies may share state that can fit."""
        if self._memory(_leanest(space, setting)) > self.memory:
            return []
        made = (Bounded(s, *self.bound(s)) for s in shardings(space, self.limits, setting))
        return [b for b in made if b.memory <= self.memory]

    def _measured(self, c: Bounded, measure: Measure) -> list[Bounded]:
        """A candidate with its stages partitioned: now each stage is known, and how long it waits for those before it."""
        stages = self._stages(c.setting, measure)
        if stages is None:
            return []
        devices, s, work = self.devices(c.setting), c.setting, self.work(c.setting)
        starts = itertools.accumulate(map(layers_of, stages), initial=0)
        own = [
            sum(self.times(s, devices[g % s.pp]).of(name, mode) * n for name, mode, n in by_kind(work, stage, start))
            for g, (stage, start) in enumerate(zip(stages, starts, strict=False))
        ]
        late = self._late(s, self.plain(s).layer)
        before = itertools.accumulate((max(0.0, t - late * layers_of(stage)) for t, stage in zip(own, stages, strict=True)), initial=0.0)
        longest = max(s.micro_batches * sum(own[i :: s.pp]) + waits for i, waits in zip(range(s.pp), before, strict=False))
        return [replace(c, seconds=max(c.seconds, longest))]

    def _better(self, setting: Setting, found: Found | None, objective: str, measure: Measure) -> Found | None:
        if setting.recompute != MIXED and setting.pp > 1 and held(self.work(setting), setting, self.cluster) > self.memory:
            return found
        made = self.price(setting) if setting.recompute != MIXED else self.tailored(setting, measure)
        if made is None or made.memory > self.memory:
            return found
        return made if found is None or _order(made, objective) < _order(found, objective) else found

    def narrowed(self, limits: Limits) -> Search:
        """The same problem within narrower limits."""
        return replace(self, limits=limits, wider=self)

    def of(self, problem: PlanProblem) -> Search:
        """Another batch, cluster or length of the same model, with what is known of it already."""
        if problem.shape is self.problem.shape and problem.cluster is self.cluster:
            return replace(self, problem=problem, wider=None, _ranked={})
        return Search(problem, self.limits, _works=self._works if problem.shape is self.problem.shape else {})

    def ranked(self, space: Space, objective: str = "time") -> list[Bounded]:
        """Candidates by their bound, before the ZeRO stage is chosen; equal ones by the plainer setting."""
        if self.wider is not None:
            return [c for c in self.wider.ranked(space, objective) if self.limits.allows(c.setting, LATER)]
        if (space, objective) not in self._ranked:
            self._ranked[space, objective] = self._bounded(space, objective)
        return self._ranked[space, objective]

    def _bounded(self, space: Space, objective: str) -> list[Bounded]:
        lone = max(space.zero) == 0  # then what copies exchange is known already
        found = []
        for s in candidates(self.problem, space, self.limits):
            memory = self._memory(_leanest(space, s)) if objective == "memory" else 0.0
            found.append(Bounded(s, self._seconds(s, self.plain(s), travels=lone), memory))
        return sorted(found, key=lambda c: (c.key(objective), c.seconds, plainness(c.setting)))

    def _why_empty(self, space: Space) -> str:
        p = self.problem
        fixed = [f"{k}={v}" for k, v in self.limits.pins.items()]
        pins = ", ".join([*fixed, *([f"tp<={self.limits.max_tp}"] if self.limits.max_tp else [])])
        free = Search(p).ranked(space) if pins else []
        if p.shape.layouts:
            return f"no degree of tp above 1, which {', '.join(p.shape.layouts)} needs"
        if free:
            return f"no setting meets {pins}; without it {describe(free[0].setting)} would do"
        return f"no degrees divide {p.cluster.devices} devices, a batch of {p.batch} and what the model can be split into"

    def _too_large(self, space: Space, queue: Sequence[Bounded]) -> Nothing:
        """By the memory of those that are bounded least, among those that what is pinned lets share state in some way."""
        leanest = [max(shardings(space, self.limits, c.setting), key=lambda s: s.zero, default=None) for c in queue]
        lean = [replace(s, recompute="full") if s.recompute == MIXED else s for s in leanest if s is not None]
        if not lean:
            return Nothing(self._why_empty(space))
        few = heapq.nsmallest(NEAREST, dict.fromkeys(lean), key=lambda s: (self._memory(s), plainness(s)))
        needed, least = min(((held(self.work(s), s, self.cluster), s) for s in few), key=lambda found: (found[0], plainness(found[1])))
        if needed <= self.memory and (made := self.price(least)) is not None:  # passes that meet take more than they do one by one
            needed = max(needed, made.memory)
        reason = f"needs at least {needed / 1e9:.1f} GB of {self.memory / 1e9:.1f} GB, with {describe(least)}"
        return Nothing(reason, needed, least)

    # --- simulation

    def tailored(self, setting: Setting, measure: Measure) -> Found | None:
        """A setting with its stages partitioned, the host keeping activations or not, whichever is faster."""
        found = self._tailored(setting, measure)
        if found is not None and all(mode not in OFFLOADED for stage in found.setting.stages for _, mode, _ in stage):
            return found
        other = self._tailored(setting, replace(measure, host=False)) if measure.host else None
        return min((f for f in (found, other) if f is not None), key=lambda f: f.seconds, default=None)

    def _tailored(self, setting: Setting, measure: Measure) -> Found | None:
        """The plain setting where all layers come out the same."""
        stages = self._stages(setting, measure)
        if stages is None:
            return None
        modes = {again for stage in stages for name, again, _ in stage if name not in ("first", "last")}
        counts = tuple(sum(n for name, _, n in stage if name == "layer") for stage in stages)
        full = all(name in ("first", "layer", "last") for stage in stages for name, *_ in stage)
        mode = min(modes).replace("none", "") if len(modes) == 1 and full else MIXED
        if mode in RECOMPUTE:
            even = setting.pp == 1 or counts == even_layers(self.problem.depth, setting.virtual_stages)
            same = replace(setting, recompute=mode)
            return self.price(same if even else same.with_layers(counts))
        return self.price(replace(setting, stages=stages))

    def _stages(self, setting: Setting, measure: Measure) -> Stages | None:
        devices = self.devices(setting)
        times = {d.name: self.times(setting, d) for d in devices}
        made = StagePartitioner(self.work(setting), setting, self.cluster, devices, self.memory, measure, times)
        return self._once((setting, measure), made.cut)

    def times(self, s: Setting, device: Device) -> Times:
        return self._once(("times", _work_key(s), device.name), lambda: Times(self.work(s), Costs(self.cluster, device, s.place)))

    def price(self, setting: Setting) -> Found | None:
        """Step and memory of a setting; of a long row of micro-batches only the beginning is simulated, the rest repeats."""
        seconds, memory = self._once(setting, lambda: self._predict(setting))
        return Found(setting, seconds, memory) if seconds < math.inf else None

    def _predict(self, s: Setting) -> tuple[float, float]:
        self.simulated += 1
        step = None

        def at(micro: int) -> Timeline:
            nonlocal step
            step = self.step(s.in_micro_batches(micro))
            return step.timeline

        try:
            return repeated(at, s.pp, s.micro_batches), step.peak_memory.total if step else math.inf
        except WeftError:
            return math.inf, math.inf

    def step(self, setting: Setting) -> SimulatedStep:
        """The full simulation."""
        known = self._once(("phases", _work_key(setting), setting.replicas), dict[object, Phase])
        return simulate(staged(self.work(setting), setting), setting, self.cluster, known)

    def work(self, s: Setting) -> Workload:
        key = _work_key(s)
        if key not in self._works:
            self._works[key] = self.problem.shape.work(s)
        return self._works[key]

    # --- bounds

    def bound(self, s: Setting) -> tuple[float, float]:
        """Seconds and bytes that the simulation of a setting cannot go below."""
        plain = self.plain(s)
        return self._seconds(s, plain), self._memory(s)

    def plain(self, s: Setting) -> PlainTimes:
        return self._once(("plain", _work_key(s), self._fastest(s).name), lambda: PlainTimes.of(self.work(s), self._costs(s)))

    def _costs(self, s: Setting) -> Costs:
        return Costs(self.cluster, self._fastest(s), s.place)

    def devices(self, s: Setting) -> list[Device]:
        """The slowest kind of device of each stage, which the full stage waits for."""
        return self._once(("devices", s.pp), lambda: stage_devices(self.cluster, s))

    def _fastest(self, s: Setting) -> Device:
        return max(self.devices(s), key=lambda d: d.peak(s.dtype))

    def _slower(self, s: Setting) -> float:
        """How many times longer the layers take, split over stages by their speed, than if all stages had the fastest device."""
        if self.cluster.uniform:
            return 1.0
        kinds = {d.name: self.times(s, d).of("layer", "none") for d in self.devices(s)}
        return s.pp / sum(min(kinds.values()) / kinds[d.name] for d in self.devices(s)) if len(kinds) > 1 else 1.0

    def _seconds(self, s: Setting, plain: PlainTimes, travels: bool = True) -> float:
        depth = self.problem.depth
        if s.pp == 1:
            again = self._must_rerun(s)[0] if s.recompute == MIXED else 0.0
            return self._stage(s, plain, depth, (plain.first, plain.last), travels) + s.micro_batches * again
        if s.recompute == MIXED and s.chunks == 1:
            return self._balanced(s, plain, travels)
        counts = even_layers(depth, s.virtual_stages)
        own = [sum(counts[i :: s.pp]) for i in range(s.pp)]
        fullest = max(range(s.pp), key=lambda i: (own[i], i))
        ends = {0: (plain.first,), s.pp - 1: (plain.last,)}
        layer = plain.layer.forward + plain.layer.backward[s.again] - self._late(s, plain.layer)
        send, passes = self._send(s), s.chunks * s.micro_batches
        blocked = 0.0 if s.overlap_sends else send * passes
        again = s.micro_batches * min(self._must_rerun(s)) if s.recompute == MIXED else 0.0
        computed = max(self._stage(s, plain, own[i], ends.get(i, ()), travels) + sum(counts[:i]) * layer + i * 2 * send for i in {0, fullest, s.pp - 1})
        return max(computed + blocked + again, send * passes)

    def _balanced(self, s: Setting, plain: PlainTimes, with_communication: bool) -> float:
        """Stages as long as suits the pipeline, T together. Let r be the part of a pass that others wait for: M t_i + r sum_{j<i} t_j <= C for all i
        is least where all are equal, which gives t_i = t_0 (1 - r/M)^i and C = T r / (1 - (1 - r/M)^p)."""
        m, ends, again = s.micro_batches, (plain.first, plain.last), sum(self._must_rerun(s))
        total = self._stage(s, plain, self.problem.depth, ends, with_communication) / m * self._slower(s) + again
        late = self.problem.depth * self._late(s, plain.layer)
        once = self._stage(s.in_micro_batches(1), plain, self.problem.depth, ends, False)
        r = min(1.0, max(1e-9, once - late + again) / total)
        trip = 2 * self._send(s) * (s.pp - 1) / s.pp  # a micro-batch there and back, shared by as many as are in flight
        waits = 0.0 if s.pipeline.hides_sends else max(0.0, trip - late / s.pp)
        return total * r / (1 - (1 - r / m) ** s.pp) + m * waits

    def _must_rerun(self, s: Setting) -> list[float]:
        """Seconds of a micro-batch that each stage spends on recomputing what its memory cannot keep, were layers shared out evenly."""
        device, work, layers = self._fastest(s), self.work(s), self.problem.depth / s.pp
        shares = [n / self.problem.depth for _, n in work.kinds]
        front = self._once(("front", _work_key(s), device.name), lambda: mean_front([self.times(s, device).with_host(x) for x, _ in work.kinds], shares))
        memories = [stage_memory(s, [[LayerRun(layer, 1)]], ()) for layer, _ in work.kinds]
        state = sum((m.params + m.grads + m.optimizer) * share for m, share in zip(memories, shares, strict=True)) * layers
        left = room(self.memory) - state - min(m.temporaries + m.buffers for m in memories)
        alive = s.pipeline.in_flight(s.pp, s.micro_batches, s.chunks)
        return [layers * least_more(front, left * s.chunks / (n * layers)) for n in alive]

    def _send(self, s: Setting) -> float:
        return self._once(("send", s.micro_batch, s.tp, s.cp, s.replicas), lambda: self._costs(s).send(self.work(s).boundary))

    def _late(self, s: Setting, t: OpTimes) -> float:
        return t.weight if s.pipeline.defers_weights else 0.0

    def _stage(self, s: Setting, plain: PlainTimes, layers: int, ends: tuple[OpTimes, ...], with_communication: bool) -> float:
        """Of one stage: its passes, and what they cannot hide."""
        m = s.micro_batches
        forward = layers * plain.layer.forward + sum(t.forward for t in ends)
        backward = layers * plain.layer.backward[s.again] + sum(t.backward[s.again] for t in ends)
        reduce, gather = self._link_seconds(s) if with_communication and s.size("data") > 1 else (0.0, 0.0)
        r, g = reduce * layers, gather * layers
        if s.zero == 3 and not s.gather_once:
            return m * (max(forward, g) + max(backward, g + r if s.overlap_grads else g))
        if s.zero == 2 and s.overlap_grads:
            return m * (forward + max(backward, r)) + (max(0.0, g - forward) if s.overlap_params else g)
        ends_with = max(0.0, r - backward) if s.overlap_grads else 0.0
        begins_with = max(0.0, g - forward) if s.zero and s.overlap_params else 0.0
        return m * (forward + backward) + ends_with + begins_with

    def _link_seconds(self, s: Setting) -> tuple[float, float]:
        """Seconds that gradients and parameters of one layer spend on their link."""
        costs = self._costs(s)
        how = Pass("backward", frozen=s.zero == 3, grad_bytes=float(WIDTH[s.grad_dtype]), reduce="reduce_scatter" if s.zero else "all_reduce")

        def mean(sent: Callable[[Block, Pass], Iterator[Collective]]) -> float:
            each = [(max((costs.seconds(op) for op in sent(layer, how)), default=0.0), n) for layer, n in self.work(s).kinds]
            return sum(seconds * n for seconds, n in each) / self.problem.depth

        reduce, gather = self._once(("links", s.tp, s.cp, s.replicas, s.ep, s.zero == 0, s.zero == 3), lambda: (mean(reductions), mean(gathers)))
        return reduce, gather if s.zero else 0.0

    def _memory(self, s: Setting) -> float:
        """The first two stages with as many forwards in flight as their order reaches, of the chunk that keeps least, and the last with one of each."""
        if s.recompute == MIXED:
            return min(self._memory(s.recomputing(how)) for how in ("selective", "full", *OFFLOADED))
        work, counts = self.work(s), even_layers(self.problem.depth, s.virtual_stages)
        alive = s.pipeline.in_flight(s.pp, s.micro_batches, s.chunks)
        found = 0.0
        for i in {0, 1, s.pp - 1} if s.pp > 1 and (work.others or counts[1] > counts[0]) else {0, s.pp - 1}:
            chunks = _chunks(work, counts, i, s.pp)
            least = min(range(s.chunks), key=lambda c: sum(saved(s, run.block) * run.count for run in chunks[c]))
            order = [Action("forward", c, 0) for c in range(s.chunks)] if i == s.pp - 1 else [Action("forward", least, 0)] * alive[i]
            found = max(found, stage_memory(s, chunks, tuple(order)).total)
        return found


def _chunks(work: Workload, counts: Sequence[int], stage: int, stages: int) -> list[list[LayerRun]]:
    """Layers of each chunk of a stage, with embedding and head where it has them."""
    starts = list(itertools.accumulate(counts, initial=0))
    chunks = [[LayerRun(*run) for run in work.layers(starts[g], counts[g])] for g in range(stage, len(counts), stages)]
    chunks[0][:0] = [LayerRun(work.first, 1)] * (stage == 0)
    chunks[-1] += [LayerRun(work.last, 1)] * (stage == stages - 1)
    return chunks


class Padded(Search):
    """The same with an odd size of the model's tables padded."""

    def work(self, s: Setting) -> Workload:
        key = _work_key(s)
        if key not in self._works:
            self._works[key] = padded(super().work(s), self.problem.shape.odd, s.tp)
        return self._works[key]


def _work_key(s: Setting) -> tuple[object, ...]:
    """What a workload depends on."""
    return (s.micro_batch, s.tp, s.cp, s.ep, s.pp == 1, s.sp, s.async_tp, s.ragged_ep)


def _leanest(space: Space, s: Setting) -> Setting:
    """The sharding of a candidate that keeps least."""
    return replace(s, zero=max(space.zero) if s.size("data") > 1 else min(space.zero))


def _tasks(s: Setting) -> int:
    return 50 + 3 * s.virtual_stages * min(s.micro_batches, 2 * STEADY * s.pp)


def rank(found: Found, objective: str) -> tuple[float, float]:
    """By the objective, then by the other; steps equal to nine digits are equal."""
    seconds, memory = nine_digits(found.seconds), nine_digits(found.memory)
    return (memory, seconds) if objective == "memory" else (seconds, memory)


def _order(found: Found, objective: str) -> tuple[object, ...]:
    """Of equal ones the plainer."""
    return (*rank(found, objective), plainness(found.setting))


def plainness(s: Setting) -> tuple[object, ...]:
    """Fewer kinds of sharding first, then smaller degrees, so that of equal settings the plainer is taken."""
    used = sum(getattr(s, a) > 1 for a in ("tp", "pp", "cp", "ep"))
    kept = (*RECOMPUTE, *OFFLOADED, MIXED).index(s.again)
    shape = (used, s.pp, s.tp, s.cp, s.ep, s.zero, s.chunks)
    return (*shape, s.schedule, kept, -s.micro_batch, s.sp, s.async_tp, s.ragged_ep, s.gather_once)


def describe(s: Setting) -> str:
    """A setting in a line."""
    degrees = " ".join(f"{a}{getattr(s, a)}" for a in ("dp", "tp", "pp", "cp", "ep") if getattr(s, a) > 1) or "one device"
    extra = [f"zero{s.zero}" + (" kept" if s.gather_once else "")] if s.zero and s.size("data") > 1 else []
    extra += ["sequence parallel"] if s.sp else []
    extra += ["async tp"] if s.async_tp else []
    extra += ["ragged ep"] if s.ragged_ep else []
    extra += [s.schedule + (f" x{s.chunks}" if s.chunks > 1 else "")] if s.pp > 1 else []
    extra += [s.again if s.again == OFFLOAD else f"recompute {s.again}"] if s.again else []
    return ", ".join([degrees, *extra, f"micro-batch {s.micro_batch}"])
