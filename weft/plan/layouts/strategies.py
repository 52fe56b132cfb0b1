"""Every way a node can be computed on a mesh: a layout for each operand, and the layouts its results then have.

On one axis an op may keep its operands full, sharded one label of its equation, or let a partial sum pass where it is linear in it;
an op without an equation takes its operands in any layout its rule accepts. A way on the mesh is one of these per axis. Shards are
even here, so that every rank does the same; results follow from the op's own rule and are never written down twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.core.errors import LayoutError, PlanError, TypeMismatch
from weft.core.layout import Layout, Mesh, P, Placement, R, S, Within
from weft.core.node import Attrs, Node, Type
from weft.ops.registry import ONE, Equation, Kind, arg_sets
from weft.ops.source import input_op
from weft.plan.layouts.moves import Placements, Prices, Routes, of

Centre = tuple[Placements, ...] | None  # layouts of the operands, or of an input itself
Inner = tuple[tuple[int, int, Within], ...]

MOST = 512  # ways of one node; beyond, those that shard least go


@dataclass(frozen=True)
class Strategy:
    """Layouts of operands and results by axis, and the node as the busiest rank sees it, for pricing."""

    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    node: Node

    @property
    def key(self) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
        return self.operands, self.results


class Strategies:
    """Ways of the nodes of programs on one mesh; nodes the same are worked out once.

    With a `centre`, only ways that differ from it along one axis at most.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._known: dict[object, tuple[Strategy, ...]] = {}
        self._routes: list[Routes] = []

    def routes(self, prices: Prices) -> Routes:
        """Those of some prices, which programs on the mesh share."""
        found = next((r for r in self._routes if r.prices is prices), None)
        if found is None:
            found = Routes(self.mesh, prices)
            self._routes.append(found)
        return found

    def of_input(
        self, node: Node, pinned: Sequence[Placements] | None = None, centre: Centre = None, parts: Mapping[int, int] | None = None
    ) -> tuple[Strategy, ...]:
        """An input may be laid out in any even layout, or in those given; a dim as long as one joined of equal `parts`, by the share of each part."""
        options = list(pinned or itertools.product(*(self._held(node.type, axis, parts or {}) for axis in self.mesh.axes)))
        options = [p for p in options if pinned or centre is None or _distance(p, centre[0]) <= 1]
        types = (self._type(node.type, places) for places in options)
        found = tuple(Strategy((), (of(t.layout),), _stand_in(node, (), (t,))) for t in types if t is not None)
        if not found:
            raise self._cannot_hold(node, options)
        return found

    def _cannot_hold(self, node: Node, pinned: Sequence[Placements]) -> PlanError:
        options = " or ".join(", ".join(f"{a}:{p}" for a, p in zip(self.mesh.axes, places, strict=True)) for places in pinned)
        return PlanError(
            f"{node.attr('name')} cannot have the layout it is pinned to",
            needed=f"even shards of {list(node.type.shape)} on {self.mesh}",
            found=options,
            try_="another dim, or a mesh whose axis divides it",
        )

    def of_node(
        self, node: Node, pending: Sequence[bool], incoming: Sequence[Sequence[Placements]], centre: Centre = None
    ) -> tuple[Strategy, ...]:
        """`pending` tells which operands can hold a partial sum, `incoming` the layouts each can come in."""
        attrs = _attrs(node, self.mesh)
        free = node.op.equation is None
        shapes = tuple((t.shape, t.dtype) for a in node.args for t in a.types)
        inner = () if free else _inner_shards(incoming)
        key = node.op, tuple(sorted(attrs.items(), key=str)), shapes, tuple(pending), tuple(map(tuple, incoming)) if free else inner, centre
        if key not in self._known:
            options = self._as_they_come(node, incoming) if free else self._by_equation(node, attrs, pending, inner, centre)
            self._known[key] = tuple(self._accepted(node, attrs, options))
        return self._known[key]

    # -- what one axis may do ---------------------------------------------------------------------------------------------------

    def _held(self, type_: Type, axis: str, parts: Mapping[int, int]) -> list[Placement]:
        n = self.mesh.sizes[axis]
        inside = (S(d, parts[size]) for d, size in enumerate(type_.shape) if n > 1 and parts.get(size, 1) % n == 0)
        return [R, *(S(d) for d, size in enumerate(type_.shape) if n > 1 and size % n == 0), *inside]

    def _by_equation(
        self, node: Node, attrs: Attrs, pending: Sequence[bool], inner: Inner, centre: Centre
    ) -> Iterator[tuple[Placements, ...]]:
        full = tuple(_type_on(t, self.mesh) for a in node.args for t in a.types)
        eq = node.op.equation(full, attrs)
        per_axis = [list(self._axis_strategies(node, eq, axis, pending, inner)) for axis in self.mesh.axes]
        by_axis = None if centre is None else list(zip(*centre, strict=True))  # what each axis does to all operands
        neighbouring = (c for c in itertools.product(*per_axis) if by_axis is None or _distance(c, by_axis) <= 1)
        for combo in sorted(neighbouring, key=lambda c: sum(_is_replicated(w) for w in c))[:MOST]:
            yield tuple(tuple(strategy[k] for strategy in combo) for k in range(len(node.args)))

    def _axis_strategies(self, node: Node, eq: Equation, axis: str, pending: Sequence[bool], inner: Inner) -> Iterator[tuple[Placement, ...]]:
        n, operands = self.mesh.sizes[axis], range(len(node.args))
        yield tuple(R for _ in operands)
        if n == 1:
            return
        for label in dict.fromkeys(x for labels in eq.ins for x in labels if x != ONE and x not in eq.unsharded):
            dims = dict(eq.dims_of(label))
            withins = [None, *(w for k, d, w in inner if eq.label(k, d) == label)]
            if all(node.args[k].shape[d] % n == 0 for k, d in eq.dims_of(label)):
                yield from (tuple(S(dims[k], w) if k in dims else R for k in operands) for w in dict.fromkeys(withins))
        for who in _jointly_linear(node):
            if all(pending[k] for k in who):
                yield tuple(P() if k in who else R for k in operands)

    def _as_they_come(self, node: Node, incoming: Sequence[Sequence[Placements]]) -> Iterable[tuple[Placements, ...]]:
        """All full, which every rule takes, all the same, and then any: of many operands the first few ways may be none that a rule takes."""
        full = tuple(R for _ in self.mesh.axes)
        known = dict.fromkeys((full, *(layout for layouts in incoming for layout in layouts)))
        same = (tuple(layout for _ in incoming) for layout in known)
        return itertools.islice(itertools.chain(same, itertools.product(*incoming)), MOST)

    # -- what the op's rule makes of it --------------------------------------------------------------------------------------------

    def _accepted(self, node: Node, attrs: Attrs, options: Iterable[tuple[Placements, ...]]) -> Iterator[Strategy]:
        seen = set()
        for places in options:
            types = [self._type(a.type, p) for a, p in zip(node.args, places, strict=True)]
            if any(t is None for t in types):
                continue
            given = tuple(t for t in types if t is not None)
            results = _inferred(node, given, attrs)
            if results is None or not all(t.layout.is_even for t in results):
                continue
            strategy = Strategy(tuple(of(t.layout) for t in given), tuple(of(t.layout) for t in results), _stand_in(node, given, results))
            if strategy.key not in seen:
                seen.add(strategy.key)
                yield strategy

    def _type(self, type_: Type, places: Placements) -> Type | None:
        try:
            layout = Layout.of(self.mesh, type_.shape, dict(zip(self.mesh.axes, places, strict=True)))
        except LayoutError:
            return None
        return Type(type_.dtype, layout) if layout.is_even else None


