"""Rules and layouts chosen together, over the ways of `GraphSearch`: as weft runs them, and as Unity would."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench._graph.search import ALL, HIDES, NOTHING, Candidate, GraphSearch
from bench._graph.stages import MIXED, NONE
from bench._graph.timing import PlacedProgram
from weft.core.errors import InvalidTransform, PlanError
from weft.core.program import Program
from weft.plan.layouts import OnCluster, Rates, choose
from weft.plan.rewritten import RewrittenStep, as_products, as_run
from weft.plan.schedules import PLAIN
from weft.plan.substitute import Path, best_path, on_mesh, value_rules
from weft.rewrite.schema import Schema
from weft.rewrite.updates import rules_of

BUDGET, NEIGHBOURS = 2, 16  # steps whose neighbours are looked at, and how many of each are priced: a price is an ILP
CARE = 1e8  # work of one ILP at the end
LARGE = 900  # nodes of a step beyond which it is not rewritten: each price is an ILP
MESHES = 3  # on which a rewritten step is laid out
SPELLED = ("matmul_as_einsum",)  # the rule by which products are written as such, named where no other was used


def best_bases(found: GraphSearch) -> list[Candidate]:
    return sorted(found.by_mesh.values(), key=lambda w: w.seconds)[:MESHES]


def is_large(found: GraphSearch, bases: Sequence[Candidate]) -> bool:
    return not bases or len(found.task.captured(bases[0].rounds).program.nodes) > LARGE


def joint(found: GraphSearch) -> dict[str, Candidate]:
    """The step that layouts and rules together make cheapest, as weft runs it and as Unity would. Where no rule helps it is the step as it was,
    its products written as such, which may still lay out better."""
    bases = best_bases(found)
    if is_large(found, bases):
        return {}
    base, rules = bases[0], value_rules()
    step = as_products(found.task.captured(base.rounds))
    path = best_path(step, on_mesh(base.mesh, base.placed.cluster, base.rounds), rules, BUDGET, NEIGHBOURS)
    best: dict[str, Candidate] = {}
    for moves in dict.fromkeys(((), path)):
        for way in itertools.chain(rewritten_ways(found, bases, moves, rules), rewritten_ways(found, bases, moves, rules, as_unity=True)):
            best[way.name] = min(best.get(way.name, way), way, key=lambda w: w.seconds)
    return best


def rule_names(path: Path) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(str, path)))


def _replayed(step: RewrittenStep, path: Path, rules: Sequence[Schema]) -> RewrittenStep | None:
    try:
        return functools.reduce(lambda here, move: here.moved(move, rules), path, step)
    except InvalidTransform:
        return None


def rewritten_ways(found: GraphSearch, bases: Sequence[Candidate], path: Path, rules: Sequence[Schema], as_unity: bool = False) -> Iterator[Candidate]:
    """The moves made on the step of every way, each laid out with care and run as that way is; or as Unity runs one: parameters held as they
    are used, one stage, nothing beside compute."""
    steps: dict[int, RewrittenStep | None] = {}  # rewritten, by the number of micro-batches
    for rounds in dict.fromkeys(base.rounds for base in bases):
        steps[rounds] = _replayed(as_products(found.task.captured(rounds)), path, rules)
    for base in bases:
        step = steps[base.rounds]
        if step is not None and (not as_unity or base.pp == base.rounds == 1):
            for hide in (1.0,) if as_unity else HIDES[:2]:
                yield from _laid_out(found, base, step.program, Rates(hide, base.rounds, as_unity), path)


def _laid_out(found: GraphSearch, base: Candidate, program: Program, rates: Rates, path: Path) -> Iterator[Candidate]:
    def run(program: Program) -> Program:
        return program if rates.as_used else as_run(program, base.rounds)

    try:
        made = choose(run(program), base.mesh, OnCluster(base.placed.cluster, base.mesh), work=CARE, rates=rates)
    except PlanError:
        return
    placed = PlacedProgram(run(made.program), base.placed.cluster, made.again)
    schedules = (base.staged.schedule,) if base.staged else (PLAIN,)
    if rates.as_used:
        ways = found.run("unity-like", placed, NOTHING, 1, 1, (NONE,), schedules)
    else:
        ways = found.run(base.name, placed, ALL, base.rounds, base.pp, (NONE, MIXED), schedules)
    yield from (replace(way, rules=(*(rule_names(path) or SPELLED), *rules_of(placed.program)), moves=path) for way in ways)
