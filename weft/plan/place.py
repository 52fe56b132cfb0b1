"""A program written for one device, placed on a mesh: layouts of its inputs are given, the rest follows op by op.

For every op and every mesh axis the candidates are: all operands replicated; shard the label some operand is already sharded along; let a
partial sum pass, where the op is linear in it. The cheapest in bytes moved is taken, and whatever an operand lacks is
brought by explicit communication. State leaves in the layout it came in, so storing optimizer state in slices makes a
step ZeRO-1, and storing parameters in slices makes it ZeRO-3; no rule says so. Operands held by different ranks of an axis (O)
are sent to one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Layout, Mesh, O, P, Placement, R, Replicated, S
from weft.core.node import Node, Type, make
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.ops.comm import reshard
from weft.ops.fill import is_sharded
from weft.ops.registry import ONE, Equation, Kind, arg_sets, nbytes
from weft.ops.shape import optimization_barrier
from weft.ops.source import input_in_layout
from weft.plan.roles import Roles

Placements = Mapping[str, Placement]
Choose = Callable[[str, Type], Placements]


@dataclass(frozen=True)
class PlacingOptions:
    """`scatter` are axes along which a partial sum that must be done may leave its value sharded (sequence parallelism).

    `turn` are axes along which an op kept in one piece that would have to gather, as attention does its keys, is sharded along another dim
    instead, its operands brought there and its results back by all_to_all (context parallelism over heads).
    `gather` are axes along which parameters are gathered wherever they are computed with, however small what they meet is.
    """

    scatter: frozenset[str] = frozenset()
    scatter_dim: int = -2
    turn: frozenset[str] = frozenset()
    gather: frozenset[str] = frozenset()
    in_order: bool = False  # every sum is done where it is made, by the op that one process runs: none passes through ops, none is done in parts


@dataclass
class _AxisStrategy:
    """How one axis holds the operands of an op, and what bringing them there moves."""

    places: tuple[Placement, ...]
    cost: float


_taken: dict[Hashable, tuple[Layout, ...]] = {}  # layouts of operands that were taken, by all they depend on
MOST_TAKEN = 1 << 16


def _remember(key: Hashable, strategies: tuple[Layout, ...]) -> None:
    if len(_taken) >= MOST_TAKEN:
        _taken.clear()
    _taken[key] = strategies


def place(program: Program, mesh: Mesh, inputs: Mapping[str, Placements], options: PlacingOptions | None = None, **more: Any) -> Program:
    """The program on the mesh; `more` is as `placed_with` takes it."""
    return placed_with(program, mesh, inputs, options, **more)[0]


def placed_with(
    program: Program,
    mesh: Mesh,
    inputs: Mapping[str, Placements],
    options: PlacingOptions | None = None,
    *,
    outputs: Mapping[str, Placements] | None = None,
    arrivals: Mapping[str, Placements] | None = None,
    made: Mapping[Node, Node] | None = None,
) -> tuple[Program, Mapping[Node, Node]]:
    """The program on the mesh, and what became of each of its nodes. Inputs not named are replicated; nodes in `made` are placed already.

    Outputs named in `outputs` are laid out as said there and, along other axes, as they are; others are replicated or as their state.
    Inputs named in `arrivals` are first brought to other placements, such as a value that was sent in slices.
    """
    placer = _Placer(program, mesh, inputs, options or PlacingOptions(), outputs or {}, arrivals or {}, made or {})
    placed = remake(program, mesh, placer.made, placer._input, placer._node, placer._output)
    return placed, placer.made


def remake(
    program: Program, mesh: Mesh, made: dict[Node, Node], input_: Callable[[Node], Node], node: Callable[[Node], Node],
    output: Callable[[str, Node], Node | None] = lambda name, node: None,
) -> Program:  # fmt: skip
    """The program anew on the mesh, node by node; `made` is filled with what became of each. An output of which `output` says nothing is laid out as
    its state, or replicated."""
    inputs = [input_(n) for n in program.inputs]
    for n in program.nodes:
        if n not in made:
            made[n] = node(n)
    state = dict(program.state)

    def given(name: str, n: Node) -> Node:
        home = program.input_names.get(state.get(name, ""))
        return reshard(made[n], made[home].layout if home is not None else Layout.of(mesh, n.shape))  # type: ignore[no-any-return]

    outputs = {name: output(name, n) or given(name, n) for name, n in program.outputs}
    lines = {made[n]: line for n, line in program.lines.items() if n in made}
    return new_program(program.name, mesh, inputs, outputs, state=program.state, lines=lines)


def rebuilt(program: Program, node: Callable[[Node, tuple[Node, ...]], Node], made: dict[Node, Node] | None = None) -> Program:
    """The program on the inputs it has, each node as `node` makes it of what became of its operands; `made` is filled with these."""
    made = {} if made is None else made
    made |= {n: n for n in program.inputs}
    return remake(program, program.mesh, made, lambda n: n, lambda n: node(n, tuple(made[a] for a in n.args)), lambda name, n: made[n])


class _Placer:
    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        inputs: Mapping[str, Placements],
        options: PlacingOptions,
        outputs: Mapping[str, Placements],
        arrivals: Mapping[str, Placements],
        made: Mapping[Node, Node],
    ) -> None:
        unknown = [n for n in inputs if n not in program.input_names]
        if unknown:
            raise PlanError(
                f"{program.name} has no input {unknown[0]!r}",
                needed=f"one of {', '.join(list(program.input_names)[:8])} ...",
                found=unknown[0],
            )
        self.program, self.mesh, self.options = program, mesh, options
        self.inputs, self.outputs, self.arrivals = inputs, outputs, arrivals
        self.made = dict(made)
        self.home: dict[Node, list[Layout]] = {}  # where the results of an op that was turned belong
        self.alone: set[Node] = set()  # parameters, and what is made of one alone
        self.done: dict[Node, Node] = {}  # partial sums of activations, and what was made of them for one reader: the others take it too
        batch = [node.attr("name") for node in program.inputs if node.role is Role.BATCH]
        self.inner = {axis for axis in mesh.axes if not any(isinstance(inputs.get(name, {}).get(axis), S) for name in batch)}
        self._inner = frozenset(self.inner)
        self.after = Roles(program).after if options.gather else frozenset[Node]()

    def _input(self, node: Node) -> Node:
        name = node.attr("name")
        try:
            layout = Layout.of(self.mesh, node.shape, self.inputs.get(name, {}))
        except LayoutError as e:
            raise PlanError(f"input {name!r} cannot have this layout", needed=e.needed, found=e.found or str(self.inputs[name])) from e
        new = input_in_layout(node, layout)
        self.made[node] = reshard(new, Layout.of(self.mesh, node.shape, self.arrivals[name])) if name in self.arrivals else new
        return new

    def _output(self, name: str, node: Node) -> Node | None:
        value = self.made[node]
        if name not in self.outputs:
            return None
        return reshard(value, Layout.of(self.mesh, node.shape, {**value.layout.placements, **self.outputs[name]}))  # type: ignore[no-any-return]

    # -- one node --------------------------------------------------------------------------------------------------------------

    def _operands(self, node: Node) -> list[Node]:
        """Operands as they are; parameters replicated along the axes of `gather`, unless this is their update."""
        if len(node.args) == 1 and (node.args[0] in self.alone or node.args[0].role is Role.PARAMETER):
            self.alone.add(node)
            return [self.made[node.args[0]]]
        args = [self.made[a] for a in node.args]
        if self.options.gather and node not in self.after:
            args = [self._gathered(new) if a in self.alone or a.role is Role.PARAMETER else new for a, new in zip(node.args, args, strict=True)]
        return [self.done.get(a, a) for a in args]

    def _gathered(self, value: Node) -> Node:
        places = {axis: p for axis, p in value.layout.placements.items() if axis not in self.options.gather}
        return reshard(value, Layout.of(self.mesh, value.shape, places))  # type: ignore[no-any-return]

    def _node(self, node: Node) -> Node:
        args = self._operands(node)
        attrs = {k: self.mesh.key if k == "mesh" else v for k, v in node.attrs}
        if len(args) == 1 and len(args[0].types) > 1:
            item = make(node.op, tuple(args), attrs)
            return reshard(item, self.home[args[0]][node.attr("index")]) if args[0] in self.home else item
        for axis in self.options.turn:
            resharded = self._resharded(axis, node, args, attrs)
            if resharded is not None:
                return resharded
        key = self._layout_key(node, args)
        taken = _taken.get(key) if key is not None else None
        for strategies in (taken,) if taken is not None else self._candidates(node, args):
            try:
                moved = [reshard(a, w) for a, w in zip(args, strategies, strict=True)]
                new = _applied(node, moved, attrs)
            except (TypeMismatch, LayoutError):
                continue
            if key is not None and taken is None:
                _remember(key, tuple(strategies))
            self.done |= {a: b for a, b in zip(args, moved, strict=True) if _partial_axes(a) and _partial_axes(a) <= self.inner and not _partial_axes(b)}
            return new
        raise PlanError(
            f"{node.op.name} cannot be placed",
            needed="a layout its rule accepts",
            found=", ".join(str(a.type) for a in args),
            where=self.program.lines.get(node),
        )

    def _layout_key(self, node: Node, args: Sequence[Node]) -> Hashable:
        """All that the layouts of a node's operands depend on: nodes with the same, of this program and others, are laid out the same. None of
        those that go by where their result ends."""
        if any(a.op.kind is Kind.SOURCE and not a.op.is_input and a.ndim for a in node.args):
            return None
        of_state = tuple(a in self.alone or a.role is Role.PARAMETER for a in node.args)
        shared = tuple(self._readers(a) > 1 for a in node.args)
        return self.options, self._inner, node.op, node.attrs, tuple(a.types for a in args), of_state, shared

    def _resharded(self, axis: str, node: Node, args: Sequence[Node], attrs: dict[str, Any]) -> Node | None:
        """The op sharded along another of its dims, where it would have to gather along the axis."""
        if node.op.kind is not Kind.COMPOSITE or node.op.equation is None:
            return None
        eq = node.op.equation(tuple(a.type for a in args), dict(node.attrs))
        here = [a.type.on(axis) for a in args]
        seq = {eq.label(k, p.dim) for k, p in enumerate(here) if isinstance(p, S)}
        if not seq or min(w.cost for w in self._ways(axis, node, eq, args)) == 0:
            return None
        for label in _other_labels(eq, seq):
            try:
                new = make(node.op, tuple(reshard(a, _moved(a.layout, axis, eq.ins[k], {label})) for k, a in enumerate(args)), attrs)
                home = [_moved(t.layout, axis, out, seq) for t, out in zip(new.types, eq.outs, strict=True)]
            except (TypeMismatch, LayoutError):
                continue
            self.home[new] = home
            return new if len(home) > 1 else reshard(new, home[0])
        return None

    def _candidates(self, node: Node, args: Sequence[Node]) -> Iterable[list[Layout]]:
        """Layouts to bring the operands to, the likeliest first, all replicated last."""
        if all(isinstance(p, Replicated) for a in args for p in a.layout.placements.values()):
            yield [a.layout for a in args]
            return
        if node.op.equation is not None:
            eq = node.op.equation(tuple(a.type for a in args), dict(node.attrs))
            per_axis = [self._ways(axis, node, eq, args) for axis in self.mesh.axes]
            for combo in itertools.islice(_cheapest_first(per_axis), 24):
                layouts = _layouts(self.mesh, args, combo)
                if layouts is not None:
                    yield layouts
        else:
            yield from self._gathered_one_by_one(node, args)
        yield [Layout.of(self.mesh, a.shape, {x: p for x, p in a.layout.partials if isinstance(p, O)}) for a in args]
        yield [Layout.of(self.mesh, a.shape) for a in args]

    def _gathered_one_by_one(self, node: Node, args: Sequence[Node]) -> Iterable[list[Layout]]:
        """As they are, then with shards taken away from the innermost axis on. A sum still due is done before it grows, and where others wait for it."""
        grows = [math.prod(node.types[0].shape) > math.prod(a.shape) for a in args]
        awaited = [not node.op.is_tuple and self._awaited(a, n) for a, n in zip(args, node.args, strict=True)]
        layouts = [_summed(a.layout) if larger or wait else a.layout for a, larger, wait in zip(args, grows, awaited, strict=True)]
        yield layouts
        for axis in reversed(self.mesh.axes):
            layouts = [lay.gather(axis) if lay.where_sharded(axis) is not None else lay for lay in layouts]
            yield layouts

    def _awaited(self, value: Node, node: Node) -> bool:
        """Whether several ops wait for a sum of activations, which none of them leaves sharded."""
        return self._readers(node) > 1 and bool(_partial_axes(value)) and _partial_axes(value) <= self.inner - self.options.scatter

    def _readers(self, node: Node) -> int:
        """How many ops compute with a value: a barrier waits for it, or passes it on."""
        users = self.program.users[node]
        passed = [i for u in users if u.op is optimization_barrier for i in self.program.users[u] if u.args[i.attr("index")] is node]
        return sum(u.op is not optimization_barrier for u in users) + sum(map(self._readers, passed))

    def _ways(self, axis: str, node: Node, eq: Equation, args: Sequence[Node]) -> list[_AxisStrategy]:
        """Every way the axis may hold the operands, cheapest first."""
        n = self.mesh.size(axis)
        here = [a.type.on(axis) for a in args]
        if any(isinstance(h, O) for h in here):
            return _at_one_root(here, args, n)
        if all(isinstance(h, Replicated) for h in here):
            return [_AxisStrategy(tuple(here), 0.0)]
        strategies = [_way(tuple(R for _ in args), here, args, axis, n, gathering=True)]
        labels = dict.fromkeys(eq.label(k, p.dim) for k, p in enumerate(here) if isinstance(p, S))
        for label in labels:
            if label != ONE and (label not in eq.unsharded or node.op.across and not self.options.in_order):
                strategies.append(_way(_sharded_places(eq, label, here, args), here, args, axis, n))
        wanted = self._wanted(axis, node, eq) if axis in self.inner else []
        strategies = [_way(_sharded_places(eq, label, here, args), here, args, axis, n) for label in wanted] + strategies
        if wanted or axis in self.options.scatter:
            strategies = [_AxisStrategy(w.places, w.cost + self._later(w, node, eq, here, n)) for w in strategies]
        pending = frozenset(k for k, p in enumerate(here) if isinstance(p, P))
        for s in arg_sets(node.op.linear, len(args)):
            if s and s <= pending and not self.options.in_order:
                passed = _way(tuple(P() if k in s else R for k in range(len(args))), here, args, axis, n)
                strategies.append(_AxisStrategy(passed.places, passed.cost + self._swollen(axis, node, [args[k] for k in s]) + self._due(axis, node, s, args)))
        if axis in self.options.scatter and pending and not labels:
            strategies += self._scattered(eq, pending, here, args, axis, n)
        return sorted(strategies, key=lambda w: w.cost)

    def _later(self, strategy: _AxisStrategy, node: Node, eq: Equation, here: Sequence[Placement], n: int) -> float:
        """What a way costs further on: a result that is a partial sum is reduced, and weights that were sharded on purpose are not gathered."""
        lost = any(isinstance(p, S) and eq.label(k, p.dim) not in eq.outs[0] for k, p in enumerate(strategy.places))
        bared = any(isinstance(h, S) and p != h and (a in self.alone or a.role is Role.PARAMETER)
                    for h, p, a in zip(here, strategy.places, node.args, strict=True))  # fmt: skip
        size = math.prod(node.types[0].shape) * node.types[0].dtype.itemsize
        return (math.inf if bared else 0.0) + (_move(P(), S(0), size, n) if lost else 0.0)

    def _swollen(self, axis: str, node: Node, pending: Sequence[Node]) -> float:
        """Bytes that a sum still due moves after an op that makes it larger; 0 after others. A cast to a wider dtype does so too, but to
        gradients that copies sum, where it says in what they are summed."""
        inner = axis in self.inner
        size = [math.prod(t.shape) * (t.dtype.itemsize if inner else 1) for a in (node, *pending) for t in a.types[:1]]
        grown = size[0] / max(1, sum(size[1:]))
        return _move(P(), R, sum(nbytes(a.type) for a in pending) * (grown if inner else grown - 1), self.mesh.size(axis)) if grown > 1 else 0.0

    def _due(self, axis: str, node: Node, pending: Iterable[int], args: Sequence[Node]) -> float:
        """What it costs to let sums of activations pass that other readers wait for as well: each would reduce them for itself."""
        shared = [args[k] for k in pending if axis in self.inner and self._readers(node.args[k]) > 1]
        return sum(2 * _move(P(), R, nbytes(a.type), self.mesh.size(axis)) for a in shared)

    def _wanted(self, axis: str, node: Node, eq: Equation) -> list[str]:
        """A dim of an operand that any rank makes for itself, such as the rows of a table's gradient, sharded as the state it leads to is."""
        free = [k for k, a in enumerate(node.args) if a.op.kind is Kind.SOURCE and not a.op.is_input and a.ndim]
        labels = [x for k in free for x in eq.ins[k] if x in eq.outs[0] and x not in eq.unsharded]
        home = self._home(node) if labels and len(node.types) == 1 else None
        place = home.placement(axis) if home is not None and axis in home.mesh.axes else R
        return [eq.outs[0][place.dim]] if isinstance(place, S) and place.within is None and eq.outs[0][place.dim] in labels else []

    def _home(self, node: Node) -> Layout | None:
        """The layout of the state, or of the output, that a gradient ends in, where it goes through values of its own shape alone."""
        seen, todo, state = {node}, [node], dict(self.program.state)
        while todo:
            n = todo.pop()
            for name in self.program.outputs_of(n):
                if name in self.outputs:
                    return Layout.of(self.mesh, node.shape, self.outputs[name])
                if name in state:
                    return self.made[self.program.input_names[state[name]]].layout
            more = [u for u in self.program.users[n] if u not in seen and any(t.shape == node.shape for t in u.types)]
            seen |= set(more)
            todo += more
        return None

    def _scattered(
        self, eq: Equation, pending: frozenset[int], here: Sequence[Placement], args: Sequence[Node], axis: str, n: int
    ) -> list[_AxisStrategy]:
        k = min(pending)
        dim = self.options.scatter_dim % max(args[k].ndim, 1) if args[k].ndim >= 2 else -1
        if dim < 0 or args[k].shape[dim] < n:
            return []
        label = eq.label(k, dim)
        kept = label not in eq.unsharded and label != ONE and label in eq.outs[0]
        return [_way(_sharded_places(eq, label, here, args), here, args, axis, n)] if kept else []


