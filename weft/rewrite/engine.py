"""Rules and their application at a place.

A rule is a pair of expression lists: it says that the left and the right side denote the same global tensors in the same
layouts. Where both sides become the same once communication is erased, the types alone make that true (see `erase`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import InvalidTransform, WeftError
from weft.core.layout import Layout, Mesh
from weft.core.node import DTYPE_NAMES, Node, make, op_named
from weft.core.program import Program
from weft.core.spec import groups_are_disjoint, leaves_and_returns
from weft.core.text import excerpt
from weft.rewrite.pattern import Bindings, Call, Expr, Hole, build, holes_of, match


@dataclass(frozen=True)
class Rule:
    """left = right, for all values of the holes that type both sides."""

    name: str
    left: tuple[Any, ...]
    right: tuple[Any, ...]

    def __post_init__(self) -> None:
        known = holes_of(*self.left)
        unknown = [k for k in holes_of(*self.right) if k not in known]
        if unknown:
            raise InvalidTransform(
                f"rule {self.name} uses {unknown[0]} on the right only", needed="every hole to stand on the left", found=unknown[0]
            )

    @property
    def holes(self) -> dict[str, Hole]:
        return holes_of(*self.left)

    def __str__(self) -> str:
        left, right = (", ".join(map(str, side)) for side in (self.left, self.right))
        return f"{left}  ->  {right}"


def rule(name: str, left: Any, right: Any) -> Rule:
    """A rule from one expression per side, or a tuple of them for several outputs."""
    return Rule(name, left if isinstance(left, tuple) else (left,), right if isinstance(right, tuple) else (right,))


def match_rule(r: Rule, places: Sequence[Node]) -> Bindings | None:
    bound: Bindings = {}
    return bound if all(match(expr, node, bound) is not None for expr, node in zip(r.left, places, strict=True)) else None


def apply_rule(program: Program, r: Rule, places: Sequence[Node], step: str, *, params: Mapping[str, Any] | None = None) -> Program:
    """The program with the rule used at the places; refused where it does not match or would change a type."""
    bound = match_rule(r, places)
    if bound is None:
        raise InvalidTransform(
            f"{step}: the rule {r.name} does not match here",
            needed=", ".join(map(str, r.left)),
            found=repr(places[0]),
            program=excerpt(program, places[0]),
        )
    bound = {**bound, **(params or {})}
    made: dict[int, Node] = {}
    new = [_built(program, e, bound, made, node, step) for e, node in zip(r.right, places, strict=True)]
    after = program.rewrite(dict(zip(places, new, strict=True)), step)
    _require_groups_kept(program, after, step)
    return after


def _require_groups_kept(before: Program, after: Program, step: str) -> None:
    """A group is a decision about its members as they are: a step may change what they read, not them, nor come between them."""
    for g in before.groups:
        changed = next((n for n in g.nodes if not _only_remade(n, after.moved)), None)
        through = leaves_and_returns(after, {after.moved[n] for n in g.nodes}) if changed is None else None
        if changed is not None or through is not None:
            raise InvalidTransform(
                f"{step} would break the {g.kind} group {g.name}",
                needed=f"the members of {g.name} as they are, and nothing between them",
                found=f"{changed.op.name} becomes {after.moved[changed].op.name}"
                if changed is not None
                else f"{through.op.name} comes between",  # type: ignore[union-attr]
                try_=f"the same before {g.kind}",
                program=excerpt(before, changed or g.nodes[0]),
            )
    disjoint = groups_are_disjoint(after)
    if disjoint is not None:
        raise InvalidTransform(
            f"{step} would join two groups", needed="a node in one group of a kind", found=disjoint, try_="the same before grouping"
        )


def _only_remade(n: Node, moved: Mapping[Node, Node]) -> bool:
    new = moved[n]
    return (new.op, new.attrs, new.args) == (n.op, n.attrs, tuple(moved[a] for a in n.args))


def _built(program: Program, expr: Any, bound: Bindings, made: dict[int, Node], node: Node, step: str) -> Node:
    try:
        new: Node = build(expr, bound, made)
    except WeftError as e:
        raise InvalidTransform(
            f"{step} is not valid here: {e.message}",
            needed=e.needed,
            found=e.found,
            program=excerpt(program, node),
            where=program.lines.get(node),
        ) from e
    if new.types != node.types:
        raise InvalidTransform(
            f"{step} would change the layout",
            needed=", ".join(map(str, node.types)),
            found=", ".join(map(str, new.types)),
            program=excerpt(program, node),
            where=program.lines.get(node),
        )
    return new


# -- erasure ---------------------------------------------------------------------------------------------------------------------

_ALONE = Mesh()
LAYOUT_ATTRS = {"shards": ()}


def erase(program: Program) -> dict[str, Node]:
    """The outputs with all communication and all layouts taken out: the program one device would run.

    Communication is the identity on global values, and an op that types computes its global value under every layout; so two
    programs that erase to the same nodes and agree in the types of inputs and outputs denote the same.
    """
    gone = erase_nodes(program)
    return {name: gone[n] for name, n in program.outputs}


def erase_nodes(program: Program) -> dict[Node, Node]:
    """What every node becomes when communication and layouts are taken out."""
    gone: dict[Node, Node] = {}
    for node in program.nodes:
        gone[node] = _erased(node, [gone[a] for a in node.args])
    return gone


def _erased(node: Node, args: list[Node]) -> Node:
    kind = node.op.kind.name
    if node.op.is_input:
        return make(node.op, (), {"name": node.attr("name"), "dtype": DTYPE_NAMES[node.dtype], "layout": Layout.of(_ALONE, node.shape)})
    if kind == "COMM":
        return args[0] if len(args) == 1 else make(op_named("optimization_barrier"), tuple(args), {})
    if node.op.is_item and args[0].op.is_tuple:
        return args[0].args[int(node.attr("index"))]
    if node.op.erased is not None:
        return node.op.erased(*args, **dict(node.attrs))  # type: ignore[no-any-return]
    attrs = {k: LAYOUT_ATTRS.get(k, v) for k, v in node.attrs}
    attrs = {k: v for k, v in attrs.items() if args or k not in LAYOUT_ATTRS or v != ()}  # what is made of nothing names no shards
    if "mesh" in attrs:
        attrs["mesh"] = _ALONE.key
    return make(node.op, tuple(args), attrs)


def same_erased(a: Program, b: Program) -> bool:
    """Whether two programs with the same outputs compute the same on one device, by the very same nodes."""
    left, right = erase(a), erase(b)
    return all(left[name] is right[name] for name in left if name in right)


__all__ = ["Call", "Expr", "Rule", "apply_rule", "erase", "erase_nodes", "match_rule", "rule", "same_erased"]
