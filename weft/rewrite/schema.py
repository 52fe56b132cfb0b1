"""Rules that stand for many: an op, an attribute or a size may be a hole, and conditions say which ops may fill it.

A schema claims: for every choice of ops, attributes and values under its conditions for which both sides type the same, both sides
denote the same. Types carry most conditions, so few are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.core.errors import RuleError, WeftError
from weft.core.node import Node, Op
from weft.ops.registry import Kind, arg_sets, equation_of
from weft.rewrite.engine import Rule
from weft.rewrite.pattern import AttrHole, Call, Hole, build, calls_of, holes_of


@dataclass(frozen=True)
class OpHole:
    """Any op, with any attributes, of the conditions' choosing."""

    name: str


@dataclass(frozen=True)
class Size:
    """A sum of sizes of dims of holes, and a number."""

    terms: tuple[tuple[str, int], ...] = ()
    plus: int = 0

    def at(self, bound: Mapping[str, Node]) -> int:
        return sum(bound[h].shape[d] for h, d in self.terms) + self.plus

    def __repr__(self) -> str:
        parts = [f"size({h}, {d})" for h, d in self.terms]
        return " + ".join(parts + ([str(self.plus)] if self.plus or not parts else []))


@dataclass(frozen=True)
class Form:
    """An op with its attributes, as it fills an op hole or stands in an enumeration."""

    op: Op
    attrs: tuple[tuple[str, Any], ...] = ()
    arity: int = 1
    fixed: tuple[float, ...] = ()  # numbers that follow the operands, as in x * 2

    def call(self, *args: Any) -> Call:
        return Call(self.op, (*args, *self.fixed), self.attrs)

    @property
    def name(self) -> str:
        shown = ",".join([*(str(v) for v in self.fixed), *(f"{k}={v}" for k, v in self.attrs)])
        return f"{self.op.name}[{shown}]" if shown else self.op.name


@dataclass(frozen=True)
class Condition:
    """A fact about an op hole (`linear`, `pointwise`, `keeps`), two attribute holes (`differ`) or the shapes of two holes (`like`)."""

    kind: str
    who: tuple[str, ...]
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "linear":
            return f"{self.who[0]} linear in {' '.join(map(str, self.args))}"
        if self.kind == "keeps":
            return f"{self.who[0]} keeps {self.args[0]} of {self.args[1]} as {self.args[2]}"
        return f"{self.who[0]} {self.kind}" if self.kind == "pointwise" else f"{self.who[0]} {'like' if self.kind == 'like' else '!='} {self.who[1]}"


@dataclass(frozen=True)
class Schema:
    """left == right, for all that fills the holes."""

    name: str
    left: tuple[Any, ...]
    right: tuple[Any, ...]
    shapes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # labels of the dims of holes; equal labels, equal sizes
    conditions: tuple[Condition, ...] = ()
    family: str = ""

    def __post_init__(self) -> None:
        known = holes_of(*self.left)
        unknown = [k for k in holes_of(*self.right) if k not in known]
        if unknown:
            raise RuleError(f"rule {self.name} uses {unknown[0]} on the right only", needed="every hole to stand on the left", found=unknown[0])

    @property
    def holes(self) -> list[str]:
        return list(holes_of(*self.left, *self.right))

    @property
    def lists(self) -> list[str]:
        """Holes that stand for a list of operands."""
        return [h for h in self.holes if h.endswith("_")]

    @property
    def op_holes(self) -> dict[str, int]:
        """Op holes and how many operands each has."""
        return {c.op.name: len(c.args) for c in self.calls if isinstance(c.op, OpHole)}

    @property
    def calls(self) -> list[Call]:
        return [c for e in (*self.left, *self.right) for c in calls_of(e)]

    @property
    def attr_holes(self) -> dict[str, str]:
        """Attribute holes and the attribute each stands for."""
        return {v.name: k for c in self.calls for k, v in c.attrs if isinstance(v, AttrHole)}

    def choices(self, name: str, axes: Sequence[str]) -> Sequence[Any]:
        """Values that an attribute hole is tried with: those its op names, or the usual ones of such an attribute."""
        found = ((c.op, k) for c in self.calls for k, v in c.attrs if isinstance(v, AttrHole) and v.name == name)
        op, key = next(found)
        own: Mapping[str, Sequence[Any]] = {} if isinstance(op, OpHole) else op.choices or {}
        return own[key] if key in own else attr_choices(key, axes)

    def __str__(self) -> str:
        from weft.rewrite.rulefile import show

        return show(self)


Ops = Mapping[str, Form]
Attrs = Mapping[str, Any]


