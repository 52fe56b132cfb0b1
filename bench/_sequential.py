"""Substitutions and layouts chosen together, against substitutions chosen first, with the same rules, meshes and prices.

*Sequential*: a program costs what one device needs for its share of the batch. Then either layouts are chosen for the one program that won, as where
graphs are optimised first and parallelised afterwards, or each rank of the best way without rules runs its own part rewritten so, as where
they are parallelised first; the faster counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench._graph.rules import best_bases, is_large, joint, rewritten_ways, rule_names
from bench._graph.search import Candidate, GraphSearch
from weft.cluster.spec import Cluster, Nodes
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.cost.price import compiles, on_mesh
from weft.cost.work import records
from weft.plan.rewritten import RewrittenStep, as_products, as_run
from weft.plan.substitute import Path, Price, best_path, value_rules
from weft.rewrite.schema import Schema
from weft.rewrite.updates import rules_of

BUDGET, NEIGHBOURS = 12, 40  # steps whose neighbours are looked at, and how many of each are priced: on one device a price is a sum


@dataclass(frozen=True)
class Both:
    """The best way with rules and layouts chosen together, and with rules first; and the first as Unity would run it."""

    joint: Candidate
    sequential: Candidate
    unity: Candidate | None


def joint_and_sequential(found: GraphSearch) -> Both:
    """On the meshes, stages and micro-batches of the best ways found without rules. The best of these stands where no rule helps."""
    bases = best_bases(found)
    if is_large(found, bases):
        return Both(bases[0], bases[0], None)
    rules, price = value_rules(), one_device(bases[0].placed.cluster)
    plain = min([bases[0], *rewritten_ways(found, bases, (), rules)], key=lambda w: w.seconds)
    together = joint(found)
    lone = as_products(replace(found.task, batch=max(1, found.task.batch // found.cluster.devices)).captured(1))
    alone = best_path(lone, price, rules, BUDGET, NEIGHBOURS)
    local = _on_each_rank(plain, lone, alone, price, rules) if alone else plain
    first = rewritten_ways(found, bases, alone, rules) if alone else ()
    sequential = min([plain, local, *first], key=lambda w: w.seconds)
    best = min(together.get("weft", plain), plain, local, key=lambda w: w.seconds)
    return Both(best, sequential, together.get("unity-like"))


def _on_each_rank(base: Candidate, lone: RewrittenStep, path: Path, price: Price, rules: Sequence[Schema]) -> Candidate:
    """A way whose ranks run their own part of it rewritten: it gains what one device gains on its share of the batch."""
    gain = price(lone.program) - price(functools.reduce(lambda step, move: step.moved(move, rules), path, lone).program) if path else 0.0
    return replace(base, seconds=base.seconds - max(0.0, gain), rules=(*rule_names(path), *rules_of(base.placed.program)))


def one_device(part: Cluster) -> Price:
    """Seconds of a step on one device."""
    group = part.groups[0]
    costs = on_mesh(Cluster(f"1x{group.profile.name}", (Nodes(1, 1, group.profile),)), Mesh(dp=1))

    def price(program: Program) -> float:
        return sum(map(costs.seconds, records(as_run(program, 1), compiles(costs.device))))

    return price
