"""The pool of plans that can be run on some devices: each is placed, and predicted as it would run.

It holds the plans by name, pipelines among them, what the layout solver chooses, also of a small step as rules rewrite it, and a user's own plans.
Each is priced by the simulator. Where one does not fit, so are its ways to hold less: running blocks again, and micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from weft import passes
from weft.api.pipeline_plans import PipelinePlans
from weft.cluster.profile import Constant
from weft.cluster.spec import Cluster
from weft.core.errors import LayoutError, PlanError
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.price import compiles, on_mesh
from weft.cost.simulate import predict
from weft.cost.timeline import Seen
from weft.cost.work import of_node
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import samples_in
from weft.ops.registry import nbytes
from weft.passes import HOST, Draft
from weft.plan.pins import Pin, resolve
from weft.plan.rewritten import SPELLED, Move, replayed
from weft.plan.space import divisors
from weft.plan.spec import MIXED, Spec
from weft.transform.noise import measured
from weft.transform.recompute import recomputed, regions_of
from weft.transform.updates import is_update

FINALISTS = 6  # placed plans whose buckets and kernels are made too before they are compared
REORDERED = 2  # pipelines that are tried in every order
EFFORT = 1e8  # work of one solution of the layouts
LARGE = 1500  # nodes from which the solver looks at few meshes
FAR = 1.25  # of the fastest plan: a mesh whose plans take longer is far behind
SOLVER = "layouts"  # the name of what the layout solver chooses
Others = Mapping[str, Sequence[Pin]]


@dataclass(frozen=True)
class Option:
    """A plan that was looked at: its time and memory, and what the time went into; or why it cannot be had."""

    plan: str
    ms: float = 0.0
    gb: float = 0.0
    causes: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    @staticmethod
    def of(plan: str, seen: Seen) -> Option:
        """What is predicted of a plan."""
        return Option(plan, seen.step_ms, seen.memory_gb, seen.causes_ms)

    def data(self) -> dict[str, Any]:
        """The option as a run keeps it."""
        return {"plan": self.plan, "step_ms": self.ms, "memory_gb": self.gb, "causes_ms": dict(self.causes), "reason": self.reason}


@dataclass(frozen=True)
class PlanRequest:
    """What a user wants of every plan: layouts that are fixed, the noise of the gradients measured, no more than so many bytes on a rank."""

    pins: tuple[Pin, ...] = ()
    noise: bool = False
    memory: float = 0.0
    rows: int = 0  # samples of the batch, where they are not what the first dims of all its tensors count, and the dims that do
    samples: Mapping[str, int] = field(default_factory=dict)
    imbalance: float = 1.0  # of experts


def prepare(captured: Captured, named: Spec, request: PlanRequest = PlanRequest(), device: torch.device = HOST) -> Program:
    """The step under a plan, as it is run on such devices."""
    return passes.prepare(captured, named, request.pins, request.noise, device)


def _placed(captured: Captured, named: Spec, request: PlanRequest) -> Draft:
    draft = Draft(captured, named, pins=request.pins, samples=request.samples, noise=request.noise, imbalance=request.imbalance)
    return passes.run(draft, after="stages", until="place")


def scheduled(captured: Captured, program: Program, named: Spec) -> Program:
    """A placed program with its buckets and kernels."""
    return cast(Program, passes.run(Draft(captured, named, program=program), after="noise").program)


def fill(
    pool: Pool, others: Others | None = None, by_name: bool = False, progress: Callable[[str], None] = lambda _: None,
    more: Callable[[], Iterable[Spec]] = tuple,
) -> Pool:  # fmt: skip
    """The pool with every plan it can have, those in it last that need not be looked at further; `more` where not all of them fit."""
    request = pool.request
    node_by_node = not compiles(pool.where.device)  # as a step is run whose host reads how many tokens go where
    every = map(pool.fixed, words(pool.captured, pool.where.devices, request.rows, node_by_node))
    for named in filter(pool.allows, sorted(every, key=_sharing) if pool.in_haste else every):
        if pool.is_beaten(named):
            continue
        progress(str(named))
        pool.try_spec(named)
        for name, own in (others or {}).items():
            if named.tp > 1:
                pool.try_named(f"{named} as {name}", named, replace(request, pins=(*own, *request.pins)))
    progress("stages")
    pool.try_stages()
    pool.fit_into_memory()
    for named in more() if pool.crowded else ():
        pool.try_spec(named)
    pool.reorder()
    pool.schedule()
    if not by_name:
        progress("layouts")
        pool.try_layouts()
        progress("rules")
        pool.try_rules()
    return pool


def with_doubles(where: Cluster) -> Cluster:
    """Rates of fp64, which profiles seldom have, taken for half of fp32's."""
    groups = []
    for g in where.groups:
        own = g.profile.device.constants
        half = Constant(own["peak.fp32"].value / 2, "assumed: half of fp32")
        groups.append(replace(g, profile=replace(g.profile, device=replace(g.profile.device, constants={"peak.fp64": half, **own}))))
    return replace(where, groups=tuple(groups))


