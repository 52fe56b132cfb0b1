"""Every way to run a captured program that the systems have, each priced by the same walk over the same nodes.

A way is a mesh for each stage, a layout for every input, a number of micro-batches and stages. Baselines hold their inputs as those systems do
and let run beside compute what those systems let; ways of weft come from the layout ILP at several shares of hideable communication, and
the simulated step ranks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.cluster.spec import Cluster
from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Mesh, Placement, S
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.plan.graph.stages import FULL, MIXED, NONE, Staged, Stager, pipelined
from weft.plan.graph.task import Task
from weft.plan.graph.timing import Placed, Timed
from weft.plan.graph.units import Units
from weft.plan.layouts import Chosen, OnCluster, Rates, choose
from weft.plan.memory import FRAGMENTATION, RESIDENT
from weft.plan.named import Named, input_layouts
from weft.plan.place import place
from weft.plan.roles import CARRIED, GRADS, PARAMS, VALUES
from weft.plan.space import divisors

Say = Callable[[str], None]
Held = dict[str, dict[str, Placement]]
NOTHING: frozenset[str] = frozenset()
ALL = frozenset(CARRIED)
HIDES = (1.0, 0.3, 0.05)  # shares of hideable communication that the ILP is charged
LARGE = 1500  # nodes from which two axes are searched one after the other, and fewer meshes
EFFORT = 1e8  # work of one ILP
MOST_ROUNDS = 64


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run the step: what holds what, in how many micro-batches and stages, and what it takes."""

    name: str
    placed: Placed
    overlap: frozenset[str]
    rounds: int
    seconds: float
    memory: float
    staged: Staged | None = None
    rules: tuple[str, ...] = ()
    causes: Mapping[str, float] = field(default_factory=dict)

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
        more += [f"{again} units run again"] if again else []
        more += [f"{self.rounds} micro-batches"] if self.rounds > 1 else []
        return ", ".join([degrees, *more, *self.rules])


@dataclass
class Reasons:
    """Why a system cannot run it: the least memory any of its ways needs."""

    least: float = math.inf
    other: str = ""

    def said(self, memory: float) -> str:
        if math.isfinite(self.least):
            return f"needs at least {self.least / 1e9:.1f} GB of {memory / 1e9:.1f} GB"
        return self.other or "no degrees divide the devices and the batch"