def _applied(node: Node, args: Sequence[Node], attrs: dict[str, Any]) -> Node:
    """The op on these operands, or what stands for it where a dim is sharded that it needs in full."""
    if node.op.across is not None and node.op.equation is not None:
        eq = node.op.equation(tuple(a.type for a in args), dict(node.attrs))
        if any(label in eq.unsharded and is_sharded(a, d) for a, labels in zip(args, eq.ins, strict=True) for d, label in enumerate(labels)):
            return node.op.across(*args, **attrs)  # type: ignore[no-any-return]
    return make(node.op, tuple(args), attrs)


def _partial_axes(value: Node) -> set[str]:
    """Axes along which a sum is due."""
    return {axis for axis, p in value.layout.partials if isinstance(p, P)} if len(value.types) == 1 else set()


def _other_labels(eq: Equation, seq: set[str]) -> list[str]:
    """Dims that every result and every operand without stretched dims has, the innermost first."""
    large = [labels for labels in eq.ins if labels and ONE not in labels]
    kept = [x for x in reversed(eq.outs[0]) if x not in eq.unsharded and x not in seq]
    return [x for x in kept if all(x in labels for labels in (*eq.outs, *large))]


def _moved(layout: Layout, axis: str, labels: Sequence[str], onto: set[str]) -> Layout:
    """The axis taken from where it shards and put on the dim of one of some labels, if there is one; parts must be equal."""
    dim = next((d for d, x in enumerate(labels) if x in onto), None)
    layout = layout.gather(axis) if dim is None else layout.gather(axis).shard(axis, dim)
    if not layout.is_even:
        raise LayoutError("parts that differ in size", needed="equal parts", found=str(layout))
    return layout