def _inner_shards(incoming: Sequence[Sequence[Placements]]) -> Inner:
    """Operand, dim and part of every sharding inside a dim that an operand can come with."""
    places = ((k, p) for k, layouts in enumerate(incoming) for layout in layouts for p in layout)
    return tuple(dict.fromkeys((k, p.dim, p.within) for k, p in places if isinstance(p, S) and p.within is not None))


def _distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Along how many axes two ways differ."""
    return sum(x != y for x, y in zip(a, b, strict=True))


def _is_replicated(strategy: tuple[Placement, ...]) -> bool:
    return all(p == R for p in strategy)


def _type_on(type_: Type, mesh: Mesh) -> Type:
    return Type(type_.dtype, Layout.of(mesh, type_.shape))


def _attrs(node: Node, mesh: Mesh) -> Attrs:
    """Random sites do not change how a node may be sharded, and the mesh is the new one."""
    return {k: mesh.key if k == "mesh" else 0 if k == "site" else v for k, v in node.attrs}


def _inferred(node: Node, types: tuple[Type, ...], attrs: Attrs) -> tuple[Type, ...] | None:
    try:
        results = node.op.infer(types, attrs)
    except (TypeMismatch, LayoutError):
        return None
    return results if isinstance(results, tuple) else (results,)


def _stand_in(node: Node, operands: tuple[Type, ...], results: tuple[Type, ...]) -> Node:
    """The node on placed operands, outside any program."""
    args = tuple(Node(input_op, (), (), (t,)) for t in operands)
    return Node(node.op, args, node.attrs, results)


def _jointly_linear(node: Node) -> list[frozenset[int]]:
    """Operands in which the node is linear together, of those it has: a norm need have neither gain nor shift."""
    return [who for who in arg_sets(node.op.linear, len(node.args)) if who and max(who) < len(node.args)]


def may_pend(node: Node, pending: Sequence[bool]) -> bool:
    """Whether some way of the node leaves a partial sum: a sharded label may be reduced, or an operand's sum may pass."""
    if node.op.equation is None:
        return node.op.kind is Kind.VIEW and any(pending)
    eq = node.op.equation(tuple(t for a in node.args for t in a.types), dict(node.attrs))
    reduced = any(x not in out for labels in eq.ins for x in labels for out in eq.outs if x != ONE and x not in eq.unsharded)
    return reduced or any(all(pending[k] for k in who) for who in _jointly_linear(node))
