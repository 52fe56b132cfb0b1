"""The layouts of a program as an assignment problem.

    node      a part of the program (corresponding nodes of repeated blocks are one); its strategies are its ways, priced by their work
    edge      from a value to a reader: the price of the route from the layout it is made in to the one it is read in
    tap       a value read more than once is read through a tap: brought to another layout once, and paid once. Its strategies are
              a layout, and whether the tap is the value itself, a copy for now, or a copy kept for the backward pass, which
              otherwise makes its own again
    claim     bytes of a value from when it is made until it is last read; of inputs always; of copies while they are read
    state     an edge from the value that becomes an input of the next step to that input

    rates     what runs once a step counts 1/m of m micro-batches; of communication that compute can hide, max(0, H - C) =
              max over 0 <= l <= 1 of l (H - C), a share l is charged: solutions at several l are ranked by the simulator

A block that repeats n times costs n times more, and an edge from one instance to the next joins the part to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.core.errors import PlanError
from weft.core.layout import R, S
from weft.core.node import Node, Type
from weft.core.program import Program
from weft.cost.memory import Lifetimes
from weft.cost.work import Work
from weft.ops.registry import Kind
from weft.ops.shape import concat_op, reshape_op
from weft.plan.assignment.problem import Floats, Problem, assemble
from weft.plan.layouts.moves import Placements, Prices
from weft.plan.layouts.strategies import Centre, Strategies, Strategy, may_pend
from weft.plan.roles import Roles

SELF, COPY, KEPT = "self", "copy", "kept"
Reader = tuple[Node, int]  # a node, and which of its operands
Allow = Callable[[Node, Strategy], bool]


@dataclass(frozen=True)
class Rates:
    """What counts for less than its price: the parts of a step that run once in `rounds` micro-batches, and communication of
    parameters and gradients, which may run overlapped with compute: `hide` is the share of it that is charged."""

    hide: float = 1.0
    rounds: int = 1
    as_used: bool = False  # parameters are laid out in the layout they are used in, never brought to another during the step


@dataclass(frozen=True)
class Tap:
    """One strategy of a tap: the layout it offers, and how it comes by it."""

    layout: Placements
    how: str


@dataclass
class Site:
    """One node of the assignment problem: ways of a part of the program, or strategies of a tap."""

    name: str
    ways: Sequence[Strategy]
    taps: Sequence[Tap]
    cost: Floats
    claims: list[tuple[int, int, Floats]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LayoutModel:
    """The problem, and which of its nodes decides each node of the program and each tap."""

    problem: Problem
    sites: Sequence[Site]
    site: Mapping[Node, int]
    taps: Mapping[tuple[Node, bool], int]  # (value, whether its readers are in the backward pass)


def build(
    program: Program,
    strategies: Strategies,
    prices: Prices,
    *,
    limit: float = math.inf,
    blocks: Sequence[Sequence[Instance]] = (),
    pins: Mapping[str, Sequence[Placements]] | None = None,
    centres: Mapping[Node, Centre] | None = None,
    rates: Rates | None = None,
    allow: Allow | None = None,
) -> LayoutModel:
    """The layouts problem of a one-device program on the mesh of `strategies`. `pins` are the layouts some inputs may have.

    With `centres`, only ways that differ from a node's own along one axis at most; with `allow`, only those of each node that it allows.
    """
    builder = _Builder(program, strategies, prices, limit, parts(program, blocks), pins or {}, centres or {}, rates or Rates(), allow)
    builder.place_nodes()
    builder.join_readers()
    builder.join_outputs()
    return builder.model()


class _Builder:
    def __init__(
        self,
        program: Program,
        strategies: Strategies,
        prices: Prices,
        limit: float,
        part: Mapping[Node, int],
        pins: Mapping[str, Sequence[Placements]],
        centres: Mapping[Node, Centre],
        rates: Rates,
        allow: Allow | None,
    ) -> None:
        self.program, self.ways, self.prices, self.limit = program, strategies, prices, limit
        self.part, self.pins, self.centres, self.allow = part, pins, centres, allow
        self.routes, self.work = strategies.routes(prices), Work(program, prices.chained)
        self.lifetimes = Lifetimes(program, joined=1)
        self.roles, self.rates = Roles(program), rates
        self.forward, self.joined = self.roles.forward, _joined(program)
        self.offered: dict[int, list[Placements]] = {}  # layouts a part could give its value, allowed or not
        self.sites: list[Site] = []
        self.site: dict[Node, int] = {}
        self.taps: dict[tuple[Node, bool], int] = {}
        self.edges: dict[tuple[int, int], Floats] = {}
        self._tap_sites: dict[Hashable, int] = {}
        self._tables: dict[Hashable, Floats] = {}

    def model(self) -> LayoutModel:
        claims = [(i, *claim) for i, site in enumerate(self.sites) for claim in site.claims]
        edges = [(u, v, table) for (u, v), table in self.edges.items()]
        problem = assemble([s.cost for s in self.sites], edges, claims, self.limit, self.program.name)
        return LayoutModel(problem, self.sites, self.site, self.taps)

    # -- nodes ----------------------------------------------------------------------------------------------------------------

    def place_nodes(self) -> None:
        by_part: dict[int, int] = {}
        pending: dict[Node, bool] = {}
        for node in self.program.nodes:
            waits = [pending[a] for a in node.args]
            pending[node] = may_pend(node, waits)
            if self.part[node] not in by_part:
                found = self._strategies_of(node, waits)
                self.sites.append(Site(node.op.name, found, (), np.zeros(len(found))))
                by_part[self.part[node]] = len(self.sites) - 1
            at = self.site[node] = by_part[self.part[node]]
            self.sites[at].cost = self.sites[at].cost + self._work(node) * self._share(node) + self._oddness(node)
            for index, type_ in enumerate(node.types):
                span = self.lifetimes.of(node, index)
                if span is not None:
                    self._claim(at, span, [_bytes(type_) * self.routes.share(w.results[index]) for w in self._ways(node)])

    def _ways(self, node: Node) -> Sequence[Strategy]:
        return self.sites[self.site[node]].ways

    def _made(self, node: Node) -> list[Placements]:
        return [w.results[0] for w in self._ways(node)]

    def _strategies_of(self, node: Node, waits: Sequence[bool]) -> tuple[Strategy, ...]:
        found = self._every_strategy(node, waits)
        self.offered[self.part[node]] = list(dict.fromkeys(w.results[0] for w in found))
        if self.allow is None or node.op.is_item:
            return found
        allowed = tuple(w for w in found if self.allow(node, w))
        if not allowed:
            raise PlanError(f"no layout of {node.op.name} is allowed", needed="one that is", found=f"{len(found)}, none of them allowed")
        return allowed

    def _every_strategy(self, node: Node, waits: Sequence[bool]) -> tuple[Strategy, ...]:
        if node in self.program.input_set:
            return self.ways.of_input(node, self.pins.get(node.attr("name")), self.centres.get(node), self.joined)
        if node.op.is_item:
            made = dict.fromkeys(w.results[node.attr("index")] for w in self._ways(node.args[0]))
            return tuple(Strategy((), (layout,), node) for layout in made)
        return self.ways.of_node(node, waits, [self.offered[self.part[a]] for a in node.args], self.centres.get(node))

    def _work(self, node: Node) -> Floats:
        """Work by way, which nodes of any program share that have the same ways and the same neighbours."""
        strategies = self._ways(node)

        def work() -> Floats:
            return np.array([self.prices.work(self.work.of(node, w.node), w.node) for w in strategies])

        if node.op.kind is Kind.SOURCE or (node.op.kind is Kind.VIEW and len(node.args) < 2):
            return np.zeros(len(strategies))
        return self.routes.known(strategies, self.work.context(node), work)

    def _share(self, reader: Node, value: Node | None = None) -> float:
        """The share of a price that counts: of a node's work, or of bringing a value to it."""
        once = 1 / self.rates.rounds if reader in self.roles.after else 1.0
        if self.rates.as_used and value is not None and value in self.roles.given and reader not in self.roles.updates:
            return math.inf
        hides = value is not None and (value in self.roles.given or reader in self.roles.updates)
        return once * (self.rates.hide if hides else 1.0)

    def _oddness(self, node: Node) -> Floats:
        """Next to nothing, and less for what is replicated or sharded along early dims, so that equals are always decided the same."""
        return self._table(("odd", self.site[node]), lambda: self.routes.trifle * np.array([_odd(w) for w in self._ways(node)]))

    def _claim(self, at: int, span: tuple[int, int], usage: Sequence[float]) -> None:
        if math.isfinite(self.limit) and span[0] < span[1]:
            self.sites[at].claims.append((*span, np.array(usage)))

    # -- reading --------------------------------------------------------------------------------------------------------------

    def join_readers(self) -> None:
        """Join every value to its readers, through taps where it is read more than once."""
        for node in self.program.nodes:
            readers = [(u, k) for u in self.program.users[node] for k, a in enumerate(u.args) if a is node]
            if len(node.types) > 1:
                for u, _ in readers:
                    self._item(node, u)
            elif len(readers) < 2 or math.prod(node.shape) == 1:
                for u, k in readers:
                    self._join(node, u, k)
            else:
                early = [r for r in readers if r[0] in self.forward]
                late = [r for r in readers if r[0] not in self.forward]
                first = self._tap(node, early, SELF, COPY, *([KEPT] if late else [])) if early else None
                if late:
                    second = self._tap(node, late, SELF, COPY, *([KEPT] if early else []))
                    if first is not None:
                        self._keep(node, first, second, late)

    def _item(self, node: Node, item: Node) -> None:
        """One of several results: it has the layout it was made in."""
        made, made_of = [w.results[item.attr("index")] for w in self._ways(node)], self._made(item)
        self._edge(self.site[node], self.site[item], _equal(made, made_of))

    def _join(self, node: Node, reader: Node, k: int) -> None:
        u, v, size = self.site[node], self.site[reader], _bytes(node.type)
        table = self._table(("join", u, v, k), lambda: self.routes.between(self._made(node), self._wanted(reader, k), size))
        self._edge(u, v, _scaled(table, self._share(reader, node)))

    def _wanted(self, reader: Node, k: int) -> list[Placements]:
        return [w.operands[k] for w in self._ways(reader)]

    def _tap(self, node: Node, readers: Sequence[Reader], *hows: str) -> int:
        """A tap for these readers, which comes by its layout in one of these ways."""
        size, late = _bytes(node.type), readers[0][0] not in self.forward
        key = (self.site[node], late, hows, tuple((self.site[u], k) for u, k in readers))
        if key not in self._tap_sites:
            layouts = dict.fromkeys(p for u, k in readers for p in self._wanted(u, k))
            offers = [Tap(layout, how) for how in hows for layout in layouts]
            self.sites.append(Site("tap", (), offers, np.zeros(len(offers))))
            self._tap_sites[key] = len(self.sites) - 1
        at = self.taps[node, late] = self._tap_sites[key]
        taps = self.sites[at].taps
        comes = self._table((key, "in"), lambda: self._into(self._made(node), taps, size, late))
        self._edge(self.site[node], at, _scaled(comes, max(self._share(u, node) for u, _ in readers)))
        for u, k in readers:
            self._edge(at, self.site[u], _scaled(self._out(key, [t.layout for t in taps], u, k, size), self._share(u, node)))
        times = [self.lifetimes.time[u] for u, _ in readers]
        copied = (COPY,) if late else (COPY, KEPT)
        self._claim(at, (min(times), max(times) + 1), [size * self.routes.share(t.layout) * (t.how in copied) for t in taps])
        return at

    def _out(self, key: Hashable, offered: Sequence[Placements], reader: Node, k: int, size: float) -> Floats:
        return self._table((key, "out", self.site[reader], k), lambda: self.routes.between(offered, self._wanted(reader, k), size))

    def _into(self, made: Sequence[Placements], taps: Sequence[Tap], size: float, late: bool) -> Floats:
        """What a tap costs: nothing where it is the value itself, or a copy kept before."""
        layouts = [t.layout for t in taps]
        table, same = self.routes.between(made, layouts, size), _equal(made, layouts)
        hows = np.array([t.how for t in taps])
        return np.where(hows == SELF, same, np.where((hows == KEPT) & late, 0.0, table))

    def _keep(self, node: Node, first: int, second: int, late: Sequence[Reader]) -> None:
        """The backward pass may read a copy that the forward pass kept, in the layout it was kept in."""
        before, after = self.sites[first].taps, self.sites[second].taps
        kept = np.array([t.how == KEPT for t in before])[:, None] & (_equal([t.layout for t in before], [t.layout for t in after]) == 0)
        asks = np.array([t.how == KEPT for t in after])
        self._edge(first, second, np.where(asks & ~kept, np.inf, 0.0))
        start = max(self.lifetimes.time[u] for u in self.program.users[node] if u in self.forward) + 1
        stop = max(self.lifetimes.time[u] for u, _ in late) + 1
        size = _bytes(node.type)
        self._claim(first, (start, stop), [size * self.routes.share(t.layout) * (t.how == KEPT) for t in before])

    # -- leaving --------------------------------------------------------------------------------------------------------------

    def join_outputs(self) -> None:
        """State returns to the layout it is kept in; all else leaves replicated."""
        state = dict(self.program.state)
        for name, node in self.program.outputs:
            made, size, at = self._made(node), _bytes(node.type), self.site[node]
            home = self.program.input_names.get(state.get(name, ""))
            if home is not None:
                once = self.rates.hide / self.rates.rounds if node in self.roles.after else 1.0
                self._edge(at, self.site[home], _scaled(self.routes.between(made, self._made(home), size), once))
            else:
                full = tuple(R for _ in self.routes.mesh.axes)
                self.sites[at].cost = self.sites[at].cost + self.routes.between(made, [full], size)[:, 0]

    def _edge(self, u: int, v: int, table: Floats) -> None:
        """Edges between the same two parts add up; from a part to itself they fall on its own choice."""
        if u == v:
            self.sites[u].cost = self.sites[u].cost + np.diagonal(table)
        elif (v, u) in self.edges:
            self.edges[v, u] = self.edges[v, u] + table.T
        else:
            self.edges[u, v] = self.edges[u, v] + table if (u, v) in self.edges else table

    def _table(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]


