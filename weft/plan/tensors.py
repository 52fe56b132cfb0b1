"""Layouts of single tensors in a plan for a stack of layers: pins, and a user's plan for `parallelize_module`.

The stack's blocks are placed with these layouts and priced as any others; the degree of tensor parallelism is searched under them, so a pin that fits
one degree badly may be met by another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.frontend.catalog import few_layers
from weft.frontend.source import load
from weft.plan.baselines import EVERYTHING
from weft.plan.pins import Pin, dtensor_pins
from weft.plan.plan import Plan, rounded_ms
from weft.plan.planner import Infeasible, Request, plan_stack
from weft.plan.search import Found, Search
from weft.plan.space import divisors

Say = Callable[[str], None]


def plan_pinned(request: Request, pins: Sequence[Pin], progress: Say = lambda _: None, origin: str = "") -> Plan | Infeasible:
    """The best plan under pins of tensors; infeasible with the reason, and without which pin there is a plan."""
    odd = next((axis for pin in pins for axis, _ in pin.places if axis != "tp"), None)
    if odd is not None:
        raise PlanError(f"cannot pin a layout along {odd}", needed="layouts along tp: the ZeRO stage is pinned by zero=0 to 3", found=odd)
    progress("tensor layouts: pricing pins")
    asked = replace(request, layouts=tuple(map(str, pins)))
    if (refused := _refused(asked)) is not None:
        return Infeasible(refused, _nearest(request, pins), {"weft": refused})
    made = plan_stack(asked, progress)
    if not isinstance(made, Plan):
        return made
    own, free = (Search(r.problem(), r.limits).price(made.setting) for r in (asked, request))
    assert own is not None and free is not None
    return replace(made, origin=origin or made.origin, predicted={**made.predicted, "layouts_ms": rounded_ms(own.seconds - free.seconds)})


def _refused(request: Request) -> str | None:
    """Why no degree can have these layouts; None where one can."""
    stack, degrees = request.stack()[0], _degrees(request)
    if any(stack.may_shard(tp, 1) for tp in degrees):
        return None
    return "; ".join(f"tp {tp}: {stack.refusal(tp)}" for tp in degrees) or "no degree of tp above 1 divides the devices"


def _degrees(request: Request) -> list[int]:
    """Those that the model can be sharded by where nothing is pinned."""
    asked, most = request.limits.pins.get("tp"), request.limits.max_tp or 64
    free = replace(request, layouts=()).stack()[0]
    return [t for t in divisors(cluster(request.cluster).devices) if 1 < t <= most and asked in (None, str(t)) and free.may_shard(t, 1)]


def _nearest(request: Request, pins: Sequence[Pin]) -> str:
    for k, pin in enumerate(pins):
        found = _best(replace(request, layouts=tuple(map(str, (*pins[:k], *pins[k + 1 :])))))
        if isinstance(found, Found):
            return f'without --pin "{pin}": {found.seconds * 1e3:,.0f} ms with tp {found.setting.tp}'
    return "none of: leaving out one of the pins"


def _best(request: Request) -> Found | str:
    """The best setting under the layouts of a request, or why there is none."""
    if (refused := _refused(request)) is not None:
        return refused
    found = Search(request.problem(), request.limits).best(EVERYTHING)
    return found if isinstance(found, Found) else found.reason


def with_baseline(made: Plan, request: Request, name: str, plan: Mapping[str, Any], progress: Say = lambda _: None) -> Plan:
    """The plan next to a user's own for `parallelize_module`; where that is better, it is the plan."""
    progress(f"{name}: pricing")
    few = few_layers(request.model, seq=request.seq or made.seq)
    model = load(request.model, device="meta", dtype=torch.bfloat16, **(few.settings if few else {})).model
    pins = _only_sharded(dtensor_pins(model, plan))
    known = request.stack()[0].parameters
    own = [pin for pin in pins if pin.pattern in known]  # of the blocks that are priced
    best = _best(replace(request, layouts=tuple(map(str, own))))
    if isinstance(best, str):
        return replace(made, infeasible={**made.infeasible, name: best})
    shown = {**made.baselines_ms, name: rounded_ms(best.seconds)}
    if best.seconds * 1e3 >= made.step_ms:
        return replace(made, baselines_ms=shown)
    theirs = plan_pinned(request, own, progress, name)
    assert isinstance(theirs, Plan)
    return replace(theirs, baselines_ms=shown, setting=replace(theirs.setting, pins=tuple(map(str, pins))))


def _only_sharded(pins: Sequence[Pin]) -> list[Pin]:
    """One-dimensional tensors a plan does not name may be laid out as the rest of it suggests."""
    return [p for p in pins if str(p).endswith(")") or not p.pattern.endswith((".bias", "norm.weight"))]
