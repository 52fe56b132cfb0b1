"""A plan of a program as facts for a page: the program it was made of, read back and predicted as it runs, or its stages built anew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.cluster.spec import cluster
from weft.core.errors import PlanError, WeftError
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.memory import needed
from weft.cost.simulate import predict
from weft.cost.timeline import Seen
from weft.plan.plan import Plan, step_of
from weft.plan.rewritten import moves_of, rewritten
from weft.plan.space import Limits
from weft.report.facts import Curve, View

HELD = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.BATCH)


def of_captured(plan: Plan, run_model: bool = False) -> dict[str, Any]:
    """What a page tells beyond decisions: the model and its layouts, the step in time, memory, and why it is right."""
    from weft.api.plan_program import Candidates

    notes, asked = list[str](), None
    try:
        plan.require_may_run(run_model)
        asked = Candidates.of(plan)
        asked.pool  # noqa: B018  captures the model
    except WeftError as error:
        advice = f" (`{error.repairs[0]}`)" if error.repairs else ""
        notes, asked = [f"The plan is not compared with its model here: {error.message}{advice}."], None
    text, one = plan.layouts.get("program"), plan.setting.pp == plan.layouts.get("micro_batches", 1) == 1
    if text and one:
        return {**_one_pass(plan, step_of(text)), **(_right(plan, step_of(text), asked) if asked else {"says": notes})}
    if text:
        return {"says": [*notes, "This plan was saved by an earlier version of weft; plan again to see its tensors and its step."]}
    return {"says": notes} if asked is None else _staged(plan, asked)


def _right(plan: Plan, placed: Program, asked: Any) -> dict[str, Any]:
    """Whether the plan's program is what the model's own file gives today, communication aside."""
    from weft.api.program_facts import rewrite_rules_used, verbs

    try:
        step, moves = rewritten(asked.pool.captured, moves_of(plan.layouts))
        steps = verbs(placed, step.program)
    except WeftError as error:
        return {"says": [f"The plan is not compared with its model here: {error.message}."]}
    if not all(step["same"] for step in steps):
        return {"says": [f"{plan.model} is no longer the model that was planned; plan again."]}
    return {"verbs": [*rewrite_rules_used(moves), *steps]}


def _one_pass(plan: Plan, placed: Program) -> dict[str, Any]:
    """Every op where it runs, and memory meanwhile."""
    from weft.api.plan_program import as_built
    from weft.api.pool import with_doubles

    where, mesh = cluster(plan.cluster), dict(placed.mesh.sizes)
    if math.prod(mesh.values()) != where.devices or mesh != dict(plan.layouts["mesh"]):
        raise PlanError(
            "the plan does not go with its cluster", needed=f"a program on {plan.layouts['mesh']}, and as many devices",
            found=f"{where.devices} devices of {plan.cluster}, a program on {mesh}",
        )  # fmt: skip
    program = as_built(plan.spec, placed)
    states = {i: "" for _, i in placed.state if placed.input_names[i].role not in HELD}
    return _facts(plan, predict(program, with_doubles(where)), placed, states, mesh, "one step")


def _staged(plan: Plan, asked: Any) -> dict[str, Any]:
    """Every pass of every stage where it runs, and memory of the fullest."""
    from weft.api.program_facts import split

    line, seen = asked.pool.lines.built(plan.spec, asked.pool.where)
    facts = _facts(plan, seen, line.update, asked.pool.captured.states, dict(line.update.mesh.sizes), "the full step")
    return {**facts, "verbs": [split(plan.spec.micro_batches, plan.spec.virtual_stages)]}


def _facts(plan: Plan, seen: Seen, stored: Program, states: Mapping[str, str], mesh: Mapping[str, int], title: str) -> dict[str, Any]:
    from weft.api.program_facts import communication, tensors

    return {
        "tensors": tensors(stored, states), "mesh": mesh, "communication": communication(stored), "program": stored,
        "views": [View(title, {"predicted": seen.line})], "causes_ms": {"predicted": {k: v for k, v in seen.causes_ms.items() if v > 0}},
        "memory": list(_curves(seen.memory)), "budget": Limits.of(plan.limits).room(cluster(plan.cluster)),
        "memory_note": "Of the fullest device, by what is in its memory.",
    }  # fmt: skip


def _curves(points: Sequence[tuple[float, float]]) -> Iterator[Curve]:
    """What is in memory, and what the device needs beyond that."""
    most = max(b for _, b in points)
    spare = needed(most) - most
    yield Curve("in memory", points, stacked=True)
    yield Curve("safety margin", [(points[0][0], spare), (points[-1][0], spare)], stacked=True)
