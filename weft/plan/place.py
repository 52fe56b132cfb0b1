"""A program written for one device, placed on a mesh: layouts of its inputs are given, the rest follows op by op.

For every op and every mesh axis the candidates are: all operands whole; cut the label some operand is already cut along; let a
pending sum pass, where the op is linear in it. The cheapest in bytes moved is taken, and whatever an operand lacks is
brought by explicit communication. State leaves in the layout it came in, so storing optimizer state in slices makes a
step ZeRO-1, and storing parameters in slices makes it ZeRO-3; no rule says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Layout, Mesh, P, Placement, R, Replicated, S
from weft.core.node import Node, Type, make
from weft.core.program import Program, new_program
from weft.ops.comm import reshard
from weft.ops.registry import ONE, Equation, arg_sets
from weft.ops.source import input_node

Placements = Mapping[str, Placement]
Choose = Callable[[str, Type], Placements]


@dataclass(frozen=True)
class Options:
    """`scatter` are axes along which a pending sum that must be done may leave its value cut (sequence parallelism)."""

    scatter: frozenset[str] = frozenset()
    scatter_dim: int = -2


@dataclass
class _Way:
    """How one axis holds the operands of an op, and what bringing them there moves."""

    places: tuple[Placement, ...]
    cost: float


def place(program: Program, mesh: Mesh, inputs: Mapping[str, Placements], options: Options | None = None) -> Program:
    """The program on the mesh. Inputs not named are whole on every rank."""
    return _Placer(program, mesh, inputs, options or Options()).run()


class _Placer:
    def __init__(self, program: Program, mesh: Mesh, inputs: Mapping[str, Placements], options: Options) -> None:
        unknown = [n for n in inputs if n not in program.input_names]
        if unknown:
            raise PlanError(
                f"{program.name} has no input {unknown[0]!r}",
                needed=f"one of {', '.join(list(program.input_names)[:8])} ...",
                found=unknown[0],
            )
        self.program, self.mesh, self.options = program, mesh, options
        self.inputs = inputs
        self.made: dict[Node, Node] = {}

    def run(self) -> Program:
        new_inputs = [self._input(n) for n in self.program.inputs]
        for node in self.program.nodes:
            if node not in self.made:
                self.made[node] = self._node(node)
        state = dict(self.program.state)
        outputs = {name: self._output(name, n, state) for name, n in self.program.outputs}
        lines = {self.made[n]: line for n, line in self.program.lines.items() if n in self.made}
        return new_program(self.program.name, self.mesh, new_inputs, outputs, state=self.program.state, lines=lines)

    def _input(self, node: Node) -> Node:
        name = node.attr("name")
        try:
            layout = Layout.of(self.mesh, node.shape, self.inputs.get(name, {}))
        except LayoutError as e:
            raise PlanError(f"input {name!r} cannot be held so", needed=e.needed, found=e.found or str(self.inputs[name])) from e
        self.made[node] = input_node(name, Type(node.dtype, layout))
        return self.made[node]

    def _output(self, name: str, node: Node, state: Mapping[str, str]) -> Node:
        value = self.made[node]
        home = self.program.input_names.get(state.get(name, ""))
        want = self.made[home].layout if home is not None else Layout.of(self.mesh, node.shape)
        return reshard(value, want)  # type: ignore[no-any-return]

    # -- one node --------------------------------------------------------------------------------------------------------------

    def _node(self, node: Node) -> Node:
        args = [self.made[a] for a in node.args]
        attrs = {k: self.mesh.key if k == "mesh" else v for k, v in node.attrs}
        if len(args) == 1 and len(args[0].types) > 1:
            return make(node.op, tuple(args), attrs)
        for ways in self._candidates(node, args):
            try:
                return make(node.op, tuple(reshard(a, w) for a, w in zip(args, ways, strict=True)), attrs)
            except (TypeMismatch, LayoutError):
                continue
        raise PlanError(
            f"{node.op.name} cannot be placed",
            needed="a layout its rule accepts",
            found=", ".join(str(a.type) for a in args),
            where=self.program.lines.get(node),
        )

    def _candidates(self, node: Node, args: Sequence[Node]) -> Iterable[list[Layout]]:
        """Layouts to bring the operands to, the likeliest first, all whole last."""
        if node.op.equation is not None:
            eq = node.op.equation(tuple(a.type for a in args), dict(node.attrs))
            per_axis = [self._ways(axis, node, eq, args) for axis in self.mesh.axes]
            for combo in itertools.islice(_cheapest_first(per_axis), 24):
                layouts = _layouts(self.mesh, args, combo)
                if layouts is not None:
                    yield layouts
        else:
            yield from self._gathered_one_by_one(args)
        yield [Layout.of(self.mesh, a.shape) for a in args]

    def _gathered_one_by_one(self, args: Sequence[Node]) -> Iterable[list[Layout]]:
        """As they are, then with cuts taken away from the innermost axis on."""
        layouts = [a.layout for a in args]
        yield layouts
        for axis in reversed(self.mesh.axes):
            layouts = [lay.uncut(axis) if lay.where_cut(axis) is not None else lay for lay in layouts]
            yield layouts

    def _ways(self, axis: str, node: Node, eq: Equation, args: Sequence[Node]) -> list[_Way]:
        """Every way the axis may hold the operands, cheapest first."""
        n = self.mesh.size(axis)
        here = [a.type.on(axis) for a in args]
        ways = [_way(tuple(R for _ in args), here, args, axis, n, whole=True)]
        labels = dict.fromkeys(eq.label(k, p.dim) for k, p in enumerate(here) if isinstance(p, S))
        for label in labels:
            if label not in eq.whole and label != ONE:
                ways.append(_way(_cut_places(eq, label, here, args), here, args, axis, n))
        pending = frozenset(k for k, p in enumerate(here) if isinstance(p, P))
        for s in arg_sets(node.op.linear, len(args)):
            if s and s <= pending:
                ways.append(_way(tuple(P() if k in s else R for k in range(len(args))), here, args, axis, n))
        if axis in self.options.scatter and pending and not labels:
            ways += self._scattered(eq, pending, here, args, axis, n)
        return sorted(ways, key=lambda w: w.cost)

    def _scattered(
        self, eq: Equation, pending: frozenset[int], here: Sequence[Placement], args: Sequence[Node], axis: str, n: int
    ) -> list[_Way]:
        k = min(pending)
        dim = self.options.scatter_dim % max(args[k].ndim, 1) if args[k].ndim >= 2 else -1
        if dim < 0 or args[k].shape[dim] < n:
            return []
        label = eq.label(k, dim)
        kept = label not in eq.whole and label != ONE and label in eq.outs[0]
        return [_way(_cut_places(eq, label, here, args), here, args, axis, n)] if kept else []


def _cut_places(eq: Equation, label: str, here: Sequence[Placement], args: Sequence[Node]) -> tuple[Placement, ...]:
    """Every operand with the label cut along it, as the one that already is; the others whole."""
    within = next((p.within for k, p in enumerate(here) if isinstance(p, S) and eq.label(k, p.dim) == label), None)
    dims = dict(eq.dims_of(label))
    return tuple(S(dims[k], within) if k in dims else R for k in range(len(args)))


def _way(places: tuple[Placement, ...], here: Sequence[Placement], args: Sequence[Node], axis: str, n: int, whole: bool = False) -> _Way:
    """Bytes to bring the operands there, and, as a tie-break, work done on every rank alike when nothing is cut."""
    cost = sum(_move(h, p, math.prod(a.layout.largest_local) * a.dtype.itemsize, n) for h, p, a in zip(here, places, args, strict=True))
    return _Way(places, cost + (0.01 if whole and any(not isinstance(h, Replicated) for h in here) else 0.0))


def _move(here: Placement, there: Placement, nbytes: float, n: int) -> float:
    """Bytes on the wire per rank for one operand, from what it holds now."""
    if here == there or isinstance(here, Replicated):
        return 0.0
    if isinstance(here, S):
        return nbytes * (n - 1) if isinstance(there, Replicated) else nbytes * (n - 1) / n
    return nbytes * (n - 1) / n * (2 if isinstance(there, Replicated) else 1)


def _cheapest_first(per_axis: Sequence[Sequence[_Way]]) -> Iterable[tuple[_Way, ...]]:
    combos = itertools.islice(itertools.product(*per_axis), 4096)
    return sorted(combos, key=lambda c: sum(w.cost for w in c))


def _layouts(mesh: Mesh, args: Sequence[Node], combo: Sequence[_Way]) -> list[Layout] | None:
    out = []
    for k, a in enumerate(args):
        places = {axis: way.places[k] for axis, way in zip(mesh.axes, combo, strict=True)}
        try:
            out.append(Layout.of(mesh, a.shape, places))
        except LayoutError:
            return None
    return out
