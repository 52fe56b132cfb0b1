"""A placed program split into units that may become stages, and what each unit costs.

A forward pass may be split where one value alone goes on to later nodes (parameters and the batch aside). A backward node belongs to the unit
of what it needs of the forward pass, and never to a later one than the gradient it works on. Of every unit: seconds forward,
backward, of weight gradients (which nothing waits for) and once a step; bytes of state, of what is kept for the backward pass, and of the value
handed on.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from bench._graph.timing import PlacedProgram
from weft.core.node import Node
from weft.core.role import Role
from weft.ops.comm import is_comm
from weft.ops.registry import Kind, nbytes

MOST = 48  # units of one program; neighbours are joined beyond


@dataclass
class Unit:
    """Seconds and bytes on one rank, for one micro-batch except `once`, `state` and `grads`."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0  # of the backward
    once: float = 0.0
    state: float = 0.0
    grads: float = 0.0
    saved: float = 0.0
    work: float = 0.0
    sent: float = 0.0  # bytes of the value the unit hands on
    last: int = 0  # of the stretches between splits that it is made of

    def __add__(self, other: Unit) -> Unit:
        both = {k: getattr(self, k) + getattr(other, k) for k in vars(self)}
        return Unit(**{**both, "work": max(self.work, other.work), "sent": other.sent, "last": other.last})


@dataclass(frozen=True, eq=False)
class Units:
    """The units of one placed program under one overlap."""

    placed: PlacedProgram
    overlap: frozenset[str]

    @cached_property
    def forward(self) -> list[Node]:
        roles = self.placed.roles
        return [n for n in roles.order if n in roles.forward]

    @cached_property
    def cuts(self) -> list[tuple[int, Node]]:
        """Places in the forward order after which one value alone is read, with that value."""
        roles, users = self.placed.roles, self.placed.program.users
        fixed = roles.given | set(self.placed.program.inputs)
        last: dict[Node, int] = {}
        place = {n: i for i, n in enumerate(self.forward)}
        for n in self.forward:
            if n not in fixed and not self._of_inputs(n, fixed):
                last[n] = max((place[u] for u in users[n] if u in place), default=-1)
        live: set[Node] = set()
        found = []
        for i, n in enumerate(self.forward):
            if n in last and last[n] > i:
                live.add(n)
            live = {x for x in live if last[x] > i}
            if len(live) == 1 and (only := next(iter(live))).op.kind is not Kind.VIEW and not is_comm(only) and only is n:
                found.append((i, only))
        return found

    def _of_inputs(self, node: Node, fixed: frozenset[Node] | set[Node]) -> bool:
        """Made of inputs alone by views and slices, as a part of the batch is."""
        return bool(node.args) and (node.op.kind is Kind.VIEW or is_comm(node)) and all(a in fixed for a in node.args)

    @cached_property
    def of(self) -> dict[Node, int]:
        """The unit of every node."""
        ends = {i for i, _ in self.cuts}
        found: dict[Node, int] = {}
        unit = 0
        for i, n in enumerate(self.forward):
            found[n] = unit
            unit += i in ends
        handed = {n: found[n] + 1 for _, n in self.cuts}
        self._place_inputs(found)
        roles = self.placed.roles
        for n in roles.order:
            if n not in found:
                found[n] = self._backward_unit(n, found, handed)
        return found

    def _place_inputs(self, found: dict[Node, int]) -> None:
        for n in self.placed.program.inputs:
            readers = [found[u] for u in self.placed.program.users[n] if u in found]
            if readers:
                found[n] = min(readers)

    def _backward_unit(self, node: Node, found: dict[Node, int], handed: dict[Node, int]) -> int:
        forward, inputs = self.placed.roles.forward, self.placed.program.input_set
        needs = [handed.get(a, found[a]) for a in node.args if a in found and (a in forward or a in inputs)]
        grads = [found[a] for a in node.args if a in found and a not in forward and a not in inputs]
        if not grads:
            return max(needs, default=len(self.cuts))
        return min(min(grads), max(needs)) if needs else min(grads)

    @cached_property
    def late(self) -> frozenset[Node]:
        """Backward nodes that lead to updates alone: weight gradients."""
        roles = self.placed.roles
        found: set[Node] = set(roles.after)
        for n in reversed(roles.order):
            users = self.placed.program.users[n]
            if n not in roles.forward and n not in found and users and all(u in found for u in users):
                found.add(n)
        return frozenset(found - roles.after)

    @cached_property
    def all(self) -> list[Unit]:
        """The units in order."""
        count = len(self.cuts) + 1
        units = [Unit(last=i) for i in range(count)]
        self._seconds(units)
        self._bytes(units)
        for i, (_, value) in enumerate(self.cuts):
            units[i].sent = float(nbytes(value.type))
        return _joined(units)

    def _seconds(self, units: list[Unit]) -> None:
        roles = self.placed.roles
        plain, last = (self.placed.run(self.overlap, once) for once in (False, True))
        ends = [run.run().seconds for run in (plain, last)]
        for n, seconds in plain.spent.items():
            unit = units[min(self.of[n], len(units) - 1)]
            if n in roles.forward:
                unit.forward += seconds
            else:
                unit.backward += seconds
                unit.weight += seconds if n in self.late else 0.0
        more = ends[1] - ends[0]
        total = sum(self._param_bytes.values()) or 1.0
        for u, size in self._param_bytes.items():
            units[min(u, len(units) - 1)].once += more * size / total

    @cached_property
    def _param_bytes(self) -> dict[int, float]:
        """Bytes of state by unit."""
        found: dict[int, float] = defaultdict(float)
        program = self.placed.program
        homes = {i for _, i in program.state}
        for u in self.placed.roles.updates:
            params = [a for a in u.args if a in self.of and a.role is Role.PARAMETER] if u.args else []
            unit = min((self.of[p] for p in params), default=0)
            found[unit] += sum(nbytes(a.type) for a in u.args if a in program.input_set and a.attr("name") in homes)
        return found

    def _bytes(self, units: list[Unit]) -> None:
        roles, program = self.placed.roles, self.placed.program
        for u, size in self._param_bytes.items():
            units[min(u, len(units) - 1)].state += size
        for n in roles.updates:
            for a in n.args:
                if a not in roles.given and a not in program.input_set and a in self.of:
                    units[min(self.of[n], len(units) - 1)].grads += nbytes(a.type)
        for n in roles.order:
            unit = units[min(self.of[n], len(units) - 1)]
            size = float(sum(nbytes(t) for t in n.types)) if n.op.kind is not Kind.VIEW else 0.0
            unit.work = max(unit.work, size)
            if n in roles.forward and size and self._kept(n):
                unit.saved += size

    def _kept(self, node: Node) -> bool:
        """Whether a value waits for the backward pass."""
        roles, todo = self.placed.roles, [node]
        if self.placed.made_again(node):
            return False
        while todo:
            for u in self.placed.program.users[todo.pop()]:
                if u not in roles.forward and u not in roles.after:
                    return True
                if u.op.kind is Kind.VIEW or u.op.name == "item":
                    todo.append(u)
        return False


def _joined(units: list[Unit]) -> list[Unit]:
    """Neighbours joined, the cheapest pair first, until there are few enough."""
    units = list(units)
    while len(units) > MOST:
        costs = [a.forward + a.backward + b.forward + b.backward for a, b in itertools.pairwise(units)]
        i = costs.index(min(costs))
        units[i : i + 2] = [units[i] + units[i + 1]]
    return units
