"""Substitutions chosen together with layouts.

A step is rewritten by proved rules about values, best first: in its forward pass, whose gradients are then derived anew, or anywhere.
A program costs what the layout ILP makes of it on the mesh; tables are updated by rows (`as_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.core.layout import Mesh
from weft.core.node import toposort
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.ops.registry import Kind, flops
from weft.plan.layouts import OnCluster, Rates, choose
from weft.plan.rewritten import Move, RewrittenStep, as_products, as_run
from weft.rewrite.pattern import Star
from weft.rewrite.prove.instances import declared
from weft.rewrite.prove.shapes import base_labels
from weft.rewrite.schema import OpHole, Schema, make_node
from weft.rewrite.search import best_first, both_directions

RELAX = 1.05  # a step this much dearer than the best is still followed
EFFORT = 5e6  # work of one ILP while searching
GAIN = 1e-6  # of the price, below which two steps cost the same
NODES = 2000  # of all steps that are priced together: about two seconds
FEWEST = 3  # steps that must be priced for a search to be worth it

Path = tuple[Move, ...]
Price = Callable[[Program], float]


def value_rules() -> list[Schema]:
    """Proved rules about values that join or split matmuls, both ways. Layouts are the ILP's; laws that only write the same work otherwise,
    such as those of transposes, change none."""
    from weft.rewrite.certificate import proved_rules

    return both_directions(r for r in proved_rules() if _changes_products(r))


def _changes_products(rule: Schema) -> bool:
    """Whether a rule is about what is multiplied or joined, and not one matmul, of the same work, left and right."""
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
    found = best_first(step, lambda s: s.neighbours(rules, most), lambda s: s.key, lambda s: price(s.program), RELAX, budget, GAIN)
    return found.rules


def on_mesh(mesh: Mesh, part: Cluster, rounds: int) -> Price:
    prices = OnCluster(part, mesh)

    def price(program: Program) -> float:
        try:
            return choose(as_run(program, rounds), mesh, prices, work=EFFORT, rates=Rates(rounds=rounds)).cost
        except PlanError:
            return float("inf")

    return price


def promising(captured: Captured, mesh: Mesh, where: Cluster) -> Iterator[Path]:
    """Moves after which the step may cost less: none, where matmuls are only written as such, and the best found. The steps that are priced
    have so many nodes together; a step that is larger is left as it is."""
    most = NODES // len(captured.program.nodes)
    if most < FEWEST:
        return
    yield ()
    path = best_path(as_products(captured), on_mesh(mesh, where, 1), value_rules(), 1, most - 1)
    yield from [path] if path else []
