"""Every way to run a captured program that the systems have, each priced by the same walk over the same nodes.

A way is a mesh for each stage, a layout for every input, a number of micro-batches and stages. Baselines hold their inputs as those systems do
and let run overlapped with compute what those systems let; ways of weft come from the layout ILP at several shares of hideable communication, and
the simulated step ranks them. Weft's ways, and experts' tables apart, update tables by rows; all others make a table's full gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bench._graph.roles import GRADS, PARAMS, SPREAD, VALUES
from bench._graph.stages import FULL, MIXED, NONE, Staged, Stager, pipelined
from bench._graph.task import CapturedTask
from bench._graph.timing import PlacedProgram
from bench._graph.units import Unit, Units
from weft.cluster.spec import Cluster
from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Mesh, Placement, S
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.memory import RESIDENT, room
from weft.frontend.capture import Captured
from weft.plan.layouts import Chosen, OnCluster, Rates, choose
from weft.plan.layouts.strategies import Strategies
from weft.plan.named import as_state, input_layouts
from weft.plan.place import place
from weft.plan.rewritten import Move, as_run
from weft.plan.roles import Roles
from weft.plan.schedules import PLAIN, SCHEDULES
from weft.plan.space import divisors
from weft.plan.spec import Spec
from weft.rewrite.updates import rules_of

Say = Callable[[str], None]
Held = dict[str, dict[str, Placement]]
NOTHING: frozenset[str] = frozenset()
ALL = frozenset((PARAMS, GRADS, SPREAD, VALUES))
HIDES = (1.0, 0.3, 0.05)  # shares of hideable communication that the ILP is charged
LARGE = 1500  # nodes from which fewer meshes are tried
EFFORT = 1e8  # work of one ILP
MOST_ROUNDS = 64
OWN_SCHEDULES = tuple(s.name for s in SCHEDULES.values() if s.searched and not s.takes_chunks)
HOST = 0.02  # share of a step spent waiting for the host from which layouts are also priced by what it issues
FINALISTS = 4  # spots that are laid out at several prices


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to run the step: what holds what, in how many micro-batches and stages, and what it takes."""

    name: str
    placed: PlacedProgram
    overlap: frozenset[str]
    rounds: int
    seconds: float
    memory: float
    staged: Staged | None = None
    rules: tuple[str, ...] = ()
    causes: Mapping[str, float] = field(default_factory=dict)
    moves: tuple[Move, ...] | None = None  # by which the step was rewritten; None where it is the model's own

    @property
    def pp(self) -> int:
        return len(self.staged.stages) if self.staged else 1

    @property
    def mesh(self) -> Mesh:
        return self.placed.program.mesh

    def describe(self) -> str:
        degrees = " ".join(f"{a}{n}" for a, n in self.mesh.sizes.items() if n > 1) or "one device"
        more = [f"pp{self.pp} {self.staged.schedule}"] if self.staged and self.pp > 1 else []
        again = sum(len(s.again) for s in self.staged.stages) if self.staged else 0
        more += [f"{again} units recomputed"] if again else []
        more += [f"{self.rounds} micro-batches"] if self.rounds > 1 else []
        return ", ".join([degrees, *more, *self.rules])


@dataclass(frozen=True, eq=False)
class Spot:
    """Where layouts are chosen: a program at so many micro-batches, on a mesh of one of so many stages."""

    captured: Captured
    part: Cluster
    mesh: Mesh
    rounds: int
    pp: int


@dataclass
class Reasons:
    """Why a system cannot run it: the least memory any of its ways needs."""

    least: float = math.inf

    def said(self, memory: float) -> str:
        if math.isfinite(self.least):
            return f"needs at least {self.least / 1e9:.1f} GB of {memory / 1e9:.1f} GB"
        return "no degrees divide the devices and the batch"


