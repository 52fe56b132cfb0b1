"""Substitutions chosen by cost: best first, with relaxation and a budget.

A state is a program; a move uses one rule at one place, or at all places that look the same: a stack of equal blocks is changed as one.
States are kept in order of cost; one that costs more than `relax` times the best is dropped, so a step uphill is allowed and a long
way up is not. Nodes are interned: equal programs are one state, and common parts are shared.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.core.errors import InvalidTransform, WeftError
from weft.core.node import Node
from weft.core.program import Program
from weft.rewrite.engine import Rule, apply_rule
from weft.rewrite.pattern import Hole
from weft.rewrite.schema import Schema, flipped, matches

Cost = Callable[[Program], float]
State = TypeVar("State")
Move = TypeVar("Move")
LOOKS = 3  # how deep two places must be the same to be changed together


@dataclass(frozen=True)
class Outcome(Generic[State, Move]):
    """The cheapest program found, what it costs, the rules that led there, and how far the search went."""

    program: State
    cost: float
    start: float
    rules: tuple[Move, ...]
    expanded: int
    seen: int


def search(
    program: Program, cost: Cost, rules: Iterable[Schema] | None = None, *, relax: float = 1.05, budget: int = 100
) -> Outcome[Program, str]:
    """The cheapest program within `budget` expansions. Without `rules`, every proved rule is used, both ways."""
    directions = both_directions(_proved() if rules is None else rules)
    return best_first(program, lambda p: moves(p, directions), _key, cost, relax, budget)


def best_first(
    start: State, neighbours: Callable[[State], Iterable[tuple[Move, State]]], key: Callable[[State], object], cost: Callable[[State], float],
    relax: float, budget: int, gain: float = 0.0,
) -> Outcome[State, Move]:  # fmt: skip
    """The cheapest state within `budget` expansions; what is cheaper by no more than that share, `gain`, costs the same."""
    first = least = cost(start)
    best: tuple[State, tuple[Move, ...]] = (start, ())
    count = itertools.count()
    queue: list[tuple[float, int, State, tuple[Move, ...]]] = [(first, next(count), start, ())]
    seen = {key(start)}
    expanded = 0
    while queue and expanded < budget and queue[0][0] <= relax * least:
        _, _, here, path = heapq.heappop(queue)
        expanded += 1
        for move, there in neighbours(here):
            if key(there) in seen:
                continue
            seen.add(key(there))
            price = cost(there)
            if price < least * (1 - gain):
                least, best = price, (there, (*path, move))
            if price <= relax * least:
                heapq.heappush(queue, (price, next(count), there, (*path, move)))
    return Outcome(best[0], least, first, best[1], expanded, len(seen))


def _proved() -> tuple[Schema, ...]:
    from weft.rewrite.certificate import proved_rules

    return proved_rules()


def both_directions(rules: Iterable[Schema]) -> list[Schema]:
    """The rules and their reverses; a rule that matches everything is left out."""
    found = [w for r in rules if len(r.left) == 1 for w in (r, flipped(r)) if w is not None]
    return [w for w in found if not isinstance(w.left[0], Hole)]


def _key(program: Program) -> tuple[Node, ...]:
    return tuple(n for _, n in program.outputs)


@dataclass(frozen=True)
class Use:
    """A rule used at a place: which of the nodes of an op, in the program's order, and in which of the ways it matches there.
    Of several equal places it is the first."""

    rule: str
    op: str
    at: int
    way: int = 0
    places: int = 1

    def __str__(self) -> str:
        return f"{self.rule} x{self.places}" if self.places > 1 else self.rule


def moves(program: Program, rules: Sequence[Schema]) -> Iterator[tuple[str, Program]]:
    """Every program one move away: each rule at each place, and at all equal places at once."""
    return ((str(use), there) for use, there in uses(program, rules))


def uses(program: Program, rules: Sequence[Schema]) -> Iterator[tuple[Use, Program]]:
    """Every use of a rule, and the program it leads to."""
    for places in _same_program(program).values():
        op = places[0].op.name
        at = program.find_all(op).index(places[0])
        for schema in rules:
            for k, rule in enumerate(matches(schema, places[0])):
                everywhere = _at_all(program, schema, k, places) if len(places) > 1 else None
                if everywhere is not None:
                    yield Use(schema.name, op, at, k, len(places)), everywhere
                one = _applied(program, rule, places[0], schema.name)
                if one is not None:
                    yield Use(schema.name, op, at, k), one


def _same_program(program: Program) -> dict[object, list[Node]]:
    found: dict[object, list[Node]] = {}
    for node in program.nodes:
        if node.args:
            found.setdefault(_look(node, LOOKS), []).append(node)
    return found


def made(program: Program, use: Use, rules: Sequence[Schema]) -> Program:
    """The program that the same use of a rule leads to here; refused where it cannot be made."""
    schema = next((r for r in rules if r.name == use.rule), None)
    nodes = program.find_all(use.op)
    where = f"{use.op} {use.at} of {program.name}"
    if schema is None or use.at >= len(nodes):
        needed, found = ("a proved rule", "none of this name") if schema is None else (where, f"{len(nodes)} of this op")
        raise InvalidTransform(f"{use} cannot be used", needed=needed, found=found)
    node = nodes[use.at]
    if use.places > 1:
        after = _at_all(program, schema, use.way, _same_program(program)[_look(node, LOOKS)])
    else:
        rule = next(itertools.islice(matches(schema, node), use.way, None), None)
        after = _applied(program, rule, node, schema.name) if rule is not None else None
    if after is None:
        raise InvalidTransform(f"{use} does not match", needed=str(schema.left[0]), found=f"{where}: {node!r}")
    return after


def _look(node: Node, depth: int) -> object:
    """What a place looks like: ops, attributes and types, down to a depth."""
    below = tuple(_look(a, depth - 1) for a in node.args) if depth else ()
    return node.op if not node.op.is_input else "input", node.attrs if not node.op.is_input else (), node.types, below


def _applied(program: Program, rule: Rule, node: Node, name: str) -> Program | None:
    try:
        return apply_rule(program, rule, [node], name)
    except WeftError:
        return None


def _at_all(program: Program, schema: Schema, k: int, places: Sequence[Node]) -> Program | None:
    """The same way of using the rule at every place, one after the other."""
    for node in places:
        here = program.at(node) if node in program.node_set or program.parent is not None else None
        rule = next(itertools.islice(matches(schema, here), k, None), None) if here is not None else None
        after = _applied(program, rule, here, schema.name) if rule is not None and here is not None else None
        if after is None:
            return None
        program = after
    return program
