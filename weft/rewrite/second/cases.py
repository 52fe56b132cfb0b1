"""Where the second judge tries a rule: ops known by equation and linearity only, small shapes, meshes, and every layout under which both
sides have one type. Types are the ops' own; how cases are found is this judge's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weft.core.errors import LayoutError, WeftError
from weft.core.layout import Layout, Mesh, O, P, Placement, R, S
from weft.core.node import OPS, Node, Op, Type, apply
from weft.ops.registry import Equation, Kind, define
from weft.ops.source import input_node
from weft.rewrite.pattern import AttrHole, Call, Hole, with_rest
from weft.rewrite.schema import Condition, OpHole, Schema, shapes_fit, sized

ALONE = Mesh()
MESHES = (Mesh(m=2), Mesh(m=3), Mesh(m=2, n=2))
AT_ONE_RANK = {"reduce", "broadcast", "send", "keep"}
INT = "int:"
MOST_FILLINGS, MOST_CASES = 120, 60  # of which a mesh's share is tried
LARGE = (5, 6)  # sizes at which one device is tried too: no rule compares more members of a dim than five (`prove.general`)
MANY = 4  # holes; of more, every axis shards one label of them all or none


@dataclass(frozen=True)
class AnyOp:
    """An op of which only these are known: the labels of operands and result, those it needs full, and in which operands it is linear."""

    ins: tuple[str, ...]
    out: str
    unsharded: str = ""
    linear: tuple[frozenset[int], ...] = ()

    @property
    def is_pointwise(self) -> bool:
        return not self.unsharded and all(self.out.endswith(labels) for labels in self.ins)

    def meets(self, c: Condition, dims: Mapping[str, Any]) -> bool:
        if c.kind == "linear":
            return frozenset(c.args) in self.linear
        if c.kind == "pointwise":
            return self.is_pointwise
        d, k, e = (dims.get(v, v) for v in c.args)
        label = self.ins[k][d : d + 1]
        alone = sum(label in labels for labels in self.ins) == 1
        return bool(label) and self.out[e : e + 1] == label and label not in self.unsharded and alone

    def __str__(self) -> str:
        text = f"{', '.join(self.ins)} -> {self.out}" + (f", unsharded {self.unsharded}" if self.unsharded else "")
        return text + (f", linear in {' and '.join(str(sorted(s)) for s in self.linear)}" if self.linear else "")


@dataclass(frozen=True)
class Lookup:
    """Rows of a table by index: it knows which rows a rank holds, so no equation alone tells what it does."""

    def meets(self, c: Condition, dims: Mapping[str, Any]) -> bool:
        return c.kind == "linear" and c.args == (0,)

    def __str__(self) -> str:
        return "take"


_ONE = (
    ("ik", "ik", ""), ("ik", "ki", ""), ("ik", "ik", "k"), ("ik", "ik", "i"), ("ik", "ki", "k"), ("ik", "ki", "i"), ("ik", "k", ""),
    ("ik", "i", ""), ("ik", "k", "i"), ("ik", "i", "k"), ("ik", "op", "ikop"),
)  # fmt: skip
_TWO = (
    (("ik", "ik"), "ik", ""), (("ik", "k"), "ik", ""), (("ik", "kj"), "ij", ""), (("ik", "ik"), "ik", "k"), (("ik", "jk"), "ok", "ijo"),
    (("bij", "bjk"), "bik", ""), (("ik", "kj"), "ij", "k"),
)  # fmt: skip
_SETS: dict[int, tuple[tuple[frozenset[int], ...], ...]] = {
    1: ((), (frozenset({0}),)),
    2: ((), (frozenset({0}),), (frozenset({1}),), (frozenset({0}), frozenset({1})), (frozenset({0, 1}),)),
}


@cache
def any_ops(arity: int) -> tuple[AnyOp | Lookup, ...]:
    if arity == 1:
        return tuple(AnyOp((ins,), out, full, s) for s in _SETS[1] for ins, out, full in _ONE)
    two = (AnyOp(ins, out, full, s) for s in _SETS[2] for ins, out, full in _TWO)
    return (*two, *[Lookup()] * 3) if arity == 2 else ()


@cache
def _op(name: str, known: AnyOp) -> Op:
    """The op as an entry, so that its types follow from the rules all ops have."""
    made = {x: 2 for x in known.out if not any(x in labels for labels in known.ins)}
    equation = Equation(tuple(map(tuple, known.ins)), (tuple(known.out),), frozenset(known.unsharded), sizes=made)
    op = define(f"{name}?{known}", kind=Kind.COMPOSITE, equation=lambda types, attrs: equation, run=_unknown, linear=known.linear)
    return OPS.pop(op.name)


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("an op of which only an equation is known has no numbers")


@dataclass(frozen=True)
class Case:
    """Both sides as nodes over the same inputs."""

    left: tuple[Node, ...]
    right: tuple[Node, ...]
    summary: str

    @property
    def inputs(self) -> list[Node]:
        seen: dict[Node, None] = {}
        stack = list(self.left + self.right)
        while stack:
            node = stack.pop()
            stack += node.args
            if node.op.is_input:
                seen[node] = None
        return sorted(seen, key=lambda n: str(n.attr("name")))

    def __str__(self) -> str:
        return f"{self.summary} on {self.left[0].mesh}: " + ", ".join(f"{n.attr('name')} {n.type}" for n in self.inputs)


# -- fillings and shapes -----------------------------------------------------------------------------------------------------------


def _filled(expr: Any, ops: Mapping[str, Any], attrs: Mapping[str, Any], moves: bool) -> Any:
    """The expression with its holes for ops and attributes filled; without communication where it is for one device."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(_filled(a, ops, attrs, moves) for a in expr.args)
    if isinstance(expr.op, OpHole):
        known = ops[expr.op.name]
        return Call(OPS["take"], args, (("dim", 0),)) if isinstance(known, Lookup) else Call(_op(expr.op.name, known), args)
    if not moves and expr.op.kind is Kind.COMM:
        return args[0] if len(args) == 1 else args
    if not moves and expr.op.is_item and isinstance(args[0], tuple):
        return args[0][dict(expr.attrs)["index"]]
    return Call(expr.op, args, tuple((k, attrs[v.name] if isinstance(v, AttrHole) else v) for k, v in expr.attrs))


