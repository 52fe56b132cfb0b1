"""Substitutions chosen together with layouts.

The step is rewritten by proved rules about values, best first. *Joint*: a program costs what the layout ILP makes of it on the mesh.
*Sequential*: it costs what one device needs for its share of the batch. Then either layouts are chosen for the one program that won, as
where graphs are optimised first and parallelised afterwards, or each rank of the best way without rules runs its own part rewritten so, as
where they are parallelised first; the faster counts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from weft.cluster.spec import Cluster, Nodes
from weft.core.errors import PlanError
from weft.core.layout import Mesh
from weft.core.node import Node, make
from weft.core.program import Program, new_program
from weft.ops.linalg import matmul
from weft.ops.registry import Kind
from weft.ops.shape import permute
from weft.plan.graph.search import ALL, GraphSearch, Way
from weft.plan.graph.stages import MIXED, NONE
from weft.plan.graph.timing import Placed
from weft.plan.layouts import OnCluster, Rates, choose
from weft.rewrite.schema import OpHole, Schema
from weft.rewrite.search import both_ways, moves

BUDGET, JOINT_BUDGET = 12, 2  # programs whose neighbours are looked at: a price on one device is a sum, on a mesh an ILP
NEIGHBOURS = 40  # of one program, that are priced
RELAX = 1.05  # a program this much dearer than the best is still followed
EFFORT = 5e6  # work of one ILP while searching
LARGE = 900  # nodes of a step beyond which it is not rewritten: each price is an ILP
PRODUCTS = {"ak,nk->an": (None, (1, 0)), "an,nk->ak": (None, None), "an,ak->nk": ((1, 0), None)}  # and which operand is transposed

Path = tuple[tuple[str, int], ...]  # the rule of each move, and its number among the moves there were
Price = Callable[[Program], float]


@dataclass(frozen=True)
class Both:
    """The best way with rules and layouts chosen together, and with rules first."""

    joint: Way
    sequential: Way


def joint_and_sequential(found: GraphSearch, bases: Sequence[Way]) -> Both:
    """On the meshes, stages and micro-batches of ways that were found without rules, best first. The best stands where no rule helps."""
    task, base = found.task, bases[0]
    if len(task.captured(base.rounds).program.nodes) > LARGE:
        return Both(base, base)
    rules, part = value_rules(), base.placed.cluster
    together = best_path(as_products(task.captured(base.rounds).program), _on_mesh(base.mesh, part, base.rounds), rules, JOINT_BUDGET)
    lone = replace(task, batch=max(1, task.batch // task.cluster.devices)).captured(1).program
    alone = best_path(as_products(lone), one_device(part), rules, BUDGET)
    joint, first = (_best(found, bases, path, rules) for path in (together, alone))
    local = _on_each_rank(base, as_products(lone), alone, one_device(part), rules)
    sequential = min(first, local, key=lambda w: w.seconds) if alone else base
    return Both(min(joint, base, local, key=lambda w: w.seconds), sequential)


def _on_each_rank(base: Way, lone: Program, path: Path, price: Price, rules: Sequence[Schema]) -> Way:
    """A way whose ranks run their own part of it rewritten: it gains what one device gains on its share of the batch."""
    gain = price(lone) - price(replayed(lone, path, rules)) if path else 0.0
    return replace(base, seconds=base.seconds - max(0.0, gain), rules=tuple(dict.fromkeys(name for name, _ in path)))


def _best(found: GraphSearch, bases: Sequence[Way], path: Path, rules: Sequence[Schema]) -> Way:
    """The moves made on the program of every way, each laid out and run as that way is; the fastest."""
    steps: dict[int, Program | None] = {}  # rewritten, by the number of micro-batches
    for rounds in dict.fromkeys(base.rounds for base in bases):
        steps[rounds] = _replayed(as_products(found.task.captured(rounds).program), path, rules)
    made = (_way(found, base, step, path) for base in bases if (step := steps[base.rounds]) is not None)
    return min((way for way in made if way is not None), key=lambda w: w.seconds, default=bases[0])


def value_rules() -> list[Schema]:
    """Proved rules about values that join or split products, both ways. Layouts are the ILP's; pointwise laws change no layout."""
    from weft.rewrite.certificate import proved_rules

    def wanted(rule: Schema) -> bool:
        ops = [c.op for c in rule.calls if not isinstance(c.op, OpHole)]
        names = {op.name for op in ops}
        return all(op.facets["kind"] is not Kind.COMM for op in ops) and bool(names & {"matmul", "concat"}) and "einsum" not in names

    return both_ways(r for r in proved_rules() if wanted(r))