def fill(expr: Any, ops: Ops, attrs: Attrs) -> Any:
    """The expression with op holes and attribute holes filled."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(fill(a, ops, attrs) for a in expr.args)
    if isinstance(expr.op, OpHole):
        return ops[expr.op.name].call(*args)
    return Call(expr.op, args, tuple((k, attrs.get(v.name, v) if isinstance(v, AttrHole) else v) for k, v in expr.attrs))


def sized(expr: Any, bound: Mapping[str, Node]) -> Any:
    """The expression with sizes made numbers."""
    if not isinstance(expr, Call):
        return expr
    attrs = tuple(
        (
            k,
            v.at(bound)
            if isinstance(v, Size)
            else tuple(s.at(bound) if isinstance(s, Size) else s for s in v)
            if isinstance(v, tuple)
            else v,
        )
        for k, v in expr.attrs
    )
    return Call(expr.op, tuple(sized(a, bound) for a in expr.args), attrs)


def make_node(expr: Any, bound: Mapping[str, Node]) -> Node:
    made: Node = build(sized(expr, bound), bound)
    return made


def is_comm(expr: Any) -> bool:
    return isinstance(expr, Call) and not isinstance(expr.op, OpHole) and expr.op.kind is Kind.COMM


def erased(expr: Any) -> Any:
    """The expression without communication."""
    if not isinstance(expr, Call):
        return expr
    if is_comm(expr) and len(expr.args) == 1:
        return erased(expr.args[0])
    return Call(expr.op, tuple(erased(a) for a in expr.args), expr.attrs)


def by_definition(expr: Any) -> Any:
    """The expression with every op that is defined by others written as they are."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(by_definition(a) for a in expr.args)
    defined = None if isinstance(expr.op, OpHole) else expr.op.defined
    return Call(expr.op, args, expr.attrs) if defined is None else by_definition(defined(*args, **dict(expr.attrs)))


def only_moves(schema: Schema) -> bool:
    """Whether both sides are the same expressions once communication is taken out."""
    return [_items(erased(e)) for e in schema.left] == [_items(erased(e)) for e in schema.right]


