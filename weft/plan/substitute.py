"""Substitutions chosen together with layouts.

A step is rewritten by proved rules about values, best first: in its forward pass, whose gradients are then derived anew, or anywhere.
A program costs what the layout ILP makes of it on the mesh; tables are updated by rows (`as_run`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from weft.cluster.spec import Cluster
from weft.core.errors import InvalidTransform, PlanError
from weft.core.layout import Mesh
from weft.core.node import toposort
from weft.core.program import Program
from weft.ops.registry import Kind, flops
from weft.plan.graph.search import ALL, HIDES, NOTHING, Candidate, GraphSearch
from weft.plan.graph.stages import MIXED, NONE
from weft.plan.graph.timing import PlacedProgram
from weft.plan.layouts import OnCluster, Rates, choose
from weft.plan.rewritten import Move, RewrittenStep, as_products, as_run
from weft.plan.schedules import PLAIN
from weft.rewrite.pattern import Star
from weft.rewrite.prove.instances import declared
from weft.rewrite.prove.shapes import base_labels
from weft.rewrite.schema import OpHole, Schema, make_node
from weft.rewrite.search import both_ways
from weft.rewrite.updates import rules_of

BUDGET, NEIGHBOURS = 2, 16  # steps whose neighbours are looked at, and how many of each are priced: a price is an ILP
RELAX = 1.05  # a step this much dearer than the best is still followed
EFFORT, CARE = 5e6, 1e8  # work of one ILP while searching, and at the end
LARGE = 900  # nodes of a step beyond which it is not rewritten: each price is an ILP
GAIN = 1e-6  # of the price, below which two steps cost the same
MESHES = 3  # on which a rewritten step is laid out
SPELLED = ("matmul_as_einsum",)  # the rule by which products are written as such, named where no other was used

Path = tuple[Move, ...]
Price = Callable[[Program], float]


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


def value_rules() -> list[Schema]:
    """Proved rules about values that join or split products, both ways. Layouts are the ILP's; laws that only write the same work otherwise,
    such as those of transposes, change none."""
    from weft.rewrite.certificate import proved_rules

    return both_ways(r for r in proved_rules() if _changes_products(r))


def _changes_products(rule: Schema) -> bool:
    """Whether a rule is about what is multiplied or joined, and not one product, of the same work, left and right."""
    known = [c for c in rule.calls if not isinstance(c.op, OpHole)]
    joins = any(c.op.kind is Kind.VIEW and (len(c.args) > 1 or isinstance(c.args[0], Star)) for c in known)
    products = sum(c.op.kind is Kind.CONTRACT for c in known)
    if any(c.op.kind is Kind.COMM for c in known) or not (joins or products):
        return False
    return joins or products > 2 or _work_differs(rule)


def _work_differs(rule: Schema) -> bool:
    if rule.op_holes or not set(rule.holes) <= set(rule.shapes):
        return True
    sizes = {x: 2 * k + 3 for k, x in enumerate(base_labels(rule.shapes))}
    bound = {h: declared(h, rule.shapes[h], sizes) for h in rule.holes}
    left, right = (sum(map(flops, toposort([make_node(side[0], bound)]))) for side in (rule.left, rule.right))
    return left != right


def best_path(step: RewrittenStep, price: Price, rules: Sequence[Schema], budget: int, most: int) -> Path:
    """The moves that lead to the cheapest step found, best first; a move that gains nothing is not made."""
    least, best = price(step.program), ()  # type: tuple[float, Path]
    count = itertools.count()
    queue: list[tuple[float, int, RewrittenStep, Path]] = [(least, next(count), step, ())]
    seen = {step.key}
    for _ in range(budget):
        if not queue or queue[0][0] > RELAX * least:
            break
        _, _, here, path = heapq.heappop(queue)
        for move, there in here.neighbours(rules, most):
            if there.key in seen:
                continue
            seen.add(there.key)
            cost = price(there.program)
            if cost < least * (1 - GAIN):
                least, best = cost, (*path, move)
            if cost <= RELAX * least:
                heapq.heappush(queue, (cost, next(count), there, (*path, move)))
    return best


def replayed(step: RewrittenStep, path: Path, rules: Sequence[Schema]) -> RewrittenStep:
    """The same moves on a step of the same structure."""
    for move in path:
        step = step.moved(move, rules)
    return step


def _replayed(step: RewrittenStep, path: Path, rules: Sequence[Schema]) -> RewrittenStep | None:
    try:
        return replayed(step, path, rules)
    except InvalidTransform:
        return None


def on_mesh(mesh: Mesh, part: Cluster, rounds: int) -> Price:
    prices = OnCluster(part, mesh)

    def price(program: Program) -> float:
        try:
            return choose(as_run(program, rounds), mesh, prices, work=EFFORT, rates=Rates(rounds=rounds)).cost
        except PlanError:
            return float("inf")

    return price


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