def as_products(program: Program) -> Program:
    """Products of matrices written as such, transposes as views, so that rules about products meet them."""
    made: dict[Node, Node] = {}
    for n in program.nodes:
        args = tuple(made.get(a, a) for a in n.args)
        turned = PRODUCTS.get(str(n.attr("equation"))) if n.op.name == "einsum" else None
        if turned is not None:
            made[n] = matmul(*(a if order is None else permute(a, order) for a, order in zip(args, turned, strict=True)))
        elif n.args:
            made[n] = make(n.op, args, dict(n.attrs))
    outputs = {name: made.get(n, n) for name, n in program.outputs}
    return new_program(program.name, program.mesh, program.inputs, outputs, state=program.state)


def best_path(program: Program, price: Price, rules: Sequence[Schema], budget: int) -> Path:
    """The moves that lead to the cheapest program found, best first."""
    least, best = price(program), ()  # type: tuple[float, Path]
    count = itertools.count()
    queue: list[tuple[float, int, Program, Path]] = [(least, next(count), program, ())]
    seen = {_key(program)}
    for _ in range(budget):
        if not queue or queue[0][0] > RELAX * least:
            break
        _, _, here, path = heapq.heappop(queue)
        for k, name, there in _neighbours(here, rules):
            if _key(there) in seen:
                continue
            seen.add(_key(there))
            cost = price(there)
            least, best = min((least, best), (cost, (*path, (name, k))), key=lambda found: found[0])
            if cost <= RELAX * least:
                heapq.heappush(queue, (cost, next(count), there, (*path, (name, k))))
    return best


def _neighbours(program: Program, rules: Sequence[Schema]) -> Iterator[tuple[int, str, Program]]:
    yield from ((k, name, there) for k, (name, there) in enumerate(itertools.islice(moves(program, rules), NEIGHBOURS)))


def replayed(program: Program, path: Path, rules: Sequence[Schema]) -> Program:
    """The same moves on a program of the same structure."""
    for name, k in path:
        found = next(((n, there) for i, n, there in _neighbours(program, rules) if i == k), None)
        if found is None or found[0] != name:
            raise PlanError("the moves do not lead the same way here", needed=f"{name} as move {k}", found=str(found and found[0]))
        program = found[1]
    return program


def _replayed(program: Program, path: Path, rules: Sequence[Schema]) -> Program | None:
    try:
        return replayed(program, path, rules)
    except PlanError:
        return None


def _key(program: Program) -> tuple[Node, ...]:
    return tuple(n for _, n in program.outputs)


def _on_mesh(mesh: Mesh, part: Cluster, rounds: int) -> Price:
    prices = OnCluster(part, mesh)

    def price(program: Program) -> float:
        try:
            return choose(program, mesh, prices, work=EFFORT, rates=Rates(rounds=rounds)).cost
        except PlanError:
            return float("inf")

    return price


def one_device(part: Cluster) -> Price:
    """Seconds of a step on one device."""
    group = part.groups[0]
    prices = OnCluster(Cluster(f"1x{group.profile.name}", (Nodes(1, 1, group.profile),)), Mesh(dp=1))
    return lambda program: sum(prices.chained(program, n) for n in program.nodes if n.args)


def _way(found: GraphSearch, base: Way, step: Program, path: Path) -> Way | None:
    """The program that won, laid out with care and run as the way it started from."""
    try:
        made = choose(step, base.mesh, OnCluster(base.placed.cluster, base.mesh), work=1e8, rates=Rates(rounds=base.rounds))
    except PlanError:
        return None
    placed = Placed(made.program, base.placed.cluster, made.again)
    schedules = (base.staged.schedule,) if base.staged else ("1f1b",)
    best = min(found.run(base.name, placed, ALL, base.rounds, base.pp, (NONE, MIXED), schedules), key=lambda w: w.seconds, default=None)
    return None if best is None else replace(best, rules=tuple(dict.fromkeys(name for name, _ in path)))
