"""Stages partitioned: how many layers each holds, split in half where that balances, and what each recomputes.

Of a layer let f + b be its passes, e_o the seconds and s_o the bytes kept under way o of running parts again (none, activation, ffn, selective,
full) or leaving to the host what it keeps (offload; its input, full-offload). For n layers whose activations may take A bytes,

    min sum_o x_o e_o   with   sum_o x_o s_o <= A,  sum_o x_o = n

is solved on the lower Pareto front of the points (s_o, e_o): layers move from one way to the next, one by one, until they fit. With
c_i(n) the seconds of a stage that fits in this way (stage i of p keeps p - i micro-batches, so early stages run more again), halves of
layers go to stages by `partition`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weft.cluster.profile import Device
from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.cost.memory import needed
from weft.cost.price import Costs
from weft.cost.work import MemoryBound
from weft.plan.memory import Memory, saved, stage_memory, stays
from weft.plan.once import Once
from weft.plan.partition import even, even_layers, partition
from weft.plan.phase import LayerRun, Pass, phase
from weft.plan.schedules import Action, Order
from weft.plan.setting import Setting
from weft.plan.spec import OFFLOAD, OFFLOADED
from weft.plan.workload import Block, Workload

WAYS = ("none", "activation", "selective", "ffn", "per-op", "full")
HOST_MEMORY = 128e9  # bytes of the host's that a device may fill where its profile says nothing
REACH = 5  # half layers more or fewer than the average that a stage may hold
ONE = (Action("forward", 0, 0),)
LAYER = "layer"
Piece = tuple[str, str, int]  # name of a block, what it recomputes, how often it comes


@dataclass(frozen=True)
class Measure:
    """How freely stages are split: ways of recomputing that may be mixed, whether stages may differ, and whether the host may keep activations."""

    ways: tuple[str, ...] = WAYS
    free: bool = True
    host: bool = True  # whether the host may keep activations


def blocks_of(work: Workload, pieces: Sequence[Sequence[Piece]], starts: Sequence[int] = ()) -> Workload:
    """The workload with its stages made of these pieces, each with so many layers before it: by default those of the stages before."""
    named = named_blocks(work)
    odd = next((name for stage in pieces for name, _, _ in stage if name not in named), None)
    if odd is not None:
        raise PlanError(f"the model has no part named {odd!r}", needed=" or ".join(named), found=odd, try_="plan again")
    before = starts or list(itertools.accumulate((layers_of(stage) for stage in pieces), initial=0))
    return replace(work, stages=tuple(
        tuple((replace(named[name], again=again), n) for name, again, n in by_kind(work, stage, start) if n)
        for stage, start in zip(pieces, before, strict=False)
    ))  # fmt: skip


def staged(work: Workload, setting: Setting) -> Workload:
    """The workload in the stages that a setting names, with embedding and head at the ends; as it is where none are named."""
    if not setting.stages:
        return work
    made = [list(stage) for stage in blocks_of(work, setting.stages).stages]
    if setting.stages[0][0][0] != "first":
        made[0].insert(0, (work.first, 1))
    if setting.stages[-1][-1][0] != "last":
        made[-1].append((work.last, 1))
    return replace(work, stages=tuple(map(tuple, made)))


def layers_of(pieces: Sequence[Piece]) -> int:
    return sum(n for name, _, n in pieces if name == LAYER)


def by_kind(work: Workload, pieces: Sequence[Piece], start: int) -> Iterator[Piece]:
    """Pieces with layers of other kinds by names of their own; `start` layers come before them."""
    names = [*(f"{LAYER} of kind {i}" for i in range(len(work.others))), LAYER]
    kinds = {id(block): name for (block, _), name in zip(work.kinds, names, strict=True)}
    for name, mode, n in pieces:
        if name != LAYER or not work.others:
            yield name, mode, n
            continue
        yield from ((kinds[id(block)], mode, some) for block, some in work.layers(start, n))
        start += n


def spread(mix: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Ways of layers in order: those of which the host keeps all stand evenly among the others, so that its link has time for each, and none last."""
    hosted, others = mix[0][1] if mix[0][0] == OFFLOAD else 0, [(mode, n) for mode, n in mix if mode != OFFLOAD]
    total = sum(n for _, n in mix)
    rest = (mode for mode, n in others for _ in range(n))
    order = [OFFLOAD if (k + 1) * hosted // total > k * hosted // total else next(rest) for k in reversed(range(total))]
    yield from ((mode, len(list(group))) for mode, group in itertools.groupby(order))


@dataclass(frozen=True)
class Point:
    """One way of running a layer: seconds more, bytes kept."""

    more: float
    kept: float
    way: str


@dataclass(frozen=True, eq=False)
class Times(Once):
    """Seconds of the blocks of a workload on one kind of device, both passes, each worked out once."""

    work: Workload
    costs: Costs
    _known: dict[object, Any] = field(default_factory=dict)

    def of(self, name: str, mode: str) -> float:
        return self._once((name, mode), lambda: self._both(named_blocks(self.work)[name], mode))

    def _both(self, block: Block, mode: str) -> float:
        own = replace(block, again=_on_device(mode))
        return sum(self._pass(own, direction) for direction in ("forward", "backward")) + self.copied(replace(block, again=mode).hosted(mode))

    def _pass(self, block: Block, direction: str) -> float:
        more, less = (phase(self.costs, [LayerRun(block, n)], Pass(direction)).seconds for n in (3, 2))
        return more - less

    def free(self, layer: Block) -> float:
        """The share of such layers that the host can keep, its link at work no longer than they compute forward; a processor has no other memory."""
        took = layer.saved / self.costs.device.host_bandwidth if "host.bandwidth" in self.costs.device.constants else math.inf
        return self._once(layer.name, lambda: min(1.0, self._pass(layer, "forward") / took) if took else 1.0)

    def copied(self, size: float) -> float:
        """Seconds of copies in the device's own memory, before they leave and when they are back; the link has time for as much as it is given."""
        return 2 * self.costs.seconds(MemoryBound("copies", 2 * size)) if size else 0.0

    def with_host(self, layer: Block) -> list[Point]:
        """The front over everything but the host, for the layers that the host cannot keep for nothing; with its input kept there the leanest."""
        front, left, more = self.front(WAYS, layer), 1 - self.free(layer), self.free(layer) * self.copied(layer.saved)
        if left == 1:
            return front
        rest = [Point(more + left * p.more, left * p.kept, p.way) for p in front]
        return [front[0], *(p for p in rest if p.kept < front[0].kept), Point(more + left * front[-1].more + 1e-12, 0.0, OFFLOADED[-1])]

    def front(self, modes: Sequence[str], layer: Block) -> list[Point]:
        """The lower Pareto front of (bytes kept, seconds more), from the fastest to the leanest."""
        points = [Point(sum(self.costs.seconds(op) for op in layer.rerun(w)), _kept(layer, w), w) for w in modes]
        front: list[Point] = []
        for p in sorted(points, key=lambda p: (p.more, p.kept)):
            if front and p.kept >= front[-1].kept:
                continue
            while len(front) > 1 and _slope(front[-2], front[-1]) <= _slope(front[-1], p):
                front.pop()
            front.append(p)
        return front


def _on_device(mode: str) -> str:
    """What a way computes again."""
    return "none" if mode == OFFLOAD else mode.removesuffix(f"-{OFFLOAD}")


def mean_front(fronts: Sequence[Sequence[Point]], shares: Sequence[float]) -> list[Point]:
    """Of the average layer, of whose kinds these are the fronts and the shares: what frees most for its seconds is recomputed first."""
    if len(fronts) == 1:
        return list(fronts[0])
    steps = [(a, b, share) for front, share in zip(fronts, shares, strict=True) for a, b in itertools.pairwise(front)]
    more, kept = (sum(getattr(h[0], k) * share for h, share in zip(fronts, shares, strict=True)) for k in ("more", "kept"))
    at = Point(more, kept, "")
    made = [at]
    for a, b, share in sorted(steps, key=lambda step: -_slope(*step[:2])):
        at = Point(at.more + (b.more - a.more) * share, at.kept + (b.kept - a.kept) * share, b.way)
        made.append(at)
    return made


def least_more(front: Sequence[Point], kept: float) -> float:
    """Seconds more of a layer that may keep so many bytes, layers mixed in any parts; of less than the leanest, the leanest's."""
    if kept >= front[0].kept:
        return front[0].more
    for a, b in itertools.pairwise(front):
        if kept >= b.kept:
            return a.more + (b.more - a.more) * (a.kept - kept) / (a.kept - b.kept)
    return front[-1].more


def _kept(layer: Block, mode: str) -> float:
    return layer.kept if mode == "full" else layer.saved - layer.not_kept(mode)


def named_blocks(work: Workload) -> dict[str, Block]:
    others = {f"{LAYER} of kind {i}": block for i, (block, _) in enumerate(work.others)}
    return {"first": work.first, LAYER: work.layer, "last": work.last, **{b.name: b for b in work.halves}, **others}


@dataclass(frozen=True, eq=False)
class StagePartitioner(Once):
    """Partitions the stages of one setting."""

    work: Workload
    setting: Setting
    cluster: Cluster
    devices: Sequence[Device]  # the slowest of each stage
    memory: float
    measure: Measure
    times: Mapping[str, Times]  # by kind of device
    _known: dict[object, Any] = field(default_factory=dict)

    def cut(self) -> tuple[tuple[Piece, ...], ...] | None:
        """Pieces of every virtual stage; None where nothing fits."""
        s = self.setting
        if s.pp == 1:
            made = self._fitting(0, 0, 2 * self.work.depth)
            return None if made is None else (made[1],)
        if s.chunks > 1 or not self.measure.free:
            return self._even()
        return self._free()

    # --- what a layer costs

    @cached_property
    def ways(self) -> tuple[str, ...]:
        """Ways on the lower front, from the fastest to the leanest."""
        return tuple(point.way for point in self.layer_times.front(self.measure.ways, self.work.layer))

    def _left_to_host(self, layers: int) -> int:
        """Of so many layers those that the host keeps before any is recomputed. Weight gradients that are deferred would read them later still."""
        if not self.measure.host or self.setting.pipeline.defers_weights:
            return 0
        return int(self.layer_times.free(self.work.layer) * layers)

    @cached_property
    def layer_times(self) -> Times:
        return self.times[self.devices[0].name]

    # --- one stage

    @cached_property
    def _orders(self) -> tuple[Order, ...]:
        s = self.setting
        few = min(s.micro_batches, (2 if s.chunks == 1 else 3) * s.pp)
        return s.pipeline.orders(s.pp, few - few % s.pp if s.chunks > 1 else few, s.chunks)

    def _pieces(self, stage: int, start: int, count: int, mix: Sequence[tuple[str, int]]) -> tuple[Piece, ...]:
        """`count` half layers from half `start` on, full layers by the mix, ends as the mix begins."""
        lone = mix[0][0] if mix else "none"
        made: list[Piece] = [("first", "none", 1)] if stage == 0 else []
        if count and start % 2:
            made.append((self.work.halves[1].name, lone, 1))
        made += [(LAYER, mode, n) for mode, n in spread(mix)]
        if count and (start + count) % 2:
            made.append((self.work.halves[0].name, lone, 1))
        return (*made, *([("last", "none", 1)] if stage == self.setting.pp - 1 else []))

    def _mixes(self, layers: int) -> list[tuple[tuple[str, int], ...]]:
        """From all layers the fastest way to all the leanest, one layer at a time: the host keeps those that cost nothing, the others recompute more
        and more, and at last the host keeps inputs."""
        modes, hosted = self.ways, self._left_to_host(layers)
        if not layers:
            return [((modes[i], 0),) for i in range(len(modes))]
        rest = layers - hosted
        mixes: list[tuple[tuple[str, int], ...]] = [((OFFLOAD, n), (modes[0], layers - n)) for n in range(hosted + 1)]
        for a, b in itertools.pairwise(modes):
            mixes += [((OFFLOAD, hosted), (b, n), (a, rest - n)) for n in range(1, rest + 1)]
        if hosted:
            lean = OFFLOADED[-1]
            mixes += [((OFFLOAD, hosted), (lean, n), (modes[-1], rest - n)) for n in range(1, rest + 1)]
            mixes += [((OFFLOAD, hosted - n), (lean, rest + n)) for n in range(1, hosted + 1)]
        return [tuple((mode, n) for mode, n in mix if n) for mix in mixes]

    def _fitting(self, stage: int, start: int, count: int) -> tuple[float, tuple[Piece, ...]] | None:
        """Seconds and pieces of a stage with as little recomputed as fits."""
        return self._once((stage, start if self.work.others else start % 2, count), lambda: self._fitted(stage, start, count))

    def _fitted(self, stage: int, start: int, count: int) -> tuple[float, tuple[Piece, ...]] | None:
        mixes = self._mixes(max(0, (count - start % 2 - (start + count) % 2) // 2))

        def own(i: int) -> list[Piece]:
            return list(by_kind(self.work, self._pieces(stage, start, count, mixes[i]), start // 2))

        first = _first(range(len(mixes)), lambda i: self._bytes(stage, own(i)) <= self.memory, lambda i: self._hosts(stage, own(i)))
        return None if first is None else (self._seconds(stage, own(first)), self._pieces(stage, start, count, mixes[first]))

    def _bytes(self, stage: int, pieces: Sequence[Piece]) -> float:
        """What `stage_memory` says of a stage in one chunk: state and activations add up, of passing buffers the largest counts."""
        if not pieces:
            return 0.0
        alive, adds, passing, buffers = self._alive[stage], 0.0, 0.0, 0.0
        for name, mode, n in pieces:
            m = self._memory_of(name, mode)
            adds += n * (m.params + m.grads + m.optimizer + alive * m.activations)
            passing, buffers = max(passing, m.temporaries), max(buffers, m.buffers)
        adds += alive * stays(self.setting, [self._block(name, mode) for name, mode, _ in pieces])
        return needed(adds + passing + buffers)

    def _hosts(self, stage: int, pieces: Sequence[Piece]) -> bool:
        """Whether the host has room for what it keeps of a stage."""
        kept = sum(n * self._block(name, mode).hosted("none") for name, mode, n in pieces)
        return self._alive[stage] * kept <= self.devices[stage].get("host.memory", HOST_MEMORY)

    def _block(self, name: str, mode: str) -> Block:
        return self._once((name, mode), lambda: replace(named_blocks(self.work)[name], again=mode))

    def _memory_of(self, name: str, mode: str) -> Memory:
        """Of one block among others with one micro-batch in flight."""
        block, s = self._block(name, mode), self.setting
        return self._once(("memory", name, mode), lambda: replace(stage_memory(s, [[LayerRun(block, 1)]], ONE), activations=saved(s, block)))

    @cached_property
    def _alive(self) -> Sequence[int]:
        """Micro-batches whose activations a stage keeps at most."""
        return self.setting.pipeline.in_flight(self.setting.pp, self.setting.micro_batches, self.setting.chunks)

    def _seconds(self, stage: int, pieces: Sequence[Piece]) -> float:
        times = self.times[self.devices[stage].name]
        return sum(times.of(name, again) * n for name, again, n in pieces)

    # --- all stages

    def _free(self) -> tuple[tuple[Piece, ...], ...] | None:
        s, total = self.setting, 2 * self.work.depth
        step = 1 if self.work.halves and total / s.pp <= 24 else 2
        reach = total if self.work.others else max(REACH, total // s.pp // 4)

        def cost(i: int, a: int, b: int) -> float | None:
            made = self._fitting(i, a, b - a)
            return None if made is None else made[0]

        ends = partition(total, s.pp, cost, lambda i, a: (a + n for n in self._counts(a, i, reach, step)), even)
        return None if ends is None else self._named(ends)

    def _counts(self, held: int, stage: int, reach: int, step: int) -> Iterator[int]:
        left = 2 * self.work.depth - held
        mean = left // (self.setting.pp - stage)
        low = max(0 if stage == 0 else 1, mean - reach)
        yield from (n for n in range(low, min(left, mean + reach) + 1) if n % step == 0)

    def _named(self, ends: Sequence[int]) -> tuple[tuple[Piece, ...], ...]:
        made = []
        for i, (a, b) in enumerate(itertools.pairwise((0, *ends))):
            found = self._fitting(i, a, b - a)
            assert found is not None
            made.append(found[1])
        return tuple(made)

    def _even(self) -> tuple[tuple[Piece, ...], ...] | None:
        """Equal chunks, embedding and head counted as a layer where only that divides, or chunks as equal as can be; every stage runs as much
        again as the fullest must, or, where stages may differ, as it must itself."""
        s, virtual = self.setting, self.setting.virtual_stages
        if virtual > self.work.depth:
            return None
        counts = even_layers(self.work.depth, virtual)
        levels = []
        for stage in range(s.pp):
            own = [counts[g] for g in range(stage, virtual, s.pp)]
            level = self._level(stage, own, [sum(counts[:g]) for g in range(stage, virtual, s.pp)])
            if level is None:
                return None
            levels.append(level)
        if not self.measure.free:
            levels = [max(levels)] * s.pp
        return tuple(self._chunk(g, counts[g], levels[g % s.pp]) for g in range(virtual))

    def _chunk(self, g: int, layers: int, level: int) -> tuple[Piece, ...]:
        """Chunk g with `level` steps along its mixes."""
        mixes = self._mixes(layers)
        virtual = self.setting.virtual_stages
        mix = mixes[min(level, len(mixes) - 1)]
        ends = ([("first", "none", 1)] if g == 0 else [], [("last", "none", 1)] if g == virtual - 1 else [])
        return (*ends[0], *((LAYER, mode, n) for mode, n in spread(mix)), *ends[1])

    def _level(self, stage: int, own: Sequence[int], starts: Sequence[int]) -> int | None:
        most = max(len(self._mixes(n)) for n in own)

        def made(level: int) -> list[tuple[Piece, ...]]:
            return [self._chunk(stage + c * self.setting.pp, n, level) for c, n in enumerate(own)]

        def fits(level: int) -> bool:
            pieces = made(level)
            chunks = [[LayerRun(b, n) for b, n in stage_] for stage_ in blocks_of(self.work, pieces, starts).stages]
            return stage_memory(self.setting, list(chunks), self._orders[stage]).total <= self.memory

        return _first(range(most), fits, lambda level: self._hosts(stage, [p for chunk in made(level) for p in chunk]))


def _first(levels: range, fits: Callable[[int], bool], hosts: Callable[[int], bool]) -> int | None:
    """The first that fits, as all behind it do, and whose host has room."""
    first = 0 if fits(levels[0]) else bisect.bisect_left(levels, True, key=fits)
    return next((i for i in levels[first:] if hosts(i)), None)


def _slope(a: Point, b: Point) -> float:
    """Bytes freed per second more."""
    return (a.kept - b.kept) / max(1e-12, b.more - a.more)


def stage_devices(cluster: Cluster, s: Setting) -> list[Device]:
    """The slowest kind of device of each stage."""
    per = s.devices // s.pp
    if cluster.uniform:
        return [cluster.device] * s.pp
    found = []
    for first in range(0, s.devices, per):
        kinds = {d.name: d for d in (cluster.device_of(r) for r in range(first, first + per))}
        found.append(min(kinds.values(), key=lambda d: d.peak(s.dtype) * d.get("gemm.efficiency")))
    return found
