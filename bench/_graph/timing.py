"""When each node of a placed program runs, and how long its step takes on one rank.

    compute     one node after another in the order of `roles`, each when its operands are there
    collective  from when its operand is there and its link is free; waited for where it is first read, or at once where the
                system lets nothing of its kind run overlapped with compute
    parameters  gathered one ahead of where they are needed, as they are used
    gradients   sent in buckets that grow as those do that are run

A step of m micro-batches is m - 1 passes without what is done once (gradients, updates) and one with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bench._graph.roles import GRADS, PARAMS, SPREAD, RunRoles
from weft.cluster.spec import Cluster
from weft.core.node import Node
from weft.core.program import Program
from weft.cost.memory import Lifetimes, needed
from weft.cost.price import Costs, compiles, on_mesh
from weft.cost.walk import Phase, Walk, combine
from weft.cost.work import Collective, Op, Work
from weft.ops.comm import is_comm
from weft.ops.registry import Kind, nbytes
from weft.schedule.verbs import BUCKET, FIRST, is_full

SLICES = ("slice", "turn")  # change the layout of what is at hand; nothing is sent


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program on a mesh that fills a cluster, priced once for all the ways it may be run."""

    program: Program
    cluster: Cluster
    again: frozenset[str] = frozenset()  # inputs gathered anew for the backward pass, their copies dropped after the forward

    @cached_property
    def roles(self) -> RunRoles:
        return RunRoles(self.program)

    @cached_property
    def costs(self) -> Costs:
        return on_mesh(self.cluster, self.program.mesh)

    @cached_property
    def work(self) -> dict[Node, list[Op]]:
        """Records of every node that computes."""
        work = Work(self.program, compiles(self.cluster.device))
        return {n: work.of(n) for n in self.roles.order if not is_comm(n)}

    def collective(self, node: Node) -> Collective:
        size = nbytes(node.type) if node.op.name == "all_gather" else nbytes(node.args[0].type)
        return Collective(node.op.name, float(size), str(node.attr("axis")))

    def run(self, overlap: frozenset[str], once: bool) -> ProgramWalk:
        """One pass; `once`: with what is done once a step."""
        return ProgramWalk(self.costs, placed=self, overlap=overlap, once=once)

    def step(self, overlap: frozenset[str], rounds: int = 1) -> Phase:
        """A step of so many micro-batches, each of the program's own batch."""
        last = self.run(overlap, once=True).run()
        if rounds == 1:
            return last
        more = self.accumulated * 3 / self.cluster.device.bandwidth  # read both, write the sum
        return combine(last, 1.0, self.run(overlap, once=False).run() + Phase(more, {"compute": more}), rounds - 1.0)

    @cached_property
    def accumulated(self) -> float:
        """Bytes of gradients as they are before they are sent."""
        made = {a for u in self.roles.updates for a in u.args if a not in self.roles.given}
        sources = {_before_travel(self.roles, n) for n in made}
        return float(sum(nbytes(n.type) for n in sources if n.args and len(n.types) == 1))

    def memory(self, rounds: int = 1) -> float:
        """Bytes the busiest rank must have: state throughout, all else while it is read, and what the device keeps for itself."""
        return needed(self.peak + (self.accumulated if rounds > 1 else 0.0))

    @cached_property
    def peak(self) -> float:
        spans = Lifetimes(self.program, joined=1)
        order = [*self.program.inputs, *self.roles.order]
        spans.time = {n: t for t, n in enumerate(order)}
        change: dict[int, float] = defaultdict(float)
        for node in order:
            for index, type_ in enumerate(node.types):
                for start, stop in self._spans(spans, node, index):
                    change[start] += nbytes(type_)
                    change[stop] -= nbytes(type_)
        most = now = 0.0
        for t in sorted(change):
            now += change[t]
            most = max(most, now)
        return most

    def _spans(self, spans: Lifetimes, node: Node, index: int) -> list[tuple[int, int]]:
        """When a result takes memory; a copy that is made again is gone in between."""
        span = spans.of(node, index)
        if span is None:
            return []
        if not self.made_again(node):
            return [span]
        times = [(spans.time[u], u in self.roles.forward) for u in computing(self.program, node)]
        early, late = ([t for t, forward in times if forward is is_forward] for is_forward in (True, False))
        return [(span[0], max(early) + 1), (min(late), span[1])] if early and late else [span]

    def made_again(self, node: Node) -> bool:
        """Whether a collective's result is dropped after the forward pass and made anew for the backward pass."""
        return is_comm(node) and self._root(node) in self.again

    def _root(self, node: Node) -> str:
        while node.args and len(node.args) == 1:
            node = node.args[0]
        return str(node.attr("name")) if node in self.program.input_set else ""


def computing(program: Program, node: Node) -> set[Node]:
    """Who computes with a value, through collectives and views."""
    found, todo = set(), [node]
    while todo:
        for u in program.users[todo.pop()]:
            if is_comm(u) or u.op.kind is Kind.VIEW:
                todo.append(u)
            else:
                found.add(u)
    return found