def _joined(program: Program) -> dict[int, int]:
    """Sizes of dims in which a reshape joins parts that a concat laid side by side, and the size of a part."""
    found: dict[int, int] = {}
    for n in (n for n in program.nodes if n.op is reshape_op):
        (x,) = n.args
        for d in range(min(n.ndim, x.ndim - 1)) if x.op is concat_op else ():
            if x.shape[:d] == n.shape[:d] and x.attr("dim") == d and n.shape[d] == x.shape[d] * x.shape[d + 1]:
                found[n.shape[d]] = x.shape[d + 1]
    return found


def _equal(a: Sequence[Placements], b: Sequence[Placements]) -> Floats:
    """Zero where layouts are the same, infinity elsewhere."""
    numbers = {layout: i for i, layout in enumerate(dict.fromkeys((*a, *b)))}
    rows, columns = np.array([numbers[x] for x in a]), np.array([numbers[x] for x in b])
    return np.where(rows[:, None] == columns, 0.0, np.inf)


def _scaled(table: Floats, share: float) -> Floats:
    if math.isinf(share):
        return np.where(table > 0, np.inf, 0.0)
    return table if share == 1.0 else table * share


def _odd(strategy: Strategy) -> int:
    return sum(1 + p.dim for layout in (*strategy.operands, *strategy.results) for p in layout if isinstance(p, S))