@dataclass
class GraphSearch:
    """Prices ways of one task; remembers programs, layouts and timings."""

    task: CapturedTask
    memory: float
    _chosen: dict[object, Chosen | None] = field(default_factory=dict)
    _placed: dict[object, PlacedProgram | None] = field(default_factory=dict)
    _units: dict[tuple[PlacedProgram, frozenset[str]], list[Unit]] = field(default_factory=dict)
    _own: dict[object, Captured] = field(default_factory=dict)
    _prices: dict[object, OnCluster] = field(default_factory=dict)
    _ways_on: dict[Mesh, Strategies] = field(default_factory=dict)
    by_mesh: dict[object, Candidate] = field(default_factory=dict)  # the best way of weft at each number of stages and mesh

    @property
    def cluster(self) -> Cluster:
        return self.task.cluster

    # --- baselines: inputs held by name, the rest placed op by op

    def baselines(self) -> dict[str, Candidate | str]:
        """The best way of every system, or why it has none."""
        n, node = self.cluster.devices, self.cluster.node_size
        inside = [t for t in divisors(node) if n % t == 0 and (not self.is_large or t in (1, node))]
        spaces: dict[str, Iterator[tuple[Spec, frozenset[str]]]] = {
            "data parallel": iter([(Spec(dp=n), frozenset({GRADS}))]),
            "zero1": iter([(Spec(dp=n, zero=1), frozenset({GRADS}))]),
            "zero3": iter([(Spec(dp=n, zero=3), frozenset({GRADS, PARAMS}))]),
            "megatron": ((Spec(dp=n // t, tp=t, zero=z), frozenset({GRADS, PARAMS})) for t in inside for z in (0, 1)),
            "fsdp+tp": ((Spec(dp=n // t, tp=t, zero=3), frozenset({GRADS, PARAMS, VALUES})) for t in inside),
        }
        made = {name: self._best_of(name, ways) for name, ways in spaces.items()}
        return made | ({"tables apart": self._tables_apart()} if self.tables else {})

    def _tables_apart(self) -> Candidate | str:
        """Tables sharded by columns over as many devices as their rows allow and updated by rows, all else data parallel: what experts do for
        recommenders."""
        n, captured = self.cluster.devices, self.task.captured()
        widest = max(t for t in divisors(n) if all(w % t == 0 for w in self.tables.values()))
        mesh = Mesh(dp=n // widest, tp=widest)
        pins: dict[str, list[Mapping[str, Placement]]]
        pins = {name: [{}] for name in captured.program.inputs_for(Role.PARAMETER)}
        pins |= {name: [{"tp": S(1)}] for name in self.tables}
        inputs = captured.program.input_names
        pins |= {s: [as_state(inputs[s], inputs[p], places) for places in pins[p]] for s, p in captured.states.items()}
        pins |= {name: [places] for name, places in self.task.cut_samples("dp", "tp").items()}
        try:
            made = self.choose(as_run(captured.program, 1), mesh, self.cluster, pins=pins, work=EFFORT)
        except PlanError as reason:
            return str(reason.message)
        placed = PlacedProgram(as_run(made.program, 1), self.cluster, made.again)
        way = self._whole("tables apart", placed, frozenset({GRADS, VALUES}), 1, (NONE,))
        return way or f"needs {placed.memory() / 1e9:.1f} GB of {self.memory / 1e9:.1f} GB"

    @cached_property
    def tables(self) -> dict[str, int]:
        """Parameters read by index alone, and how wide their rows are."""
        program = self.task.captured().program
        params = program.inputs_for(Role.PARAMETER)
        after, found = Roles(program).after, {}
        for name, node in params.items():
            users = [u for u in program.users[node] if u not in after]
            if users and all(u.op.name == "take" and u.args[0] is node for u in users):
                found[name] = node.shape[-1]
        return found

    def _best_of(self, name: str, ways: Iterator[tuple[Spec, frozenset[str]]]) -> Candidate | str:
        best, why = None, Reasons()
        for named, overlap in ways:
            fixed, needs = self._held_bytes(named), dict[int, float]()  # bytes at the numbers of micro-batches tried
            for rounds in self.rounds(named.dp):
                least = max([self._least(named, rounds), *(_smaller(n, fixed, r / rounds) for r, n in needs.items())])
                placed = self._held(named, rounds) if least <= self.memory else None
                made = self._whole(name, placed, overlap, rounds, (NONE, FULL)) if placed is not None else None
                if made is None:
                    if placed is not None:
                        needs[rounds] = self._leanest(placed, overlap, rounds)
                    why.least = min(why.least, needs.get(rounds, least))
                    continue
                best = made if best is None or made.seconds < best.seconds else best
                if made.staged is None:
                    break  # nothing is recomputed: more micro-batches would only do the same in smaller pieces
        return best if best is not None else why.said(self.memory)

    def _least(self, named: Spec, rounds: int) -> float:
        """Bytes that a plan cannot go below: its state; of a large program, whose placing takes long, also what lies between units, which
        it keeps unless its backward pass reads little of it."""
        between = self.boundary_bytes / rounds / self.cluster.devices if self.is_large else 0.0
        return self._held_bytes(named) + between

    def _held_bytes(self, named: Spec) -> float:
        weights = 4 * self.task.params
        held = weights / (named.dp if named.zero == 3 else 1) + (self.task.state_bytes - weights) / (named.dp if named.zero else 1)
        return held / named.tp + RESIDENT

    def _leanest(self, placed: PlacedProgram, overlap: frozenset[str], rounds: int) -> float:
        """Bytes where every unit is recomputed."""
        stages = Stager(self.units(placed, overlap), math.inf, rounds, FULL).split(1)
        return placed.memory(rounds) if stages is None else min(stages[0].memory, placed.memory(rounds))

    def units(self, placed: PlacedProgram, overlap: frozenset[str]) -> list[Unit]:
        if (placed, overlap) not in self._units:
            self._units[placed, overlap] = Units(placed, overlap).all
        return self._units[placed, overlap]

    def rounds(self, copies: int) -> list[int]:
        """Numbers of micro-batches that leave every replica an integer number of samples."""
        own = self.task.batch // max(1, copies)
        if not own or self.task.batch % copies:
            return []
        return [r for r in (1, 2, 4, 8, 16, 32, 64) if own % r == 0 and r <= MOST_ROUNDS]

    def _held(self, named: Spec, rounds: int) -> PlacedProgram | None:
        key = named, rounds
        if key not in self._placed:
            self._placed[key] = self._place(named, rounds)
        return self._placed[key]

    def _place(self, named: Spec, rounds: int) -> PlacedProgram | None:
        captured = self.task.captured(rounds)
        held, options = input_layouts(captured.program, named, captured.states)
        held |= self.task.cut_samples("dp")  # type: ignore[arg-type]
        try:
            program = place(captured.program, named.mesh, held, replace(options, gather=frozenset({"dp"} if named.zero == 3 else ())))
        except (PlanError, LayoutError, TypeMismatch):
            return None
        params = captured.program.inputs_for(Role.PARAMETER)
        again = frozenset(k for k in held if k in params and named.zero == 3)
        return PlacedProgram(program, self.cluster, again)

    def _whole(self, name: str, placed: PlacedProgram, overlap: frozenset[str], rounds: int, again: Sequence[str]) -> Candidate | None:
        """One stage: as it is where it fits, else with parts of the forward pass recomputed."""
        rules = rules_of(placed.program)
        if placed.memory(rounds) <= self.memory:
            timed = placed.step(overlap, rounds)
            return Candidate(name, placed, overlap, rounds, timed.seconds, placed.memory(rounds), None, rules, timed.causes)
        units = self.units(placed, overlap)
        for how in again:
            if how == NONE:
                continue
            stages = Stager(units, self.memory, rounds, how).split(1)
            if stages is not None:
                timed = placed.step(overlap, rounds)
                seconds = timed.seconds + rounds * stages[0].more
                return Candidate(name, placed, overlap, rounds, seconds, stages[0].memory, Staged(stages, PLAIN, seconds), rules, timed.causes)
        return None

    # --- layouts chosen by the ILP

    def meshes(self, devices: int) -> list[Mesh]:
        """Arrangements of the devices of a stage in one or two axes; fewer where there are several stages, one axis of large programs."""
        tps = [t for t in divisors(devices) if t < devices] if not self.is_large else [1]
        if devices < self.cluster.devices:
            tps = [t for t in tps if t in (1, min(self.cluster.node_size, devices // 2))]
        elif len(tps) > 8:
            tps = [t for t in tps if t & (t - 1) == 0 or t == self.cluster.node_size or t % 32 == 0]
        return [Mesh(dp=devices // t, **({"tp": t} if t > 1 else {})) for t in tps] or [Mesh(dp=1)]

    def chosen(self, captured: Captured, part: Cluster, mesh: Mesh, rates: Rates, limit: float, issued: bool = False) -> Chosen | None:
        key = id(captured), part.devices, mesh, rates, limit, issued
        if key not in self._chosen:
            try:
                self._chosen[key] = self.choose(captured.program, mesh, part, issued, blocks=captured.blocks, memory=limit, rates=rates, work=EFFORT)
            except PlanError:
                self._chosen[key] = None
        return self._chosen[key]

    def choose(self, program: Program, mesh: Mesh, part: Cluster, issued: bool = False, **settings: Any) -> Chosen:
        """The layouts of a program on a part of the cluster, by ways and prices that all programs on the mesh share."""
        key = part.text, mesh, issued
        prices = self._prices.setdefault(key, OnCluster(part, mesh, issued))
        return choose(program, mesh, prices, ways=self._ways_on.setdefault(mesh, Strategies(mesh)), **settings)

    def own(self, captured: Captured, rounds: int) -> Captured:
        """The step as weft runs it; made once, since layouts are remembered by step."""
        key = id(captured), rounds
        if key not in self._own:
            self._own[key] = replace(captured, program=as_run(captured.program, rounds))
        return self._own[key]

    def free(self, say: Say) -> dict[str, Candidate | str]:
        """Ways with layouts by the ILP: weft's own; the same with parameters laid out as used, without overlap and without stages
        (unity-like), or with stages of 1F1B (alpa-like)."""
        best: dict[str, Candidate] = {}
        for way in self._everything():
            key = way.pp, way.mesh
            if way.name == "weft" and (key not in self.by_mesh or way.seconds < self.by_mesh[key].seconds):
                self.by_mesh[key] = way
            if way.name not in best or way.seconds < best[way.name].seconds:
                best[way.name] = way
                say(f"{way.name}: {way.seconds * 1e3:,.1f} ms, {way.describe()}")
        lacking = {name: "no layouts fit" for name in ("weft", "unity-like", "alpa-like") if name not in best}
        return {**best, **lacking}

    def _everything(self) -> Iterator[Candidate]:
        """First every mesh at full price; the best again at lower prices of what may be hidden; then, with parameters laid out as used, every mesh
        that could beat the best so held, judged by what it takes without overlap when held freely."""
        own: list[tuple[float, Spot]] = []
        without: list[tuple[float, Spot]] = []
        few = self.is_large
        for spot in (s for pp in self.depths() for s in self.spots(pp)):
            made = list(self._ways(spot, 1.0))
            yield from made
            own += [(min(w.seconds for w in made), spot)] if made else []
            without += [(w.seconds, spot) for w in self._without(made)]
        for _, spot in sorted(own, key=lambda item: item[0])[: 1 if few else FINALISTS]:
            for hide in HIDES[1:2] if few else HIDES[1:]:
                yield from self._ways(spot, hide)
            yield from self._issued(spot)
            yield from self._in_more_rounds(spot)
        yield from self._as_used(sorted(without, key=lambda item: item[0]))

    def _issued(self, spot: Spot, restricted: bool = False) -> Iterator[Candidate]:
        """Layouts priced with what the host needs to issue each op, where a step waits for it."""
        if any(w.causes.get("host", 0.0) > HOST * w.seconds for w in self._ways(spot, 1.0, restricted)):
            yield from self._ways(spot, 1.0, restricted, issued=True)

    def _in_more_rounds(self, spot: Spot) -> Iterator[Candidate]:
        """The same in more micro-batches, for as long as something is recomputed."""
        made = list(self._ways(spot, 1.0))
        for rounds in (r for r in self.rounds(spot.mesh.sizes["dp"]) if r > spot.rounds and spot.pp == 1):
            if not made or all(w.staged is None for w in made):
                return
            made = list(self._ways(replace(spot, rounds=rounds, captured=self.task.captured(rounds)), 1.0))
            yield from made

    def _as_used(self, spots: Sequence[tuple[float, Spot]]) -> Iterator[Candidate]:
        for whole in (True, False):  # of unity-like one stage and one micro-batch alone
            best = math.inf
            for bound, spot in spots:
                alone = spot.pp == spot.rounds == 1
                if bound > best or (whole and not alone):
                    continue
                for way in itertools.chain(self._ways(spot, 1.0, restricted=True), self._issued(spot, restricted=True)):
                    if (way.name == "unity-like") == whole:
                        best = min(best, way.seconds)
                        yield way

    def _without(self, ways: Sequence[Candidate]) -> Iterator[Candidate]:
        """The first of these ways as it would be with nothing overlapped with compute."""
        for way in ways[:1]:
            yield from itertools.islice(self.run("", way.placed, NOTHING, way.rounds, way.pp, (NONE, FULL), (PLAIN,)), 1)

    def depths(self) -> list[int]:
        """Numbers of stages: powers of two up to the nodes; of a large program powers of four, and one stage a node."""
        count = self.cluster.devices // self.cluster.node_size
        found = [p for p in (1, 2, 4, 8, 16) if p <= max(1, count) and self.cluster.devices % p == 0]
        return found if not self.is_large else [p for p in found if p in (1, 4, 16, count)]

    def spots(self, pp: int) -> Iterator[Spot]:
        """Meshes of a stage, at the fewest micro-batches that are worth a look."""
        devices = self.cluster.devices // pp
        part = self.cluster if pp == 1 else self.cluster.slice(0, devices)
        for rounds in self.some_rounds(pp):
            captured = self.task.captured(rounds)
            yield from (Spot(captured, part, mesh, rounds, pp) for mesh in self.meshes(devices))

    def some_rounds(self, pp: int) -> list[int]:
        """The fewest micro-batches at which activations may fit, and twice as many; at least four for every stage."""
        left = self.memory - RESIDENT - self.task.state_bytes / self.cluster.devices
        least = 1 if pp == 1 else 4 * pp
        options = [r for r in self.rounds(1) if r >= least]
        fits = [r for r in options if self.boundary_bytes / r / self.cluster.devices * min(r, pp) < left]
        if self.is_large or pp > 1 or fits[:1] == [1]:
            return fits[:1]
        return [r for r in options if fits and r in (fits[0] // 2, *fits[:2])]  # one fewer may fit where the backward pass reads little

    @cached_property
    def is_large(self) -> bool:
        return len(self.task.captured().program.nodes) > LARGE

    @cached_property
    def boundary_bytes(self) -> float:
        """Of the full batch, what must be kept between units of the forward pass even if all else is recomputed."""
        units = Units(PlacedProgram(self.task.captured().program, self.cluster), NOTHING).all
        return sum(u.sent for u in units) + max(u.saved for u in units)

    def _ways(self, spot: Spot, hide: float, restricted: bool = False, issued: bool = False) -> Iterator[Candidate]:
        part, mesh, rounds, pp = spot.part, spot.mesh, spot.rounds, spot.pp
        captured = spot.captured if restricted else self.own(spot.captured, rounds)
        own = room(self.memory)
        rates = Rates(hide, rounds, restricted)
        made = self.chosen(captured, part, mesh, rates, own * pp, issued)
        if made is None and pp == 1:  # what does not fit may fit when parts are recomputed
            made = self.chosen(captured, part, mesh, rates, math.inf, issued)
        if made is None:
            return
        placed = PlacedProgram(made.program if restricted else as_run(made.program, rounds), part, made.again)
        if not restricted:
            yield from self.run("weft", placed, ALL, rounds, pp, (NONE, MIXED), OWN_SCHEDULES)
            return
        yield from self.run("alpa-like", placed, NOTHING, rounds, pp, (NONE, FULL), (PLAIN,))
        if pp == rounds == 1:
            yield from self.run("unity-like", placed, NOTHING, rounds, pp, (NONE,), (PLAIN,))

    def run(
        self, name: str, placed: PlacedProgram, overlap: frozenset[str], rounds: int, pp: int, again: Sequence[str], schedules: Sequence[str]
    ) -> Iterator[Candidate]:
        if pp == 1:
            way = self._whole(name, placed, overlap, rounds, again)
            yield from [way] if way is not None else []
            return
        for recompute in again if MIXED not in again else (MIXED,):  # a mix runs nothing again where nothing must be
            yield from self._staged(name, placed, overlap, rounds, pp, recompute, schedules, beside=bool(overlap))

    def _staged(
        self,
        name: str,
        placed: PlacedProgram,
        overlap: frozenset[str],
        rounds: int,
        pp: int,
        recompute: str,
        schedules: Sequence[str],
        beside: bool,
    ) -> Iterator[Candidate]:
        units = self.units(placed, overlap)
        if len(units) < pp:
            return
        for schedule in schedules:
            stages = Stager(units, self.memory, rounds, recompute, schedule).split(pp)
            if stages is not None:
                staged = Staged(stages, schedule, pipelined(stages, self.cluster, rounds, schedule, beside))
                yield Candidate(name, placed, overlap, rounds, staged.seconds, staged.memory, staged)


def _smaller(needed: float, fixed: float, share: float) -> float:
    """Bytes that are still needed of a micro-batch smaller by this share."""
    return fixed + max(0.0, needed - fixed) * share
