"""Layouts of single tensors in a plan for a stack of layers: pins, and a user's plan for `parallelize_module`.

Two layers of the model are captured at the plan's micro-batch and placed on its tensor-parallel axis twice: sharded as the plan shards
them, and as the user says. The simulator times both, and every layer and micro-batch of a stage pays half the difference. The
degree of tensor parallelism is searched with it, so a pin that fits one degree badly may be met by another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.core.errors import LayoutError, PlanError
from weft.core.role import Role
from weft.cost.simulate import predict
from weft.frontend.capture import Captured, capture
from weft.frontend.catalog import few_layers
from weft.frontend.source import load
from weft.plan.baselines import EVERYTHING
from weft.plan.named import input_layouts
from weft.plan.pins import Pin, dtensor_pins, resolve
from weft.plan.place import place
from weft.plan.plan import Plan
from weft.plan.planner import Infeasible, Request, plan_stack
from weft.plan.search import Found, Search
from weft.plan.setting import Setting
from weft.plan.space import divisors
from weft.plan.spec import Spec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pinned:
    """The best degree under pins, the time it has with them, and the part of it the pins cost."""

    tp: int
    seconds: float
    extra: float


class CapturedLayers:
    """A few layers of a model, captured once for every micro-batch that is asked for."""

    def __init__(self, request: Request) -> None:
        self.request, self.problem = request, request.problem()
        self.few = few_layers(request.model, seq=self.problem.shape.seq)
        self._captured: dict[int, Captured] = {}
        self._seconds: dict[tuple[Spec, tuple[Pin, ...], int], float] = {}

    def model(self) -> Any:
        return load(self.request.model, device="meta", dtype=torch.bfloat16, **(self.few.settings if self.few else {}))

    def captured(self, batch: int) -> Captured:
        if batch not in self._captured:
            w = self.model()
            optimizer = torch.optim.AdamW(w.model.parameters())
            self._captured[batch] = capture(w.model, w.example(batch), w.loss, optimizer)
        return self._captured[batch]

    def extra(self, s: Setting, pins: Sequence[Pin]) -> float:
        """Seconds a step takes longer with the pins."""
        named = Spec(tp=s.tp, sp=s.sp)
        more = self.seconds(named, tuple(pins), s.micro_batch) - self.seconds(named, (), s.micro_batch)
        return more * (self.few.of / self.few.layers if self.few else 1) / s.pp * s.micro_batches

    def seconds(self, named: Spec, pins: tuple[Pin, ...], batch: int) -> float:
        key = (named, pins, batch)
        if key not in self._seconds:
            captured = self.captured(batch)
            shapes = {n: node.shape for n, node in captured.program.inputs_for(Role.PARAMETER).items()}
            placements = resolve(pins, shapes, named.mesh.sizes)
            layouts, options = input_layouts(captured.program, named, captured.states, placements)
            program = place(captured.program, named.mesh, layouts, options)
            self._seconds[key] = predict(program, self.problem.cluster).step_ms / 1e3
        return self._seconds[key]

    def best(self, pins: Sequence[Pin]) -> Pinned | str:
        """The degree of least time under the pins, or why there is none."""
        found: list[Pinned] = []
        reasons: list[str] = []
        for tp in self._degrees():
            fixed = replace(self.request.limits, pins={**self.request.limits.pins, "tp": str(tp)})
            made = Search(self.problem, fixed).best(EVERYTHING)
            if not isinstance(made, Found):
                reasons.append(f"tp {tp}: {made.reason}")
                continue
            try:
                extra = self.extra(made.setting, pins)
                found.append(Pinned(tp, made.seconds + extra, extra))
            except (PlanError, LayoutError) as e:
                reasons.append(f"tp {tp}: {e.message}, {e.needed}")
        return min(found, key=lambda p: (p.seconds, p.tp)) if found else "; ".join(reasons) or "no degree of tp above 1 divides the devices"

    def _degrees(self) -> list[int]:
        limits, model = self.request.limits, self.problem.shape
        asked = limits.pins.get("tp")
        fit = [t for t in divisors(self.problem.cluster.devices) if 1 < t <= (limits.max_tp or 64) and model.may_shard(t, 1)]
        return [t for t in fit if asked is None or str(t) == asked]


def plan_pinned(request: Request, pins: Sequence[Pin], progress: Say = lambda _: None) -> Plan | Infeasible:
    """The best plan under pins of tensors; infeasible with the reason, and without which pin there is a plan."""
    odd = next((axis for pin in pins for axis, _ in pin.places if axis != "tp"), None)
    if odd is not None:
        raise PlanError(f"cannot pin a layout along {odd}", needed="layouts along tp: the ZeRO stage is pinned by zero=0 to 3", found=odd)
    progress("tensor layouts: pricing pins")
    layers = CapturedLayers(request)
    best = layers.best(pins)
    if isinstance(best, str):
        return Infeasible(best, _nearest(layers, pins), {"weft": best})
    made = plan_stack(replace(request, limits=replace(request.limits, pins={**request.limits.pins, "tp": str(best.tp)})), progress)
    return with_layouts(made, layers.extra(made.setting, pins), pins, "weft") if isinstance(made, Plan) else made


def _nearest(layers: CapturedLayers, pins: Sequence[Pin]) -> str:
    for k, pin in enumerate(pins):
        rest = [*pins[:k], *pins[k + 1 :]]
        found = layers.best(rest)
        if isinstance(found, Pinned):
            return f'without --pin "{pin}": {found.seconds * 1e3:,.0f} ms with tp {found.tp}'
    return "none of: leaving out one of the pins"


def with_layouts(made: Plan, extra: float, pins: Sequence[Pin], origin: str) -> Plan:
    """The plan with what the layouts cost, and the layouts among its limits."""
    ms = made.step_ms + extra * 1e3
    scale = made.step_ms / ms
    rates = {k: float(f"{made.predicted[k] * scale:.6g}") for k in ("tokens_per_s", "mfu")}
    predicted = {**made.predicted, **rates, "step_ms": float(f"{ms:.6g}"), "layouts_ms": float(f"{extra * 1e3:.6g}")}
    return replace(made, origin=origin, predicted=predicted, setting=replace(made.setting, pins=tuple(map(str, pins))))


def with_baseline(made: Plan, request: Request, name: str, plan: Mapping[str, Any], progress: Say = lambda _: None) -> Plan:
    """The plan next to a user's own for `parallelize_module`; where that is better, it is the plan."""
    progress(f"{name}: pricing")
    layers = CapturedLayers(request)
    pins = _only_sharded(dtensor_pins(layers.model().model, plan))
    best = layers.best(pins)
    if isinstance(best, str):
        return replace(made, infeasible={**made.infeasible, name: best})
    shown = {**made.baselines_ms, name: float(f"{best.seconds * 1e3:.6g}")}
    if best.seconds * 1e3 >= made.step_ms:
        return replace(made, baselines_ms=shown)
    theirs = plan_stack(replace(request, limits=replace(request.limits, pins={**request.limits.pins, "tp": str(best.tp)})), progress)
    assert isinstance(theirs, Plan)
    return replace(with_layouts(theirs, layers.extra(theirs.setting, pins), pins, name), baselines_ms=shown)


def _only_sharded(pins: Sequence[Pin]) -> list[Pin]:
    """One-dimensional tensors a plan does not name may be laid out as the rest of it suggests."""
    return [p for p in pins if str(p).endswith(")") or not p.pattern.endswith((".bias", "norm.weight"))]