def _at_one_root(here: Sequence[Placement], args: Sequence[Node], n: int) -> list[_AxisStrategy]:
    """What several ranks hold, or have still to sum, sent to one of them, or to all."""
    roots = dict.fromkeys(h for h in here if isinstance(h, O))
    size = [0 if isinstance(h, Replicated) else nbytes(a.type) for h, a in zip(here, args, strict=True)]
    strategies = [
        _AxisStrategy(tuple(h if isinstance(h, Replicated) else r for h in here), sum(s for h, s in zip(here, size, strict=True) if h != r)) for r in roots
    ]
    return sorted([*strategies, _AxisStrategy(tuple(R for _ in here), sum(size) * (n - 1))], key=lambda w: w.cost)


def _sharded_places(eq: Equation, label: str, here: Sequence[Placement], args: Sequence[Node]) -> tuple[Placement, ...]:
    """Every operand with the label sharded along it, as the one that already is; the others replicated."""
    within = next((p.within for k, p in enumerate(here) if isinstance(p, S) and eq.label(k, p.dim) == label), None)
    dims = dict(eq.dims_of(label))
    return tuple(S(dims[k], within) if k in dims else R for k in range(len(args)))


def _way(places: tuple[Placement, ...], here: Sequence[Placement], args: Sequence[Node], axis: str, n: int, gathering: bool = False) -> _AxisStrategy:
    """Bytes to bring the operands there, and, as a tie-break, work done on every rank the same when nothing is sharded."""
    cost = sum(_move(h, p, nbytes(a.type), n) for h, p, a in zip(here, places, args, strict=True))
    return _AxisStrategy(places, cost + (0.01 if gathering and any(not isinstance(h, Replicated) for h in here) else 0.0))