def _items(expr: Any) -> Any:
    """An item of a merged collective is the operand itself."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(_items(a) for a in expr.args)
    if not isinstance(expr.op, OpHole) and expr.op.is_item and is_comm(args[0]):
        return args[0].args[dict(expr.attrs)["index"]]
    return Call(expr.op, args, expr.attrs)


# -- conditions --------------------------------------------------------------------------------------------------------------------


def form_fits(form: Form, name: str, conditions: Sequence[Condition]) -> bool:
    """Whether an op may fill a hole, as far as can be told without its operands."""
    for c in conditions:
        if c.who[0] != name:
            continue
        if c.kind == "linear" and frozenset(c.args) not in arg_sets(form.op.linear, form.arity + len(form.fixed)):
            return False
        if c.kind == "pointwise" and (form.op.kind is not Kind.POINTWISE or form.op.local is not None):
            return False  # one that knows its place, as dropout, treats equal elements differently
    return True


def attrs_fit(attrs: Attrs, conditions: Sequence[Condition]) -> bool:
    return all(attrs[c.who[0]] != attrs[c.who[1]] for c in conditions if c.kind == "differ")


def shapes_fit(bound: Mapping[str, Node], conditions: Sequence[Condition]) -> bool:
    """Whether values that must be of one shape are: a stretched one counts more often in a sum than it stands there."""
    return all(bound[c.who[0]].shape == bound[c.who[1]].shape for c in conditions if c.kind == "like")


def dims_fit(expr: Any, node: Node, conditions: Sequence[Condition], attrs: Attrs) -> bool:
    """Whether ops keep the dims they must: a label that is not full, and stands once in operand and result."""
    for call, at in _applications(expr, node):
        for c in conditions:
            if c.kind == "keeps" and c.who[0] == call.op.name:
                d, k, e = (attrs.get(v, v) for v in c.args)
                eq = equation_of(at)
                if eq is None or d >= len(eq.ins[k]) or e >= len(eq.outs[0]) or eq.ins[k][d] != eq.outs[0][e] or eq.ins[k][d] in eq.unsharded:
                    return False
                if sum(eq.ins[k][d] in labels for labels in eq.ins) > 1:
                    return False
    return True


def _applications(expr: Any, node: Node) -> Iterator[tuple[Call, Node]]:
    if isinstance(expr, Call):
        if isinstance(expr.op, OpHole):
            yield expr, node
        for a, n in zip(expr.args, node.args, strict=False):
            yield from _applications(a, n)


# -- a schema at a place -------------------------------------------------------------------------------------------------------------


def flipped(schema: Schema) -> Schema | None:
    """The rule read from right to left, where its left side has no hole of its own."""
    left, right = holes_of(*schema.left).keys(), holes_of(*schema.right).keys()
    return Schema(f"{schema.name}~", schema.right, schema.left, schema.shapes, schema.conditions, schema.family) if left <= right else None


def matches(schema: Schema, node: Node) -> Iterator[Rule]:
    """The rules a one-output schema becomes at a node: every way to fill it whose right side types as the node does."""
    if schema.lists:
        schema = _at_node(schema, node)
    state = _match(schema.left[0], node, ({}, {}, {}))
    if state is None:
        return
    bound, ops, attrs = state
    if not all(form_fits(f, name, schema.conditions) for name, f in ops.items()) or not shapes_fit(bound, schema.conditions):
        return
    for more in _free_attrs(schema, attrs, node):
        full = {**attrs, **more}
        if attrs_fit(full, schema.conditions) and dims_fit(schema.left[0], node, schema.conditions, full):
            left, right = (sized(fill(e, ops, full), bound) for e in (schema.left[0], schema.right[0]))
            try:
                here, new = build(left, bound), build(right, bound)
            except WeftError:
                continue
            if here is node and new is not node and new.types == node.types:
                yield Rule(schema.name, (left,), (right,))


def _at_node(schema: Schema, node: Node) -> Schema:
    """A rule of any number of operands for as many as the node has."""
    from weft.rewrite.generic import count_at, unrolled

    return unrolled(schema, max(1, count_at(schema.left[0], node) or 1))


State = tuple[dict[str, Node], dict[str, Form], dict[str, Any]]


def _match(expr: Any, node: Node, state: State) -> State | None:
    bound, ops, attrs = state
    if isinstance(expr, Hole):
        if expr.name in bound:
            return state if bound[expr.name] is node else None
        return {**bound, expr.name: node}, ops, attrs
    if not isinstance(expr, Call):
        return state if node.op.is_number and node.attr("value") == expr else None
    if isinstance(expr.op, OpHole):
        return _match_op_hole(expr, node, state)
    if node.op is not expr.op or len(node.args) != len(expr.args):
        return None
    after = _match_attrs(expr, node, attrs)
    return None if after is None else _match_args(expr, node, (bound, ops, after))


def _match_op_hole(expr: Call, node: Node, state: State) -> State | None:
    bound, ops, attrs = state
    if node.op.kind in (Kind.COMM, Kind.SOURCE) or len(node.types) != 1:
        return None
    split = len(expr.args)
    rest = node.args[split:]
    if len(node.args) < split or any(not a.op.is_number for a in rest):
        return None
    form = Form(node.op, node.attrs, split, tuple(a.attr("value") for a in rest))
    if ops.setdefault(expr.op.name, form) != form:
        return None
    return _match_args(expr, node, (bound, {**ops, expr.op.name: form}, attrs))


def _match_attrs(expr: Call, node: Node, attrs: dict[str, Any]) -> dict[str, Any] | None:
    got, out = dict(node.attrs), dict(attrs)
    for key, want in expr.attrs:
        if isinstance(want, AttrHole):
            if out.setdefault(want.name, got.pop(key, None)) != dict(node.attrs).get(key):
                return None
        elif isinstance(want, Size) or isinstance(want, tuple) and any(isinstance(v, Size) or v == -1 for v in want):
            got.pop(key, None)  # compared once the holes are bound: the left side is then built and must be the node
        elif got.pop(key, None) != want:
            return None
    return None if got else out


def _match_args(expr: Call, node: Node, state: State) -> State | None:
    after: State | None = state
    for sub, arg in zip(expr.args, node.args, strict=False):
        after = _match(sub, arg, after) if after is not None else None
    return after


def _free_attrs(schema: Schema, known: Attrs, node: Node) -> Iterator[dict[str, Any]]:
    """Values for attribute holes that only the right side has."""
    free = [(name, key) for name, key in schema.attr_holes.items() if name not in known]
    choices = [schema.choices(name, node.mesh.axes) for name, _ in free]
    for values in itertools.product(*choices):
        yield dict(zip([n for n, _ in free], values, strict=True))


def attr_choices(key: str, axes: Sequence[str]) -> list[Any]:
    if key == "axis":
        return list(axes)
    return [0, 1] if key in ("root", "to", "index") else [0, 1, 2] if key in ("dim", "dims") else []