@dataclass
class GraphSearch:
    """Prices ways of one task; remembers programs, layouts and timings."""

    task: Task
    memory: float
    _chosen: dict[object, Chosen | None] = field(default_factory=dict)
    _placed: dict[object, Placed | None] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        return self.task.cluster

    # --- baselines: inputs held by name, the rest placed op by op

    def baselines(self) -> dict[str, Way | str]:
        """The best way of every system, or why it has none."""
        n, node = self.cluster.devices, self.cluster.node_size
        inside = [t for t in divisors(node) if n % t == 0]
        spaces: dict[str, Iterator[tuple[Named, frozenset[str]]]] = {
            "data parallel": iter([(Named(dp=n), frozenset({GRADS}))]),
            "zero1": iter([(Named(dp=n, zero=1), frozenset({GRADS}))]),
            "zero3": iter([(Named(dp=n, zero=3), frozenset({GRADS, PARAMS}))]),
            "megatron": ((Named(dp=n // t, tp=t, zero=z), frozenset({GRADS, PARAMS})) for t in inside for z in (0, 1)),
            "fsdp+tp": ((Named(dp=n // t, tp=t, zero=3), frozenset({GRADS, PARAMS, VALUES})) for t in inside),
            "tables apart": ((Named(dp=n // t, tp=t), frozenset({GRADS, VALUES})) for t in divisors(n) if t > 1),
        }
        return {name: self._best_of(name, ways) for name, ways in spaces.items() if name != "tables apart" or self.tables}

    @cached_property
    def tables(self) -> dict[str, int]:
        """Parameters read by index alone, and how wide their rows are."""
        program = self.task.captured().program
        params = {k: v for k, v in program.input_names.items() if k.startswith("param.")}
        found = {}
        for name, node in params.items():
            users = [u for u in program.users[node] if u not in self._after(program)]
            if users and all(u.op.name == "take" and u.args[0] is node for u in users):
                found[name] = node.shape[-1]
        return found

    def _after(self, program: Program) -> frozenset[object]:
        from weft.plan.roles import Roles

        return Roles(program).after  # type: ignore[return-value]

    def _best_of(self, name: str, ways: Iterator[tuple[Named, frozenset[str]]]) -> Way | str:
        best, why = None, Reasons()
        for named, overlap in ways:
            for rounds in self.rounds(named.dp if name != "tables apart" else named.dp * named.tp):
                placed = self._held(named, rounds, tables=name == "tables apart")
                if placed is None:
                    break
                made = self._whole(name, placed, overlap, rounds, again=(NONE, FULL))
                if made is None:
                    why.least = min(why.least, placed.memory(rounds))
                    continue
                best = made if best is None or made.seconds < best.seconds else best
        return best if best is not None else why.said(self.memory)

    def rounds(self, copies: int) -> list[int]:
        """Numbers of micro-batches that leave every copy whole samples."""
        own = self.task.batch // max(1, copies)
        if not own or self.task.batch % copies:
            return []
        return [r for r in (1, 2, 4, 8, 16, 32, 64) if own % r == 0 and r <= MOST_ROUNDS]

    def _held(self, named: Named, rounds: int, tables: bool) -> Placed | None:
        key = named, rounds, tables
        if key not in self._placed:
            self._placed[key] = self._place(named, rounds, tables)
        return self._placed[key]

    def _place(self, named: Named, rounds: int, tables: bool) -> Placed | None:
        captured = self.task.captured(rounds)
        plain = replace(named, tp=1) if tables else named
        held, options = input_layouts(captured.program, plain, captured.states)
        mesh = named.mesh
        axes = [a for a in mesh.axes if a == "dp" or tables]
        held |= self.task.cut_samples(*axes)  # type: ignore[arg-type]
        if tables:
            width = {w for w in self.tables.values()}
            if any(w % named.tp for w in width):
                return None
            apart: Held = {name: {"tp": S(1)} for name in self.tables}
            apart |= {state: dict(apart[param]) for state, param in captured.states.items() if param in apart}
            held |= apart  # type: ignore[arg-type]
        try:
            program = place(captured.program, mesh, held, options)
        except (PlanError, LayoutError, TypeMismatch):
            return None
        again = frozenset(k for k in held if k.startswith("param.") and named.zero == 3)
        return Placed(program, self.cluster, again)

    def _whole(self, name: str, placed: Placed, overlap: frozenset[str], rounds: int, again: Sequence[str], rules: tuple[str, ...] = ()) -> Way | None:
        """One stage: as it is where it fits, else with parts of the forward pass run again."""
        if placed.memory(rounds) <= self.memory:
            timed = placed.step(overlap, rounds)
            return Way(name, placed, overlap, rounds, timed.seconds, placed.memory(rounds), None, rules, timed.causes)
        units = Units(placed, overlap).all
        for how in again:
            if how == NONE:
                continue
            stages = Stager(units, self.memory, rounds, how).split(1)
            if stages is not None:
                timed = placed.step(overlap, rounds)
                seconds = timed.seconds + rounds * stages[0].more
                return Way(name, placed, overlap, rounds, seconds, stages[0].memory, Staged(stages, "1f1b", seconds), rules, timed.causes)
        return None

    # --- layouts chosen by the ILP

    def meshes(self, devices: int, nodes: int) -> list[Mesh]:
        """Arrangements of the devices of a stage in one or two axes; fewer for large programs."""
        tps = [t for t in divisors(devices) if t < devices]
        if nodes > LARGE:
            tps = [t for t in tps if t in (1, 2, 4, self.cluster.node_size)]
        elif len(tps) > 8:
            tps = [t for t in tps if t & (t - 1) == 0 or t == self.cluster.node_size or t % 32 == 0]
        return [Mesh(dp=devices // t, **({"tp": t} if t > 1 else {})) for t in tps] or [Mesh(dp=1)]

    def chosen(self, captured: Captured, part: Cluster, mesh: Mesh, rounds: int, hide: float, limit: float) -> Chosen | None:
        key = id(captured), part.devices, mesh, rounds, hide, limit
        if key not in self._chosen:
            large = len(captured.program.nodes) > LARGE
            try:
                self._chosen[key] = choose(
                    captured.program, mesh, OnCluster(part, mesh), blocks=captured.blocks, memory=limit, work=EFFORT,
                    rates=Rates(hide, rounds), at_once=1 if large else 2,
                )  # fmt: skip
            except PlanError:
                self._chosen[key] = None
        return self._chosen[key]

    def free(self, say: Say, stages: bool = True) -> dict[str, Way | str]:
        """Ways with layouts by the ILP: weft's own, and the same without overlap (unity-like), and with stages (alpa-like)."""
        best: dict[str, Way] = {}
        for pp in self.depths() if stages else [1]:
            for way in self.ways(pp, say):
                if way.name not in best or way.seconds < best[way.name].seconds:
                    best[way.name] = way
                    say(f"{way.name}: {way.seconds * 1e3:,.1f} ms, {way.describe()}")
        lacking = {name: "no layouts fit" for name in ("weft", "unity-like", "alpa-like") if name not in best}
        return {**best, **lacking}

    def depths(self) -> list[int]:
        """Numbers of stages: powers of two up to the nodes, as far as there is work for them."""
        count = self.cluster.devices // self.cluster.node_size
        return [p for p in (1, 2, 4, 8, 16) if p <= max(1, count) and self.cluster.devices % p == 0]

    def ways(self, pp: int, say: Say) -> Iterator[Way]:
        devices = self.cluster.devices // pp
        part = self.cluster if pp == 1 else self.cluster.slice(0, devices)
        for rounds in self.some_rounds(pp):
            captured = self.task.captured(rounds)
            found = False
            for mesh in self.meshes(devices, len(captured.program.nodes)):
                for hide in HIDES if pp == 1 else HIDES[:1]:
                    for way in self._chosen_ways(captured, part, mesh, rounds, hide, pp):
                        found = True
                        yield way
            if found:
                return

    def some_rounds(self, pp: int) -> list[int]:
        """From the fewest micro-batches at which state and the values between units can fit."""
        options = [r for r in self.rounds(1) if r >= (1 if pp == 1 else 4 * pp)]
        return options[:6]

    def _chosen_ways(self, captured: Captured, part: Cluster, mesh: Mesh, rounds: int, hide: float, pp: int) -> Iterator[Way]:
        own = (self.memory - RESIDENT) / (1 + FRAGMENTATION)
        made = self.chosen(captured, part, mesh, rounds, hide, own * pp)
        if made is None:
            return
        placed = Placed(made.program, part, made.again)
        if pp == 1:
            way = self._whole("weft", placed, ALL, rounds, (NONE, MIXED))
            plain = self._whole("unity-like", placed, NOTHING, rounds, (NONE,)) if hide == 1.0 and rounds == 1 else None
            alpa = self._whole("alpa-like", placed, NOTHING, rounds, (NONE, FULL)) if hide == 1.0 else None
            yield from (w for w in (way, plain, alpa) if w is not None)
            return
        yield from self._staged("weft", placed, ALL, rounds, pp, MIXED, ("1f1b", "zero-bubble"), True)
        for recompute in (NONE, FULL):
            yield from self._staged("alpa-like", placed, NOTHING, rounds, pp, recompute, ("1f1b",), False)

    def _staged(
        self, name: str, placed: Placed, overlap: frozenset[str], rounds: int, pp: int, recompute: str, schedules: Sequence[str], beside: bool
    ) -> Iterator[Way]:
        units = Units(placed, overlap).all
        if len(units) < pp:
            return
        stages = Stager(units, self.memory, rounds, recompute).split(pp)
        if stages is None:
            return
        for schedule in schedules:
            seconds = pipelined(stages, self.cluster, rounds, schedule, beside)
            staged = Staged(stages, schedule, seconds)
            yield Way(name, placed, overlap, rounds, seconds, staged.memory, staged)
