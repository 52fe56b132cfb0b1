"""`plan="auto"`: every plan that can be run on these processes is placed and foreseen, and the fastest that fits is taken.

The pool holds the plans by name, what the layout solver chooses, and a user's own plans. Each is priced as it would run, by the
simulator on a profile of this machine. Rank 0 plans and tells the others, so that all run one program.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from weft.api.noise import measured
from weft.api.schedule import bucketed, fused_update
from weft.cluster.here import here
from weft.cluster.profile import Constant
from weft.cluster.spec import Cluster
from weft.core.errors import LayoutError, PlanError
from weft.core.program import Program
from weft.core.text import parse
from weft.frontend.capture import Captured
from weft.plan.context import ring
from weft.plan.named import Named, input_layouts
from weft.plan.pins import Pin, resolve
from weft.plan.place import place
from weft.plan.plan import Plan, load
from weft.plan.records import peak_bytes, program_phase
from weft.plan.space import divisors
from weft.runtime import hosts, native
from weft.runtime.comm import message_bytes
from weft.runtime.replay import is_accelerator

FINALISTS = 6  # placed plans whose buckets and kernels are made too before they are compared
HOST = torch.device("cpu")
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


@dataclass(frozen=True)
class Decision:
    """What was chosen, where, and beside what; `words` say its mesh, and `text` is the program itself, the same on every rank."""

    plan: str
    words: str
    cluster: str
    options: tuple[Option, ...]
    text: str

    @property
    def named(self) -> Named:
        return Named.parse(self.words)

    @cached_property
    def program(self) -> Program:
        return parse(self.text)

    @property
    def chosen(self) -> Option:
        return next(o for o in self.options if o.plan == self.plan)

    def __str__(self) -> str:
        """The choice, the next best with what it costs and why, and what cannot be had."""
        best = self.chosen
        lines = [f"{self.plan} on {self.cluster}: {best.ms:,.1f} ms a step and {best.gb:.3g} GB on a rank are foreseen"]
        fit = sorted((o for o in self.options if not o.reason and o is not best), key=lambda o: o.ms)
        lines += [f"  {o.plan}: {o.ms - best.ms:+,.1f} ms, {o.gb - best.gb:+.3g} GB ({_why(best, o)})" for o in fit]
        return "\n".join([*lines, *(f"  {o.plan}: not possible, {o.reason}" for o in self.options if o.reason)])


def _why(best: Option, other: Option) -> str:
    """What the other does longer."""
    grown = sorted(((ms - best.causes.get(k, 0.0), k) for k, ms in other.causes.items()), reverse=True)
    return ", ".join(f"{k} {ms:+,.1f} ms" for ms, k in grown[:2] if ms > 0.005) or "nothing takes longer"


@dataclass(frozen=True)
class Wish:
    """What a user wants of every plan: layouts that are fixed, and the noise of the gradients measured."""

    pins: tuple[Pin, ...] = ()
    noise: bool = False


def prepare(captured: Captured, named: Named, wish: Wish = Wish(), device: torch.device = HOST) -> Program:
    """The step under a plan, as it is run on such devices."""
    return scheduled(_placed(captured, named, wish), named, device)


def _placed(captured: Captured, named: Named, wish: Wish) -> Program:
    shapes = {n: node.shape for n, node in captured.program.input_names.items() if n.startswith("param.")}
    held = resolve(wish.pins, shapes, named.mesh.sizes)
    layouts, options = input_layouts(captured.program, named, captured.states, held)
    program = place(captured.program, named.mesh, layouts, options)
    return measured(program) if wish.noise else program


def scheduled(program: Program, named: Named, device: torch.device = HOST) -> Program:
    """Gradients in buckets, sharded updates in one kernel, and keys gathered beside the attention where the plan says so.

    Between hosts there is no such kernel: every sum is followed by its own update and gather while the next is under way.
    """
    program = ring(program, "cp") if named.ring and named.cp > 1 else program
    if named.dp == 1:
        return program
    if not hosts.share(named.mesh.sizes, "dp"):
        return bucketed(program, "dp", message_bytes(device))
    one = named.zero in (1, 2) if is_accelerator(device) else native.available()
    return bucketed(fused_update(program, "dp") if one else program, "dp")


# -- choosing ----------------------------------------------------------------------------------------------------------------------


def agree(captured: Captured, device: torch.device, wish: Wish = Wish(), others: Others | None = None) -> Decision:
    """The decision of rank 0, on every rank; if it finds none, its reason is raised on every rank."""
    if not dist.is_initialized():
        return decide(captured, here(1, device), wish, others)
    told: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told = [json.dumps(asdict(decide(captured, here(dist.get_world_size(), device), wish, others)))]
        except Exception as e:  # the others wait to be told
            told, failed = [json.dumps({"error": str(e)})], e
    dist.broadcast_object_list(told, src=0, device=device if device.type != "cpu" else None)
    data = json.loads(told[0])
    if "error" in data:
        raise failed or PlanError("rank 0 found no plan", found=data["error"])
    return Decision(**{**data, "options": tuple(Option(**o) for o in data["options"])})


def decide(captured: Captured, where: Cluster, wish: Wish = Wish(), others: Others | None = None) -> Decision:
    """The fastest plan that fits and grants the wish; `others` are a user's own tensor-parallel plans, by name."""
    pool = _Pool(captured, _with_doubles(where), wish)
    for named in words(captured, where.devices):
        pool.try_named(str(named), named, wish)
        for name, own in (others or {}).items():
            if named.tp > 1:
                pool.try_named(f"{named} as {name}", named, replace(wish, pins=(*own, *wish.pins)))
    pool.schedule()
    pool.try_layouts()
    return pool.decision()