def _before_travel(roles: RunRoles, node: Node) -> Node:
    while node in roles.only_updates and node.args:
        node = node.args[0]
    return node


@dataclass
class ProgramWalk(Walk):
    """One pass over the program."""

    placed: PlacedProgram = field(kw_only=True)
    overlap: frozenset[str] = field(kw_only=True)
    once: bool = field(kw_only=True)
    ready: dict[Node, float] = field(default_factory=dict)
    buckets: dict[tuple[str, str], list[Node]] = field(default_factory=lambda: defaultdict(list))
    most: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(lambda: float(FIRST)))  # bytes of the next bucket
    came: dict[Node, str] = field(default_factory=dict)
    spent: dict[Node, float] = field(default_factory=lambda: defaultdict(float))  # of the device's time, waiting included
    began: dict[Node, float] = field(default_factory=dict)

    def run(self) -> Phase:
        roles = self.placed.roles
        self.ahead = _Ahead(self.placed, [n for n in roles.order if is_comm(n) and roles.carried(n) == PARAMS])
        self.given = set(self.ahead.nodes)
        for i, node in enumerate(roles.order):
            if not self.once and (node in roles.after or node in roles.only_updates):
                continue
            began = self.now
            for comm in self.ahead.due(i):
                self.send(comm, PARAMS)
            if node in roles.after:
                self.flush()
            if not is_comm(node):
                self.compute(node)
            elif node not in self.given:
                self.send(node, roles.carried(node))
            self.spent[node] += self.now - began
        self.flush()
        self.wait("data", max([self.now, *self.links.values()]))
        return Phase(self.now, dict(self.causes), dict(self.hidden))

    def at(self, node: Node) -> float:
        return self.ready.get(node, 0.0)

    def compute(self, node: Node) -> None:
        for a in node.args:
            self.wait(self.came.get(a, "data"), self.at(a))
        self.began[node] = self.now
        for op in self.placed.work[node]:
            self.op(op)
        self.ready[node] = self.now
        views = [a for a in node.args if a in self.came] if node.op.kind is Kind.VIEW else []
        if views:
            self.came[node] = self.came[views[0]]

    def send(self, node: Node, carried: str) -> None:
        op = self.placed.collective(node)
        if node.op.name in SLICES:
            self.ready[node] = max(self.at(node.args[0]), 0.0)
            return
        if carried != GRADS:
            self._carry([node], op, carried)
            return
        key = op.kind, op.axis
        full = is_full(sum(self.placed.collective(n).bytes for n in self.buckets[key]), op.bytes, self.most[key])
        if full or any(a in self.buckets_open for a in node.args):
            self.flush()
        self.buckets[key].append(node)

    @property
    def buckets_open(self) -> set[Node]:
        return {n for bucket in self.buckets.values() for n in bucket}

    def flush(self) -> None:
        """Send what waits in buckets."""
        for key, nodes in self.buckets.items():
            if nodes:
                self._carry(nodes, Collective(key[0], sum(self.placed.collective(n).bytes for n in nodes), key[1]), GRADS)
                self.most[key] = min(2 * self.most[key], float(BUCKET))
        self.buckets.clear()

    def _carry(self, nodes: Sequence[Node], op: Collective, carried: str) -> None:
        name = op.kind.replace("_", " ") + (f" of {len(nodes)} tensors" if len(nodes) > 1 else "")
        self.issue(name, op)
        end = self.carry(replace(op, name=name), op.axis, max(self.host, *(self.at(a) for n in nodes for a in n.args)))
        self.began |= dict.fromkeys(nodes, end - self.costs.seconds(op))
        for n in nodes:
            self.ready[n], self.came[n] = end, op.axis
        if carried not in self.overlap and (carried != SPREAD or self.once):
            self.wait(op.axis, end)


class _Ahead:
    """Collectives of parameters, in the order their results are needed; each is sent when the one before is first used."""

    def __init__(self, placed: PlacedProgram, nodes: Sequence[Node]) -> None:
        place = {n: i for i, n in enumerate(placed.roles.order)}
        calls = []
        for n in nodes:
            users = computing(placed.program, n)
            passes = [users] if not placed.made_again(n) else [users & placed.roles.forward, users - placed.roles.forward]
            calls += [(min(place[u] for u in some), place[n], n) for some in passes if some]
        calls.sort(key=lambda call: call[:2])
        self.nodes, self.needed, self.sent = [n for *_, n in calls], [at for at, *_ in calls], 0

    def due(self, at: int) -> Sequence[Node]:
        """What is to be sent before the node at this place runs: all it needs, and the next one ahead of it."""
        start = self.sent
        while self.sent < len(self.nodes) and (self.needed[self.sent] <= at or self.sent == 0 or self.needed[self.sent - 1] <= at):
            self.sent += 1
        return self.nodes[start : self.sent]