def _bytes(type_: Type) -> float:
    return float(math.prod(type_.shape) * type_.dtype.itemsize)


# -- corresponding nodes of repeated blocks, which one choice serves: tying only ever forgoes choices

ROUNDS = 3


class Instance(Protocol):
    """Where a block stands in a program."""

    @property
    def parameters(self) -> tuple[Node, ...]: ...

    @property
    def nodes(self) -> tuple[Node, ...]: ...


def parts(program: Program, blocks: Sequence[Sequence[Instance]]) -> dict[Node, int]:
    """A number for the part each node plays; without blocks every node plays its own. Nodes of equal place in instances of a block correspond; all
    others, the gradients of a block among them, are told apart by op and shapes, then by the parts their operands and readers play, a few rounds over."""
    if not blocks:
        return {n: i for i, n in enumerate(program.nodes)}
    placed = _placed(program, blocks)
    part: Mapping[Node, object] = {n: placed.get(n, _looks(n)) for n in program.nodes}
    for _ in range(ROUNDS):
        seen = {n: placed.get(n, (part[n], *(part[a] for a in n.args), _readers(program, part, n))) for n in program.nodes}
        part = _numbered(program, seen)
    return _numbered(program, part)


def _placed(program: Program, blocks: Sequence[Sequence[Instance]]) -> dict[Node, object]:
    """Nodes by their place in the outermost block they belong to."""
    placed: dict[Node, object] = {}
    for b, instances in sorted(enumerate(blocks), key=lambda item: -max(len(i.nodes) for i in item[1])):
        for instance in instances:
            for i, n in enumerate((*instance.parameters, *instance.nodes)):
                if n in program.node_set:
                    placed.setdefault(n, ("block", b, i))
    return placed


def _looks(node: Node) -> object:
    attrs = tuple((k, str(v)) for k, v in node.attrs if k not in ("site", "name", "mesh"))
    return node.op.name, attrs, tuple((t.shape, str(t.dtype)) for t in node.types)


def _readers(program: Program, part: Mapping[Node, object], node: Node) -> tuple[object, ...]:
    return tuple(sorted({str(part[u]) for u in program.users[node]}))


def _numbered(program: Program, keys: Mapping[Node, object]) -> dict[Node, int]:
    numbers: dict[object, int] = {}
    return {n: numbers.setdefault(keys[n], len(numbers)) for n in program.nodes}