def words(captured: Captured, world: int, rows: int = 0, sends: bool = False) -> Iterator[Spec]:
    """Every plan by name for so many processes; cp and ep where the step has sequences and experts to shard, `sends` tokens alone to the experts they
    picked, or not."""
    batch = [n for n in captured.program.inputs_for(Role.BATCH).values() if n.ndim]
    rows = rows or samples_in(n.shape for n in batch) or 1
    length = min((n.shape[1] for n in batch if n.ndim > 1), default=1)
    stacked = any(n.ndim > 2 for n in captured.program.inputs_for(Role.PARAMETER).values())
    for dp in divisors(world):
        for cp in divisors(world // dp):
            for ep in divisors(world // dp // cp) if stacked else [1]:
                if rows % (dp * ep) or length % cp or (cp > 1 and length < 2 * cp):
                    continue
                tp = world // dp // cp // ep
                for zero in (0, 1, 3) if dp > 1 else (0,):  # zero2 is zero1 here: a gradient never outlives its update
                    ways = itertools.product((False, True) if tp > 1 else (False,), (False, True) if ep > 1 and sends else (False,))
                    yield from (Spec(dp, cp, ep, tp, zero, sp, ragged_ep=ragged) for sp, ragged in ways)


def _sharing(named: Spec) -> int:
    """How many devices share the work on a sample."""
    return named.tp * named.cp * named.ep


class Pool:
    """Plans that were placed, each with its program (none where it is run in micro-batches) and what is predicted of it."""

    def __init__(
        self, captured: Captured, where: Cluster, request: PlanRequest, lines: PipelinePlans | None, allows: Callable[[Spec], bool] = lambda _: True,
        solved: tuple[Spec, ...] = (), fixed: Callable[[Spec], Spec] = lambda spec: spec,
    ) -> None:  # fmt: skip
        self.captured, self.where, self.request, self.allows = captured, where, request, allows
        self.fixed = fixed  # with what of a plan is decided already
        self.solved = solved  # meshes that the layout solver looks at whatever else is fast
        self.lines = lines if captured.gradients and not request.noise else None
        self.memory = min(request.memory or where.device.memory, where.device.memory)
        self.programs: dict[str, tuple[Spec, Program | None]] = {}
        self.placed: dict[str, Program] = {}  # the programs as they were placed, before buckets and kernels were made
        self.options: dict[str, Option] = {}
        self.scheduled: set[str] = set()  # names of programs that are as they will run
        self.moves: dict[str, tuple[Move, ...]] = {}  # by which steps were rewritten
        self._made: dict[tuple[Program, Spec], tuple[Program, Seen]] = {}  # plain programs as they will run
        self.thorough = False  # whether plans are looked at that cannot be the fastest

    def try_spec(self, named: Spec) -> None:
        """A plan of one pass, or in micro-batches; one that blocks recompute each its own way is run in stages alone."""
        if named.pp > 1 or named.micro > 1:
            if self.lines is not None:
                self.try_line(named)
        elif named.recompute != MIXED:
            self.try_named(str(named), named, self.request)

    # -- plans of one pass

    # -- what need not be looked at

    @property
    def in_haste(self) -> bool:
        """Whether plans that cannot be the fastest are left out: of a large program, whose every plan takes seconds to place."""
        return len(self.captured.program.nodes) > LARGE and not self.thorough

    def least(self, name: str) -> float:
        """Milliseconds of a plain plan of one pass that no sharding of state, no bucket and no fused update saves."""
        _, program = self.programs[name]
        assert program is not None
        costs, option = on_mesh(self.where, program.mesh), self.options[name]
        updates = sum(costs.alone(op) for n in program.nodes if is_update(n) for op in of_node(n))
        return option.ms - option.causes.get("dp", 0.0) - 1e3 * updates

    def is_beaten(self, named: Spec) -> bool:
        """Whether a plan that shards state cannot be faster than one that fits, since the same mesh without that is not. What others
        do by themselves is looked at in any case."""
        plain = str(replace(named, zero=0))
        if not self.in_haste or not named.zero or _sharing(named) == 1 or self.programs.get(plain, (named, None))[1] is None or not self.fitting:
            return False
        return self.least(plain) > self.fitting[0].ms

    def _without_sp(self, named: Spec) -> str:
        """The same plan without sp, if it has nothing that sp would change: no sums along tp."""
        plain = str(replace(named, sp=False))
        same_program = named.sp and self.programs.get(plain, (named, None))[1] is not None and "tp" not in self.options[plain].causes
        return plain if same_program else ""

    def try_named(self, name: str, named: Spec, request: PlanRequest) -> None:
        plain = self._without_sp(named) if name == str(named) else ""
        if plain:
            self.programs[name], self.placed[name] = (named, self.programs[plain][1]), self.placed[plain]
            self.options[name] = replace(self.options[plain], plan=name)
            return
        try:
            draft = _placed(self._of(named), named, request)
            self.placed[name] = cast(Program, draft.program)
            self.add(name, named, cast(Program, passes.run(draft, after="place", until="experts").program))
        except (PlanError, LayoutError) as e:
            self._refuse(name, e)

    def _of(self, named: Spec) -> Captured:
        return recomputed(self.captured, regions_of(self.captured, named.again))

    def add(self, name: str, named: Spec, program: Program) -> None:
        self.programs[name] = (named, program)
        self.options[name] = Option.of(name, predict(program, self.where))

    def _refuse(self, name: str, e: PlanError | LayoutError) -> None:
        self.options[name] = Option(name, reason=f"{e.message}: {e.found}" if e.found else e.message)

    # -- plans in micro-batches

    def try_line(self, named: Spec) -> Option:
        assert self.lines is not None
        name = str(named)
        try:
            seen = self.lines.predicted(named, self.where, self.request.pins, self.request.imbalance)
        except (PlanError, LayoutError) as e:
            self._refuse(name, e)
        else:
            self.programs[name] = (named, None)
            self.options[name] = Option.of(name, seen)
        return self.options[name]

    def try_stages(self) -> None:
        inside = partial(words, self.captured, rows=self.request.rows)
        for named in filter(self.allows, map(self.fixed, self.lines.stages(self.where.devices, inside))) if self.lines is not None else ():
            self.try_line(named)

    def reorder(self) -> None:
        """The fastest pipelines in fewer micro-batches, and then in other orders."""
        for others in (self.lines.halved, self.lines.orders) if self.lines is not None else ():
            fastest = [self.programs[o.plan][0] for o in self.fitting]
            for named in [n for n in fastest if n.pp > 1][:REORDERED]:
                for other in filter(self.allows, others(named)):
                    self.try_line(other)

    def fit_into_memory(self) -> None:
        """What does not fit and would be the fastest, again with blocks run twice, and in the fewest micro-batches that fit."""
        for option in sorted((self.options[n] for n in self.programs if not self._fits(n)), key=lambda o: o.ms):
            named, program = self.programs[option.plan]
            beaten = bool(self.fitting) and self.fitting[0].ms <= option.ms  # holding less only takes longer
            if beaten or self._state_bytes_of(option.plan) > self.memory:
                continue
            if program is not None:
                self._as_run(option.plan)
            if self._fits(option.plan) or option.plan != str(named):
                continue
            again = replace(named, recompute="full")
            if not self.allows(again):
                continue
            if program is None:
                self.try_line(again)
                continue
            self.try_named(str(again), again, self.request)
            if str(again) in self.programs and not self._fits(str(again)):
                self._as_run(str(again))
            self._fewest(named)
            if not self._fits(str(again)):
                self._fewest(again)

    def _as_run(self, name: str) -> None:
        """With its buckets and kernels, which may hold less, where that fits."""
        named, program = self.programs[name]
        assert program is not None
        key = program, replace(named, sp=False)
        if key not in self._made:
            made = scheduled(self.captured, program, named)
            self._made[key] = made, predict(made, self.where)
        made, seen = self._made[key]
        if seen.memory_gb * 1e9 <= self.memory:
            self.programs[name] = named, made
            self.options[name] = Option.of(name, seen)
            self.scheduled.add(name)

    def _fewest(self, named: Spec) -> None:
        """The plan in the fewest micro-batches that fit, if the most do."""
        numbers = self.lines.numbers(named.dp * named.ep) if self.lines is not None else []
        plans = list(filter(self.allows, (replace(named, micro=n) for n in (*numbers[-1:], *numbers[:-1]))))
        for k, plan in enumerate(plans):
            if self._fits(self.try_line(plan).plan) != (k == 0):
                return

    def _state_bytes_of(self, name: str) -> float:
        """Bytes of state, which no room can be made in."""
        program = self.programs[name][1]
        inputs = program.inputs if program is not None else ()
        return float(sum(nbytes(n.type) for n in inputs if n.role is not Role.BATCH))

    # -- choosing

    def _fits(self, name: str) -> bool:
        return name in self.programs and self.options[name].gb * 1e9 <= self.memory

    @property
    def crowded(self) -> bool:
        """Whether a plan does not fit."""
        return not all(map(self._fits, self.programs))

    @property
    def fitting(self) -> list[Option]:
        """From the fastest on; equal ones by the shorter name."""
        return sorted((self.options[n] for n in self.programs if self._fits(n)), key=lambda o: (o.ms, len(o.plan)))

    def schedule(self) -> None:
        """Make the fastest as they will run; the others keep the price of their plain form and fall out of the pool.

        Where buckets leave too little room a plan runs without."""
        if not self.fitting:
            raise self._too_large()
        plain = [o.plan for o in self.fitting if self.programs[o.plan][1] is not None][:FINALISTS]
        finalists = {name: self.programs[name] for name in plain}
        self.programs = {name: made for name, made in self.programs.items() if made[1] is None}
        self.programs |= finalists
        self.placed = {name: placed for name, placed in self.placed.items() if name in finalists}
        for name in finalists:
            if self._is_behind(name):
                del self.programs[name]
            elif name not in self.scheduled:
                self._as_run(name)
        self._made.clear()

    def _is_behind(self, name: str) -> bool:
        """Whether a plain plan cannot become faster than one that is as it will run. What others do by themselves is compared as it runs."""
        done = [self.options[n].ms for n in self.scheduled if self._fits(n)]
        if not self.in_haste or not done or name in self.scheduled or _sharing(self.programs[name][0]) == 1:
            return False
        return self.least(name) > min(done)

    def try_layouts(self) -> None:
        """What the layout solver makes of the two best meshes, and of those it is given; of a large program a mesh whose plans are far behind is
        left out, since solving it takes longer than all else."""
        plans = [(o.ms, self.programs[o.plan][0]) for o in self.fitting if self.programs[o.plan][1] is not None]
        most = FAR * plans[0][0] if plans and len(self.captured.program.nodes) > LARGE else math.inf
        best = list(dict.fromkeys(Spec(**n.mesh.sizes, recompute=n.recompute) for ms, n in plans if ms <= most))[:2]
        for named in dict.fromkeys((*best, *self.solved)):
            name = f"{SOLVER} {named}"
            try:
                self._solve(name, named, self._of(named))
            except PlanError as e:
                self.options[name] = Option(name, reason=e.message)

    def try_rules(self) -> None:
        """The step rewritten by rules, where the solver's layouts are the fastest and few enough nodes would be priced."""
        best = self.fitting[0].plan
        named = self.programs[best][0]
        if not best.startswith(SOLVER) or named.recompute or not self.captured.gradients:
            return
        from weft.plan.substitute import promising

        for moves in promising(self.captured, named.mesh, self.where):
            name = f"{best} by {', '.join(map(str, moves)) or SPELLED}"
            try:
                self._solve(name, named, replayed(self.captured, moves))
                self.moves[name] = moves
            except PlanError as e:
                self._refuse(name, e)

    def _solve(self, name: str, named: Spec, captured: Captured) -> None:
        from weft.plan.layouts import OnCluster, choose

        mesh = named.mesh
        shapes = {n: node.shape for n, node in captured.program.inputs_for(Role.PARAMETER).items()}
        pins = {n: [p] for n, p in resolve(self.request.pins, shapes, mesh.sizes).items()}
        prices = OnCluster(self.where, mesh)
        made = choose(captured.program, mesh, prices, memory=self.memory, blocks=captured.blocks, pins=pins, work=EFFORT)
        self.placed[name] = program = made.program
        self.add(name, named, scheduled(captured, measured(program) if self.request.noise else program, named))

    def summary_of(self, option: Option) -> Option:
        large = not option.reason and option.gb * 1e9 > self.memory
        return replace(option, reason=f"it needs {option.gb:.3g} GB of {self.memory / 1e9:.3g} GB") if large else option

    def _too_large(self) -> PlanError:
        if not self.programs:
            return PlanError(
                "no plan can be run here", needed="a plan whose layouts every op accepts", found="; ".join(o.reason for o in self.options.values())
            )
        least = min((self.options[n] for n in self.programs), key=lambda o: o.gb)
        return PlanError(
            f"no plan fits on {self.where.text}", needed=f"{self.memory / 1e9:.3g} GB on a rank or less",
            found=f"{least.gb:.3g} GB with {least.plan}", try_="a smaller batch, or more processes",
        )  # fmt: skip