def _with_doubles(where: Cluster) -> Cluster:
    """Rates of fp64, which profiles seldom have, taken for half of fp32's."""
    groups = []
    for g in where.groups:
        own = g.profile.device.constants
        half = Constant(own["peak.fp32"].value / 2, "assumed: half of fp32")
        groups.append(replace(g, profile=replace(g.profile, device=replace(g.profile.device, constants={"peak.fp64": half, **own}))))
    return replace(where, groups=tuple(groups))


def words(captured: Captured, world: int) -> Iterator[Named]:
    """Every plan by name for so many processes; cp and ep where the step has sequences and experts to cut."""
    batch = [n for name, n in captured.program.input_names.items() if name.startswith("batch.") and n.ndim]
    rows = min((n.shape[0] for n in batch), default=1)
    length = min((n.shape[1] for n in batch if n.ndim > 1), default=1)
    stacked = any(n.ndim > 2 for name, n in captured.program.input_names.items() if name.startswith("param."))
    for dp in divisors(world):
        for cp in divisors(world // dp):
            for ep in divisors(world // dp // cp) if stacked else [1]:
                if rows % (dp * ep) or length % cp or (cp > 1 and length < 2 * cp):
                    continue
                tp = world // dp // cp // ep
                for zero in (0, 1, 3) if dp > 1 else (0,):  # zero2 is zero1 here: a gradient never outlives its update
                    yield from (Named(dp, cp, ep, tp, zero, sp) for sp in ((False, True) if tp > 1 else (False,)))


class _Pool:
    """Plans that were placed, each with its program and what is foreseen of it."""

    def __init__(self, captured: Captured, where: Cluster, wish: Wish) -> None:
        self.captured, self.where, self.wish = captured, where, wish
        self.programs: dict[str, tuple[Named, Program]] = {}
        self.options: dict[str, Option] = {}

    def try_named(self, name: str, named: Named, wish: Wish) -> None:
        try:
            self.add(name, named, _placed(self.captured, named, wish))
        except (PlanError, LayoutError) as e:
            self.options[name] = Option(name, reason=f"{e.message}: {e.found}" if e.found else e.message)

    def add(self, name: str, named: Named, program: Program) -> None:
        phase = program_phase(program, self.where)
        causes = {k: v * 1e3 for k, v in phase.causes.items()}
        self.programs[name] = (named, program)
        self.options[name] = Option(name, phase.seconds * 1e3, peak_bytes(program) / 1e9, causes)

    @property
    def fitting(self) -> list[Option]:
        """From the fastest on; equal ones by the shorter name."""
        budget = self.where.device.memory / 1e9
        return sorted((self.options[n] for n in self.programs if self.options[n].gb <= budget), key=lambda o: (o.ms, len(o.plan)))

    def schedule(self) -> None:
        """Make the fastest as they will run; the others keep the price of their plain form and fall out of the pool."""
        if not self.fitting:
            raise self._too_large()
        finalists = {o.plan: self.programs[o.plan] for o in self.fitting[:FINALISTS]}
        self.programs.clear()
        for name, (named, program) in finalists.items():
            self.add(name, named, scheduled(program, named))

    def try_layouts(self) -> None:
        """What the layout solver makes of the two best meshes."""
        for mesh in list(dict.fromkeys(self.programs[o.plan][0].mesh for o in self.fitting))[:2]:
            named = Named(**mesh.sizes)
            try:
                self.add(f"{SOLVER} {named}", named, self._solved(named))
            except PlanError as e:
                self.options[f"{SOLVER} {named}"] = Option(f"{SOLVER} {named}", reason=e.message)

    def _solved(self, named: Named) -> Program:
        from weft.plan.layouts import OnCluster, choose

        mesh, memory = named.mesh, self.where.device.memory
        shapes = {n: node.shape for n, node in self.captured.program.input_names.items() if n.startswith("param.")}
        pins = {n: [p] for n, p in resolve(self.wish.pins, shapes, mesh.sizes).items()}
        prices = OnCluster(self.where, mesh)
        program = choose(self.captured.program, mesh, prices, memory=memory, blocks=self.captured.blocks, pins=pins).program
        return scheduled(measured(program) if self.wish.noise else program, named)

    def decision(self) -> Decision:
        best = self.fitting[0]
        named, program = self.programs[best.plan]
        return Decision(best.plan, str(named), self.where.text, tuple(self.options.values()), program.text)

    def _too_large(self) -> PlanError:
        if not self.programs:
            return PlanError(
                "no plan can be run here", needed="a plan that places", found="; ".join(o.reason for o in self.options.values())
            )
        least = min((self.options[n] for n in self.programs), key=lambda o: o.gb)
        return PlanError(
            f"no plan fits on {self.where.text}", needed=f"{self.where.device.memory / 1e9:.3g} GB on a rank or less",
            found=f"{least.gb:.3g} GB with {least.plan}", try_="a smaller batch, or more processes",
        )  # fmt: skip


# -- plan files ---------------------------------------------------------------------------------------------------------------------


def is_file(plan: str) -> bool:
    return isinstance(plan, str) and plan.endswith(".json")


def from_file(path: str) -> tuple[str, int]:
    """The words and the number of micro-batches of a plan that `weft plan --out` wrote; what is not followed is warned of."""
    plan = load(path)
    if plan.named is None:
        raise PlanError(
            f"the plan {path} cannot be run by parallelize", needed="equal shares, or one stage and shares that torch.chunk's rule deals out",
            found=f"pp {plan.setting.pp}, {len(plan.shares)} kinds of copies", try_="weft plan ... --pin pp=1",
        )  # fmt: skip
    ignored = not_followed(plan)
    if ignored:
        warnings.warn(f"of the plan {path} this is not followed: {'; '.join(ignored)}", stacklevel=3)
    return plan.named, 1 if plan.shares or plan.setting.pp > 1 else plan.setting.micro_batches


def not_followed(plan: Plan) -> list[str]:
    """What of a plan changes time or memory and is not done by `parallelize`."""
    s = plan.setting
    found = [f"recompute {s.recompute}: everything is kept"] if s.recompute not in ("none", "full") else []
    found += ["where its stages are cut: they are cut for balance here"] if s.pp > 1 else []
    return found + (["collectives of tp beside products"] if s.overlap_tp else [])