def _fillings(schema: Schema, axes: Sequence[str], rng: random.Random) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Ops and attributes for the holes that meet the conditions, some of them where there are many."""
    names, arity = list(schema.op_holes), schema.op_holes
    keys = list(schema.attr_holes)
    out = []
    for values in itertools.product(*(schema.choices(k, axes) or [None] for k in keys)):
        attrs = dict(zip(keys, values, strict=True))
        if any(attrs[c.who[0]] == attrs[c.who[1]] for c in schema.conditions if c.kind == "differ"):
            continue
        fits = [
            [op for op in any_ops(arity[n]) if all(op.meets(c, attrs) for c in schema.conditions if c.who[0] == n)]
            for n in names
        ]
        out += [(dict(zip(names, chosen, strict=True)), attrs) for chosen in itertools.product(*fits)]
    rng.shuffle(out)
    return out


Typed = list[tuple[dict[str, Node], Any]]


def _typed(expr: Any, options: Mapping[str, Sequence[Node]], known: dict[Any, Any]) -> Typed:
    """Every choice of inputs under which an expression has a type, with its node."""
    if isinstance(expr, Hole):
        return [({expr.name: n}, n) for n in options[expr.name]]
    if not isinstance(expr, Call):
        return [({}, expr)]
    made = ((b, _made(expr, b, xs, known)) for b, xs in _joined(expr.args, options, known))
    return [(b, n) for b, n in made if n is not None]


def _joined(exprs: Sequence[Any], options: Mapping[str, Sequence[Node]], known: dict[Any, Any]) -> Typed:
    """Several expressions under the same choice of inputs."""
    joined: Typed = [({}, ())]
    for e in exprs:
        found = _typed(e, options, known)
        joined = [({**b, **c}, (*xs, y)) for b, xs in joined for c, y in found if all(c.get(k, v) is v for k, v in b.items())]
    return joined


def _made(expr: Call, bound: Mapping[str, Node], args: tuple[Any, ...], known: dict[Any, Any]) -> Node | None:
    try:
        attrs = sized(Call(expr.op, (), expr.attrs), bound).attrs
        key = (expr.op, args, attrs)
        if key not in known:
            known[key] = None
            known[key] = apply(expr.op, args, with_rest({k: v for k, v in attrs if v is not None}, args))
        return known[key]  # type: ignore[no-any-return]
    except (WeftError, KeyError, IndexError, TypeError):
        return None


def _sides(sides: Sequence[Sequence[Any]], options: Mapping[str, Sequence[Node]]) -> Iterator[tuple[dict[str, Node], Any, Any]]:
    """Bindings under which both sides have the same types."""
    known: dict[Any, Any] = {}
    for bound, nodes in _joined(sides[0], options, known):
        for _, same in _joined(sides[1], {h: [n] for h, n in bound.items()}, known):
            if [n.types for n in nodes] == [n.types for n in same]:
                yield bound, nodes, same


def _input(hole: str, shape: Sequence[int], full: bool, layout: Layout | None = None) -> Node:
    return input_node(hole, Type(torch.int64 if full else torch.float64, layout or Layout.of(ALONE, tuple(shape))))


def _shapes(schema: Schema, sizes: Sequence[int]) -> dict[str, list[Node]]:
    """Inputs on one device: of the shapes a rule declares, else of any few."""
    if set(schema.holes) <= set(schema.shapes):
        labels = list(dict.fromkeys(x for own in schema.shapes.values() for d in own if d != INT for x in d.split("+") if not x.isdigit()))
        size = {x: sizes[k % len(sizes)] for k, x in enumerate(labels)}
        return {
            h: [_input(h, [sum(int(x) if x.isdigit() else size[x] for x in d.split("+")) for d in own if d != INT], INT in own)]
            for h, own in ((h, schema.shapes[h]) for h in schema.holes)
        }
    two = any(n == 2 for n in schema.op_holes.values())
    pool = [*itertools.product((2, 3), repeat=2), (1, 3), (3,), *([(2,), (2, 2, 3), (2, 3, 2)] if two else [])]
    return {h: [*(_input(h, s, False) for s in pool), *([_input(h, (2,), True)] if two else [])] for h in schema.holes}


# -- layouts -----------------------------------------------------------------------------------------------------------------------


@cache
def _layouts(mesh: Mesh, shape: tuple[int, ...], roots: bool) -> tuple[Layout, ...]:
    places: list[Placement] = [R, P(), *(S(d) for d in range(len(shape))), *([O(0), O(1)] if roots else []), *([] if roots else [P("max")])]
    found = []
    for chosen in itertools.product(places, repeat=len(mesh.axes)):
        try:
            found.append(Layout.of(mesh, shape, dict(zip(mesh.axes, chosen, strict=True))))
        except LayoutError:
            continue
    return tuple(dict.fromkeys(found))


def _options(schema: Schema, shapes: Mapping[str, Node], mesh: Mesh, roots: bool, rng: random.Random) -> dict[str, list[Node]]:
    most = {1: 40, 2: 12, 3: 6}.get(len(shapes), 4)
    out = {}
    for h, n in shapes.items():
        full = not n.dtype.is_floating_point
        some = [layout for layout in _layouts(mesh, n.shape, roots) if not (full and layout.partials)]
        some = some if len(some) <= most else [some[0], *rng.sample(some[1:], most - 1)]
        out[h] = [_input(h, n.shape, full, layout) for layout in some]
    return out


def _shard_by_label(schema: Schema, shapes: Mapping[str, Node], mesh: Mesh) -> Iterator[dict[str, list[Node]]]:
    dims = {h: [x for x in schema.shapes[h] if x != INT] for h in shapes}
    for sharded in [None, *dict.fromkeys(x for own in dims.values() for x in own)]:
        places = {h: {mesh.axes[0]: S(own.index(sharded)) if sharded in own else R} for h, own in dims.items()}
        layouts = {h: Layout.of(mesh, n.shape, places[h]) for h, n in shapes.items()}
        yield {h: [_input(h, n.shape, not n.dtype.is_floating_point, layouts[h])] for h, n in shapes.items()}


def cases(schema: Schema, seed: int = 0) -> Iterator[Case]:
    """Cases of a rule: on one device where it does not communicate, then on every small mesh, from many fillings."""
    tries = _Tries(schema, random.Random(seed))
    two = sum(key == "axis" for key in schema.attr_holes.values()) > 1
    meshes = MESHES[2:] if two else MESHES
    for mesh in (() if tries.moves else (ALONE,)) + meshes:
        found: list[Case] = []
        for n, (ops, attrs) in enumerate(_fillings(schema, mesh.axes, tries.rng)):
            if len(found) >= MOST_CASES // len(meshes) or n >= MOST_FILLINGS and found:
                break
            found += tries.of(ops, attrs, mesh)
        yield from found


class _Tries:
    """The cases of one rule; the shapes of a filling are looked for once."""

    def __init__(self, schema: Schema, rng: random.Random) -> None:
        self.schema, self.rng = schema, rng
        self.roots = bool({c.op.name for c in schema.calls} & AT_ONE_RANK)
        self.moves = any(not isinstance(c.op, OpHole) and c.op.kind is Kind.COMM for c in schema.calls)
        self.declared = set(schema.holes) <= set(schema.shapes)
        self._known: dict[Any, list[Any]] = {}

    def of(self, ops: Any, attrs: Any, mesh: Mesh) -> list[Case]:
        text = "; ".join([f"{k} is {v}" for k, v in ops.items()] + [f"{k}={v}" for k, v in attrs.items()])
        found = []
        for shapes, left, right in self._shapes(ops, attrs):
            if mesh is ALONE:
                found.append(Case(left, right, text))
            if mesh is ALONE or max((n for x in shapes.values() for n in x.shape), default=0) in LARGE:
                continue
            sides = [tuple(_filled(e, ops, attrs, True) for e in side) for side in (self.schema.left, self.schema.right)]
            layouts = [(x, y) for options in self._options(shapes, mesh) for _, x, y in _sides(sides, options)]
            found += [Case(x, y, text) for x, y in self.rng.sample(layouts, min(len(layouts), 1 if self.schema.op_holes else 4))]
        return found

    def _shapes(self, ops: Any, attrs: Any) -> list[Any]:
        """Shapes, and both sides as one device computes them."""
        bare = [tuple(_filled(e, ops, attrs, False) for e in side) for side in (self.schema.left, self.schema.right)]
        key = str(bare)
        if key not in self._known:
            sizes = ((2, 3), (3, 2), LARGE) if self.declared else ((2, 3),)
            found = [x for n in sizes for x in _sides(bare, _shapes(self.schema, n)) if shapes_fit(x[0], self.schema.conditions)]
            self._known[key] = found if self.declared else self.rng.sample(found, min(4, len(found)))
        return self._known[key]

    def _options(self, shapes: Mapping[str, Node], mesh: Mesh) -> list[dict[str, list[Node]]]:
        if len(shapes) > MANY and self.declared:
            return list(_shard_by_label(self.schema, shapes, mesh))
        return [_options(self.schema, shapes, mesh, self.roots, self.rng)]
