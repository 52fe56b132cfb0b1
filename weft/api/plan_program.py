"""Plans of a model that is no stack of blocks, for any cluster: the pool of `plan="auto"`, so that what is planned is the program that would run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch

from weft import passes
from weft.api.micro_steps import micro_steps
from weft.api.pipeline_plans import PipelinePlans
from weft.api.pool import LARGE, SOLVER, Option, PlanRequest, Pool, fill, with_doubles
from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import PlanError
from weft.core.layout import R
from weft.core.program import Program
from weft.cost.memory import needed, room
from weft.cost.simulate import predict
from weft.cost.timeline import Seen
from weft.frontend.capture import capture
from weft.frontend.capture.micro import batch_dims_of
from weft.frontend.source import load
from weft.ops.registry import flops
from weft.passes import Draft
from weft.plan.explain import Reason, network_flips, scaled
from weft.plan.plan import Plan, rounded_ms, with_groups, zero_levels
from weft.plan.planner import Infeasible
from weft.plan.setting import Setting
from weft.plan.space import NODE, Limits, divisors
from weft.plan.spec import Spec
from weft.rewrite.updates import by_rows, rules_of

Say = Callable[[str], None]
FINALISTS = 3  # of the pool, of which plans are made
SYSTEMS: dict[str, Callable[[Spec], bool]] = {  # what others do by themselves
    "data parallel": lambda s: s.tp == 1 and not s.zero,
    "zero1": lambda s: s.tp == 1 and s.zero == 1,
    "zero3": lambda s: s.tp == 1 and s.zero == 3,
    "megatron": lambda s: s.zero < 2,
    "fsdp+tp": lambda s: s.zero == 3,
}
DECISIONS: dict[str, Callable[[Spec], object]] = {
    "pp": lambda s: s.pp, "mesh": lambda s: " ".join(f"{a}{n}" for a, n in s.mesh.sizes.items()), "zero": lambda s: s.zero,
    "micro-batches": lambda s: s.micro_batches,
}  # fmt: skip


def plan_program(
    model: str, cluster: Cluster, batch: int, dtype: str, limits: Limits, objective: str = "time", say: Say = lambda _: None, seq: int = 0,
    more: Callable[[], Iterable[Spec]] = tuple, imbalance: float = 1.0,
) -> Plan | Infeasible:  # fmt: skip
    """The best plan of the pool, or why there is none. `seq` are tokens of a sample of a model by name, `more` plans where not all fit."""
    asked = Candidates(model, cluster, batch, dtype, limits, seq, imbalance)
    asked.pool.thorough = objective == "memory"  # what is left out of a large pool is what is slower
    say(f"{len(asked.pool.captured.program.nodes)} nodes")
    try:
        fill(asked.pool, by_name=asked.is_fixed, progress=say, more=more)
    except PlanError as e:
        why = asked.shortage() or e.found or e.message
        return Infeasible(why, "", {"weft": why})
    best = asked.record(asked.best(objective), objective)
    for option in asked.pool.fitting[1:FINALISTS] if objective == "time" else ():
        if option.ms < best.step_ms:
            best = min(best, asked.record(option, objective), key=lambda plan: plan.step_ms)
    return best


def as_built(spec: Spec, placed: Program, imbalance: float = 1.0) -> Program:
    """What `parallelize` makes of a plan's placed program; `imbalance` is that of experts."""
    return cast(Program, passes.run(Draft(None, spec, program=placed, imbalance=imbalance), after="place").program)


def example_size(model: str) -> int:
    """Samples in the batch a model comes with."""
    return int(load(model).batch)


