"""Proof for all sizes, meshes and layouts.

Types do the first half. An op's layout rule is an axiom: under every layout it accepts, the ranks together compute the op's
global value. Communication is the identity on global values. So two sides that type the same denote the same exactly where their
erasures denote the same, and if the erasures are one expression nothing is left to prove. The same is true where they become one
expression once ops that are defined by others are written as those.

Cut-off theorem, for the rest. Each element of an erased side is a term over indices, the same for all sizes: sums over bound indices of
products of elements and of unknown functions of such terms. Indices of a size that is not tied to another range over sets of their own, and
renaming the members of such a set renames both sides equally. A monomial names at most d members of a set, d the number of free and
bound indices over it in the larger side; so its coefficient is seen already when the set has d members. An index that no factor names only
counts its set, so the coefficient is a polynomial in the size, of degree at most the number of such indices; sizes d, d+1, ... tell it.
Hence normal forms that agree at the cut-off sizes agree at all larger ones, and smaller ones are the same with elements left out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.autodiff import vjp
from weft.core.errors import NotDifferentiable, WeftError
from weft.core.node import Node, toposort
from weft.core.program import Program, new_program
from weft.ops.registry import ONE, Kind, equation_of
from weft.rewrite.generic import step, unrolled
from weft.rewrite.prove import ranks
from weft.rewrite.prove.domains import Symbolic
from weft.rewrite.prove.forms import unknown_form
from weft.rewrite.prove.instances import declared
from weft.rewrite.prove.shapes import ALONE, INT, base_labels, infer_shapes
from weft.rewrite.rulefile import show
from weft.rewrite.schema import Schema, by_definition, erased, fill, make_node, only_moves

MOST = 7  # beyond this many elements a dim, the proof is left to rung 2
Derivation = dict[str, Any]


def derive(schema: Schema) -> Derivation | None:
    """A derivation for all sizes, or None where this method finds none; for any number of operands by induction."""
    if schema.lists:
        return _by_induction(schema)
    if only_moves(schema):
        return {"method": "erasure", "erased": [str(erased(e)) for e in schema.left]}
    left, right = ([erased(by_definition(e)) for e in side] for side in (schema.left, schema.right))
    if left == right:
        return {"method": "definition", "means": [str(e) for e in left]}
    found = []
    for dims in _dim_choices(schema):
        one = _derive_at(schema, dims)
        if one is None:
            return None
        found.append(one)
    return {"method": "cut-off", "cases": found} if any("normal" in case for case in found) else None


def _by_induction(schema: Schema) -> Derivation | None:
    one, two, more = (derive(s) for s in (unrolled(schema, 1), unrolled(schema, 2), step(schema)))
    if one is None or two is None or more is None:
        return None
    return {"method": "induction", "one": one, "two": two, "step": show(step(schema)), "by": more}


def _dim_choices(schema: Schema) -> list[dict[str, int]]:
    """Attribute holes stand for dims; each combination of them that types is a case of its own."""
    free = [name for name, key in schema.attr_holes.items() if key != "axis"]
    return [dict(zip(free, v, strict=True)) for v in itertools.product(range(2), repeat=len(free))]


def _derive_at(schema: Schema, dims: dict[str, int]) -> Derivation | None:
    ops = {name: unknown_form(name, n, schema.conditions, dims) for name, n in schema.op_holes.items()}
    sides = [tuple(erased(fill(e, ops, dims)) for e in side) for side in (schema.left, schema.right)]
    shapes = (
        schema.shapes
        if set(schema.holes) <= set(schema.shapes)
        else infer_shapes([*sides[0], *sides[1]], dict.fromkeys(schema.holes, (2, False)))
    )
    if shapes is None:
        return _never(schema, dims)
    labels = base_labels(shapes)
    programs = _programs(schema, sides, shapes, dict.fromkeys(labels, 2))
    if programs is None:
        return _never(schema, dims)
    need = _cutoffs(programs, shapes, schema.holes)
    if max((need[x] for x in labels), default=0) > MOST:
        return None
    prints = []
    for more in range(2 + _counting(programs)):
        at = _programs(schema, sides, shapes, {x: max(1, need[x]) + more for x in labels})
        if at is None:
            return None
        normal = _same_normal_forms(at)
        if normal is None:
            return None
        prints.append(normal)
    return {"dims": dims, "sizes": need, "normal": prints}


def _never(schema: Schema, dims: dict[str, int]) -> Derivation | None:
    """A case of named ops that never types claims nothing; an unknown op's shape is made up, so nothing follows from it."""
    return {"dims": dims, "types": "never"} if dims and not schema.op_holes else None


Pairs = list[tuple[Program, Program]]