def _summed(layout: Layout) -> Layout:
    return Layout.of(layout.mesh, layout.shape, {axis: p for axis, p in layout.placements.items() if not isinstance(p, P)})


def _move(here: Placement, there: Placement, nbytes: float, n: int) -> float:
    """Bytes on the wire per rank for one operand, from what it holds now."""
    if here == there or isinstance(here, Replicated):
        return 0.0
    if isinstance(here, S):
        return nbytes * (n - 1) if isinstance(there, Replicated) else nbytes * (n - 1) / n
    return nbytes * (n - 1) / n * (2 if isinstance(there, Replicated) else 1)


def _cheapest_first(per_axis: Sequence[Sequence[_AxisStrategy]]) -> Iterable[tuple[_AxisStrategy, ...]]:
    """Each axis's ways are sorted, so the first of each together are the cheapest; the others are put in order where these do not do."""
    yield tuple(strategies[0] for strategies in per_axis)
    combos = list(itertools.islice(itertools.product(*per_axis), 4096))
    yield from sorted(combos, key=lambda c: sum(w.cost for w in c))[1:]


def _layouts(mesh: Mesh, args: Sequence[Node], combo: Sequence[_AxisStrategy]) -> list[Layout] | None:
    out = []
    for k, a in enumerate(args):
        places = {axis: strategy.places[k] for axis, strategy in zip(mesh.axes, combo, strict=True)}
        try:
            out.append(Layout.of(mesh, a.shape, places))
        except LayoutError:
            return None
    return out
