"""Rules of any number of operands, written once: `concat(*(x @ y_), dim=1) == x @ concat(*y_, dim=1) for x[i, k] y_[k, j_]`.

A hole whose name ends in `_` stands for a list, a label that ends so for a size that each member has of its own, and `*e` for e at every member.
Several lists have as many members each. For n members the rule is an ordinary one (`unrolled`). That it holds for one and two, and passes from n
to n + 1 (`step`), proves it for every n: a concat of n + 1 is that of the first n, one value, joined with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from weft.core.errors import RuleError
from weft.core.layout import Layout, Mesh
from weft.core.node import Node, Type
from weft.ops.shape import concat_op
from weft.ops.source import input_node
from weft.rewrite.pattern import Call, Hole, Star
from weft.rewrite.schema import OpHole, Schema, Size, make_node

PRIMES = (2, 3, 5, 7, 11, 13)  # sizes that tell the labels of a shape apart
BEFORE = "before"  # the concat of all members but the last


def _renamed(expr: Any, names: Mapping[str, str]) -> Any:
    """The expression with holes, and sizes of holes, called otherwise."""
    if isinstance(expr, Hole):
        return Hole(names.get(expr.name, expr.name))
    if isinstance(expr, Star):
        return Star(_renamed(expr.expr, names))
    if not isinstance(expr, Call):
        return expr
    return Call(expr.op, tuple(_renamed(a, names) for a in expr.args), tuple((k, _resized(v, names)) for k, v in expr.attrs))


def _resized(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Size):
        return Size(tuple((names.get(h, h), d) for h, d in value.terms), value.plus)
    return tuple(_resized(v, names) for v in value) if isinstance(value, tuple) else value


def _spread(expr: Any, members: Callable[[Any], tuple[Any, ...]]) -> Any:
    """The expression with every starred operand replaced by the operands it stands for."""
    if not isinstance(expr, Call):
        return expr
    args = (b for a in expr.args for b in (members(a.expr) if isinstance(a, Star) else (_spread(a, members),)))
    return Call(expr.op, tuple(args), expr.attrs)


def unrolled(schema: Schema, n: int) -> Schema:
    """The rule for lists of n members; a size of a list is that of its first member."""
    if not schema.lists:
        return schema
    names = [{h: f"{h}{k}" for h in schema.lists} for k in range(1, n + 1)]

    def side(exprs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_renamed(_spread(e, lambda x: tuple(_renamed(x, own) for own in names)), names[0]) for e in exprs)

    shapes: dict[str, tuple[str, ...]] = {}
    for h, labels in schema.shapes.items():
        for k in range(1, n + 1) if h in schema.lists else (0,):
            shapes[f"{h}{k or ''}"] = tuple(f"{x}{k}" if k and x.endswith("_") else x for x in labels)
    return replace(schema, left=side(schema.left), right=side(schema.right), shapes=shapes)


def step(schema: Schema) -> Schema:
    """From n members to n + 1, as an ordinary rule: a side that is one concat is, by what is known of n, the other side of the first n joined with
    the last member; there a hole stands for each concat of the first n."""
    if len(schema.left) > 1:
        raise RuleError(f"rule {schema.name} of lists has several values", needed="one value on each side", found=str(schema))
    left, right = schema.left[0], schema.right[0]
    if not _is_concat(left):
        left, right = right, left
    if not _is_concat(left) or len(left.args) > 1:
        raise RuleError(f"rule {schema.name} joins its list on no side", needed="concat(*e) as a full side", found=str(schema))
    last = {h: h.rstrip("_") for h in schema.lists}
    right = _renamed(right, last)
    joins = _joins(right)
    first = {str(c.args[0].expr): Hole(f"{BEFORE}{k or ''}") for k, c in enumerate(joins)}
    before = _without_concat(_spread(right, lambda x: (first[str(x)],)), set(first.values()))
    after = _spread(right, lambda x: (first[str(x)], x))
    joined = Call(left.op, (before, _renamed(left.args[0].expr, last)), left.attrs)
    shapes = {last.get(h, h): tuple(x.rstrip("_") for x in labels) for h, labels in schema.shapes.items()}
    if shapes:
        shapes |= {first[str(c.args[0].expr)].name: _shape_before(c, shapes) for c in joins}
    return replace(schema, name=f"{schema.name}_step", left=(joined,), right=(after,), shapes=shapes)


def _is_concat(expr: Any) -> bool:
    return isinstance(expr, Call) and not isinstance(expr.op, OpHole) and expr.op is concat_op and isinstance(expr.args[0], Star)


def _without_concat(expr: Any, first: set[Hole]) -> Any:
    """A concat of one value is that value."""
    if not isinstance(expr, Call):
        return expr
    if len(expr.args) == 1 and expr.args[0] in first and not isinstance(expr.op, OpHole) and expr.op is concat_op:
        return expr.args[0]
    return Call(expr.op, tuple(_without_concat(a, first) for a in expr.args), expr.attrs)


def _joins(expr: Any) -> list[Call]:
    """The concats that join lists."""
    if _is_concat(expr):
        return [expr]
    return [c for a in expr.args for c in _joins(a)] if isinstance(expr, Call) else []


def _shape_before(joins: Call, shapes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The labels of the joined members: those of one member as it is joined, but for the dim along which it grows."""
    labels = list(dict.fromkeys(x for own in shapes.values() for x in own))
    sizes = dict(zip(labels, PRIMES, strict=False))
    bound: dict[str, Node] = {
        h: input_node(h, Type(torch.float64, Layout.of(Mesh(), tuple(sizes[x] for x in own)))) for h, own in shapes.items()
    }
    member = make_node(joins.args[0].expr, bound)
    names = {n: x for x, n in sizes.items()}
    dim = dict(joins.attrs)["dim"]
    return tuple(("many_" if d == dim else "") + names.get(n, str(n)) for d, n in enumerate(member.shape))


def count_at(expr: Any, node: Node) -> int | None:
    """How many members the list has where an expression meets a node."""
    if not isinstance(expr, Call):
        return None
    if any(isinstance(a, Star) for a in expr.args):
        return len(node.args) - len(expr.args) + 1
    found = (count_at(a, n) for a, n in zip(expr.args, node.args, strict=False))
    return next((n for n in found if n is not None), None)