def _programs(
    schema: Schema, sides: Sequence[tuple[Any, ...]], shapes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> Pairs | None:
    """Both sides on one device, and their gradients where there are any."""
    bound = {h: declared(h, shapes[h], sizes) for h in schema.holes}
    try:
        nodes = [[make_node(e, bound) for e in side] for side in sides]
    except (WeftError, KeyError, IndexError):
        return None
    if [n.types for n in nodes[0]] != [n.types for n in nodes[1]]:
        return None
    left, right = (
        new_program(s, ALONE, list(bound.values()), {f"out{k}": n for k, n in enumerate(ns)})
        for s, ns in zip(("left", "right"), nodes, strict=True)
    )
    try:
        return [(left, right), (vjp(left), vjp(right))]
    except NotDifferentiable:
        return [(left, right)]


def _same_normal_forms(programs: Pairs) -> str | None:
    """A fingerprint of the normal forms, if the two sides have the same."""
    domain = Symbolic()
    digest = hashlib.sha256()
    for left, right in programs:
        given = {n.attr("name"): domain.draw(n.attr("name"), n.shape, ()) for n in left.inputs}
        roots = [n for p in (left, right) for _, n in p.outputs]
        values = ranks.run_alone(domain, roots, given)
        for name, node in left.outputs:
            x, y = values[node], values[right.output_names[name]]
            if not torch.equal(x, y):
                return None
            digest.update(repr([_readable(domain, c) for c in x.reshape(-1).tolist()[:4]]).encode())
    return digest.hexdigest()[:16]


def _readable(domain: Symbolic, code: int) -> list[Any]:
    return sorted((sorted(str(domain.names[v])[:80] for v in m), str(c)) for m, c in domain.polys[code].items())


# -- cut-off sizes -----------------------------------------------------------------------------------------------------------------


def _counting(programs: Pairs) -> int:
    """At most how many bound indices no factor may name: sums of what a stretched value went into."""
    return max(_counting_sums(p) for pair in programs for p in pair)


def _counting_sums(program: Program) -> int:
    stretched: set[Node] = set()
    sums = 0
    for node in program.nodes:
        eq = equation_of(node)
        grows = eq is None and node.op.kind is Kind.VIEW or eq is not None and any(ONE in labels for labels in eq.ins)
        if grows or node.op.kind is Kind.SOURCE and not node.op.is_input or any(a in stretched for a in node.args):
            stretched.add(node)
        lost = eq is not None and any(x != ONE and x not in eq.outs[0] for labels in eq.ins for x in labels)
        sums += lost and node.op.kind is not Kind.VIEW and any(a in stretched for a in node.args)
    return sums


class _Tied:
    """Dims whose indices may be compared, joined."""

    def __init__(self) -> None:
        self.up: dict[tuple[Node, int], tuple[Node, int]] = {}

    def top(self, x: tuple[Node, int]) -> tuple[Node, int]:
        while (y := self.up.setdefault(x, x)) != x:
            x = y
        return x

    def tie(self, xs: Sequence[tuple[Node, int]]) -> None:
        for a, b in itertools.pairwise(xs):
            self.up[self.top(a)] = self.top(b)


def _cutoffs(programs: Pairs, shapes: Mapping[str, tuple[str, ...]], holes: Sequence[str]) -> dict[str, int]:
    """Per label of a hole's dim, how many indices of its kind the larger side has."""
    tied = _Tied()
    for p in (p for pair in programs for p in pair):
        for node in p.nodes:
            _tie(node, tied)
    counts = [_count(p, tied) for pair in programs for p in pair]
    need: dict[str, int] = {}
    for h in holes:
        node = programs[0][0].input_names[h]
        for d, dim in enumerate(x for x in shapes[h] if x != INT):
            for x in dim.split("+"):
                need[x] = max(need.get(x, 1), *(c.get(tied.top((node, d)), 0) for c in counts))
    return need


def _tie(node: Node, tied: _Tied) -> None:
    eq = equation_of(node)
    places: dict[str, list[tuple[Node, int]]] = {}
    if eq is None:
        if node.op.kind is Kind.VIEW and not (node.op.is_item or node.op.is_tuple):
            tied.tie([(n, d) for n in (*node.args, node) for d in range(n.ndim)])
        return
    for labels, a in zip(eq.ins, node.args, strict=True):
        for d, x in enumerate(labels):
            if x != ONE:
                places.setdefault(x, []).append((a, d))
    new = []
    for d, x in enumerate(eq.outs[0]):
        if x in places:
            places[x].append((node, d))
        else:
            new.append((node, d))
    for found in places.values():
        tied.tie(found)
    if node.op.kind is Kind.VIEW and new:  # concat, narrow, pad: the new dim is made of the old ones
        tied.tie([*new, *(found[0] for x, found in places.items() if x in eq.unsharded)])


def _count(program: Program, tied: _Tied) -> dict[tuple[Node, int], int]:
    count: dict[tuple[Node, int], int] = {}
    for _, out in program.outputs:
        tops = [tied.top((out, d)) for d in range(out.ndim)]
        for top in tops:
            count[top] = max(count.get(top, 0), tops.count(top))
    for node in toposort(n for _, n in program.outputs):
        eq = equation_of(node)
        for k, labels in enumerate(eq.ins if eq is not None else ()):
            for d, x in enumerate(labels):
                first = x not in [y for other in eq.ins[:k] for y in other]  # type: ignore[union-attr]
                if x != ONE and first and node.op.kind is not Kind.VIEW and x not in eq.outs[0]:  # type: ignore[union-attr]
                    top = tied.top((node.args[k], d))
                    count[top] = count.get(top, 0) + 1
    return count
