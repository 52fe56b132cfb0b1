"""Why a plan of a captured program is as it is: its stages, its mesh and how it holds its inputs, each against the best way found that
decides it otherwise. What flips a decision is found by running the same two ways on slower and faster networks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import PlanError
from weft.plan.explain import Reason, network_flips, scaled
from weft.plan.graph.planner import all_ways, task_of
from weft.plan.graph.search import Candidate, GraphSearch
from weft.plan.graph.stages import pipelined
from weft.plan.graph.timing import PlacedProgram
from weft.plan.graph.units import Units
from weft.plan.plan import Plan
from weft.plan.space import Limits

Say = Callable[[str], None]


def explain_captured(plan: Plan, say: Say = lambda _: None) -> Iterator[Reason]:
    """Searches again, since a plan keeps only what won."""
    place = read_cluster(plan.cluster)
    task = task_of(plan.model, place, plan.setting.global_batch, plan.setting.dtype)
    search = GraphSearch(task, Limits.of(plan.limits).room(place))
    say("layouts")
    named = {name: way for name, way in all_ways(search, say).items() if isinstance(way, Candidate)}
    if not named:
        raise PlanError("the plan does not run on its own cluster", needed="a plan of this version of weft", found=plan.model)
    least = plan.objective == "memory"
    chosen = min(named.values(), key=lambda w: (w.memory if least else w.seconds, w.name != "weft"))
    ways = [*search.by_mesh.values(), *named.values()]
    decisions: dict[str, tuple[str, Callable[[Candidate], object]]] = {
        "pp": (str(chosen.pp), lambda w: w.pp),
        "mesh": (_mesh(chosen), _mesh),
        "micro-batches": (str(chosen.rounds), lambda w: w.rounds),
        "layouts": (chosen.name, lambda w: w.name),
        "rules": (", ".join(chosen.rules) or "none", lambda w: w.rules),
    }
    for decision, (value, of) in decisions.items():
        others = [w for w in ways if of(w) != of(chosen)]
        if others:
            say(decision)
            made = _reason(place, decision, value, chosen, min(others, key=lambda w: (w.memory if least else w.seconds, w.name)))
            yield replace(made, flips="what is held does not depend on the network", factor=0.0) if least else made


def _mesh(way: Candidate) -> str:
    return " ".join(f"{axis}{n}" for axis, n in way.mesh.sizes.items())


def _reason(whole: Cluster, decision: str, value: str, chosen: Candidate, other: Candidate) -> Reason:
    ms, gb = (other.seconds - chosen.seconds) * 1e3, (other.memory - chosen.memory) / 1e9
    when, factor = network_flips(lambda rate: seconds_on(other, whole, rate) < seconds_on(chosen, whole, rate))
    name = "" if other.name == chosen.name else f"{other.name}: "
    return Reason(decision, value, name + other.describe(), ms, gb, _why(chosen, other), when, factor)


def _why(chosen: Candidate, other: Candidate) -> str:
    """What takes longer, where both run in one stage; else what each stage takes and how many there are."""
    if chosen.causes and other.causes:
        grown = sorted(((other.causes.get(k, 0.0) - chosen.causes.get(k, 0.0), k) for k in {**chosen.causes, **other.causes}), reverse=True)
        said = [f"{k} {d * 1e3:+,.1f} ms" for d, k in (*grown[:1], *grown[-1:]) if abs(d) > 1e-6]
        return ", ".join(dict.fromkeys(said)) or "no difference in time"
    return f"{_slowest(other)} in place of {_slowest(chosen)}"


def _slowest(way: Candidate) -> str:
    if way.staged is None or way.pp == 1:
        return f"one stage of {way.seconds / way.rounds * 1e3:,.1f} ms a micro-batch"
    return f"{way.pp} stages, the slowest of {max(s.seconds for s in way.staged.stages) * 1e3:,.1f} ms a micro-batch"


def seconds_on(way: Candidate, whole: Cluster, rate: float) -> float:
    """The step of a way where the network between nodes has another rate, as a multiple of what it has."""
    placed = PlacedProgram(way.placed.program, scaled(way.placed.cluster, rate), way.placed.again)
    if way.staged is None:
        return placed.step(way.overlap, way.rounds).seconds
    units = Units(placed, way.overlap).all
    stages = [
        replace(s, total=reduce(operator.add, units[s.first : s.last]), more=sum(units[i].forward for i in s.again))
        for s in way.staged.stages
    ]
    if way.pp == 1:
        return placed.step(way.overlap, way.rounds).seconds + way.rounds * stages[0].more
    return pipelined(stages, scaled(whole, rate), way.rounds, way.staged.schedule, bool(way.overlap))