@dataclass(frozen=True, eq=False)
class Candidates:
    """The plans of one model at one batch on one cluster."""

    model: str
    cluster: Cluster
    batch: int
    dtype: str
    limits: Limits
    seq: int = 0
    imbalance: float = 1.0

    @staticmethod
    def of(plan: Plan) -> Candidates:
        s = plan.setting
        return Candidates(plan.model, read_cluster(plan.cluster), s.global_batch, s.dtype, Limits.of(plan.limits), plan.seq, s.imbalance)

    @cached_property
    def pool(self) -> Pool:
        work = load(self.model, device="meta", **({"seq": self.seq} if self.seq else {}))
        example, optimizer = work.example(self.batch, device="meta"), torch.optim.AdamW(work.model.parameters())
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.dtype)
        captured = capture(work.model, example, work.loss, optimizer, precision=half)
        lines = PipelinePlans(micro_steps(work.model, example, work.loss, optimizer, precision=half), self.batch, int(self.limits.pins.get("micro_batches", 0)))
        rows, dims = batch_dims_of(example)
        samples = {name: dim for name, dim in dims.items() if dim}
        request = PlanRequest(memory=room(self.limits.room(self.cluster)), rows=rows, samples=samples, imbalance=self.imbalance)
        n, large = self.cluster.devices, len(captured.program.nodes) > LARGE
        meshes = (Spec(dp=n // t, tp=t) for t in ([1] if large else divisors(self.cluster.node_size)) if n % t == 0)
        return Pool(captured, with_doubles(self.cluster), request, lines, self.allows, tuple(filter(self.allows, meshes)), self.fixed)

    def fixed(self, spec: Spec) -> Spec:
        """With what the user decided beyond degrees, which are looked through."""
        pins = self.limits.pins
        own = {"recompute": "" if pins["recompute"] == "none" else pins["recompute"]} if "recompute" in pins else {}
        own |= {"schedule": pins["schedule"]} if "schedule" in pins and spec.pp > 1 else {}
        micro = int(pins.get("micro_batches", 0)) or self.batch // (spec.dp * spec.ep * int(pins.get("micro_batch", 2 * self.batch)))
        return replace(spec, **own, **({"micro": micro} if micro > 1 else {}))

    def allows(self, spec: Spec) -> bool:
        """Within the user's limits; sequences are sharded only where that is asked for, tp stays within a node, and a stage has all devices of one."""
        try:
            s = self.setting(spec)
        except PlanError:
            return False
        pins, node = self.limits.pins, self.cluster.node_size
        small = (spec.cp == 1 or "cp" in pins) and (spec.ep == 1 or self._has_experts) and (spec.tp <= max(NODE, node) or "tp" in pins)
        return small and (spec.pp <= max(1, self.cluster.devices // node) or "pp" in pins) and self.limits.allows(s)

    @property
    def is_fixed(self) -> bool:
        """Whether decisions are made that layouts of the solver would not keep."""
        return any(value != "false" for value in self.limits.pins.values())

    @cached_property
    def _has_experts(self) -> bool:
        return any(p.ndim == 3 for p in load(self.model, device="meta").model.parameters())

    def setting(self, spec: Spec) -> Setting:
        return Setting.of(spec, global_batch=self.batch, dtype=self.dtype, overlap_sends=True, imbalance=self.imbalance)

    def best(self, objective: str = "time") -> Option:
        fit = self.pool.fitting
        return min(fit, key=lambda o: o.gb) if objective == "memory" else fit[0]

    def shortage(self) -> str:
        """What the plan that holds least would need, where there is one."""
        some = [o for o in self.pool.options.values() if not o.reason]
        if not some:
            return ""
        least, has = min(some, key=lambda o: o.gb), self.limits.room(self.cluster)
        return f"{least.plan} needs at least {needed(least.gb * 1e9) / 1e9:.1f} GB of {has / 1e9:.1f} GB"

    # -- the plan

    def record(self, best: Option, objective: str) -> Plan:
        """The plan of an option. A step in one pass is predicted once more, as it is built of the plan's own program."""
        spec, placed = self.pool.programs[best.plan][0], self.pool.placed.get(best.plan)
        systems = {name: self._system(of) for name, of in SYSTEMS.items()}
        others = {name: rounded_ms(found.ms / 1e3) for name, found in systems.items() if isinstance(found, Option)}
        levels = list(zero_levels(placed).values()) if placed is not None else []
        setting = self.setting(replace(spec, zero=max(levels, key=lambda z: (levels.count(z), z))) if levels else spec)
        layouts = self._layouts(best.plan, spec, placed)
        origin = next((name for name, found in systems.items() if found is self.pool.options[best.plan]), "weft")
        made = Plan(
            self.model, self.cluster.text, self.seq, objective, origin, with_groups(setting, layouts), self.limits.data(), {}, others,
            {name: why for name, why in systems.items() if isinstance(why, str)}, layouts,
        )  # fmt: skip
        seen = predict(as_built(made.spec, placed, self.imbalance), self.pool.where) if placed is not None else self.seen(best.plan)
        seconds, work = seen.step_ms / 1e3, sum(map(flops, self.pool.captured.program.nodes))
        predicted = {
            "step_ms": rounded_ms(seconds), "tokens_per_s": float(f"{self.batch * max(1, self.seq) / seconds:.6g}"),
            "mfu": float(f"{work / seconds / (self.cluster.devices * self.cluster.device.peak(self.dtype)):.4g}"),
            "memory_gb": float(f"{needed(seen.memory_gb * 1e9) / 1e9:.4g}"), "gap": 0.0,
            "causes_ms": {k: rounded_ms(v / 1e3) for k, v in sorted(seen.causes_ms.items()) if v > 1e-6}, "memory_parts_gb": {},
        }  # fmt: skip
        return replace(made, predicted=predicted)

    def _system(self, of: Callable[[Spec], bool]) -> Option | str:
        """The best plan of one pass that a system has, or why it has none."""
        named = [o for name, o in self.pool.options.items() if " " not in name and (s := Spec.parse(name)).pp == 1 and s.micro < 2 and of(s)]
        fit = [o for o in named if not o.reason and o.gb * 1e9 <= self.pool.memory]
        if fit:
            return min(fit, key=lambda o: o.ms)
        least = min((o.gb for o in named if not o.reason), default=math.inf)
        return f"needs at least {needed(least * 1e9) / 1e9:.1f} GB" if math.isfinite(least) else "no degrees divide the devices and the batch"

    def _layouts(self, name: str, spec: Spec, placed: Program | None) -> dict[str, Any]:
        """The mesh, and of a step in one pass how every input is laid out, the rules used and their moves, and the placed program."""
        if placed is None:
            return {"mesh": dict(spec.mesh.sizes), "micro_batches": spec.micro_batches}
        inputs = {n: {a: str(p) for a, p in x.layout.placements.items() if p != R} for n, x in placed.input_names.items()}
        moves = self.pool.moves.get(name)
        rules = (*(dict.fromkeys(map(str, moves or ()))), *rules_of(by_rows(placed)))
        return {
            "mesh": dict(placed.mesh.sizes), "inputs": {k: v for k, v in inputs.items() if v}, "again": [], "rules": list(rules),
            "moves": None if moves is None else [m.data() for m in moves], "micro_batches": 1, "beside": [], "program": placed.text,
        }  # fmt: skip

    # -- on other networks

    def seen(self, name: str, rate: float = 1.0) -> Seen:
        """A plan of the pool where the network between nodes has another rate, as a multiple of what it has."""
        spec, program = self.pool.programs[name]
        where = scaled(self.pool.where, rate)
        if program is not None:
            return predict(program, where)
        assert self.pool.lines is not None
        return self.pool.lines.predicted(spec, where, imbalance=self.imbalance)


def explain_program(plan: Plan, say: Say = lambda _: None) -> Iterator[Reason]:
    """Each decision against the best plan found that decides it otherwise. Searches again, since a plan keeps only what won."""
    asked = Candidates.of(plan)
    asked.pool.thorough = True
    pool, least = fill(asked.pool, by_name=asked.is_fixed, progress=say), plan.objective == "memory"
    chosen, found = asked.best(plan.objective), {o.plan: o for o in pool.fitting}
    of = {name: (lambda o, of=of: of(pool.programs[o.plan][0])) for name, of in DECISIONS.items()}  # type: ignore[misc]
    of["layouts"] = lambda o: "by the solver" if o.plan.startswith(SOLVER) else "by name"  # type: ignore[misc]
    of["rules"] = lambda o: ", ".join(map(str, pool.moves.get(o.plan, ()))) or "none"  # type: ignore[misc]
    for decision, value in of.items():
        others = [o for o in found.values() if value(o) != value(chosen)]  # type: ignore[no-untyped-call]
        if others:
            say(decision)
            other = min(others, key=lambda o: (o.gb if least else o.ms, o.plan))
            yield _reason(asked, decision, str(value(chosen)), chosen, other, least)  # type: ignore[no-untyped-call]


def _reason(asked: Candidates, decision: str, value: str, chosen: Option, other: Option, least: bool) -> Reason:
    def wins(rate: float) -> bool:
        return asked.seen(other.plan, rate).step_ms < asked.seen(chosen.plan, rate).step_ms

    when, factor = ("memory does not depend on the network", 0.0) if least else network_flips(wins)
    grown = sorted(((other.causes.get(k, 0.0) - chosen.causes.get(k, 0.0), k) for k in {**chosen.causes, **other.causes}), reverse=True)
    why = ", ".join(dict.fromkeys(f"{k} {d:+,.1f} ms" for d, k in (*grown[:1], *grown[-1:]) if abs(d) > 1e-3)) or "no difference in time"
    return Reason(decision, value, other.plan, other.ms - chosen.ms, other.gb - chosen.gb, why, when, factor)
