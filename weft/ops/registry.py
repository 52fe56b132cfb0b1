"""One entry per op. From its index equation and its linearity follow the shape rule, the legal layouts and the work.

Shard a label that an output keeps, and that output is sharded; shard one it lacks, and it is Partial. A partial sum passes
through an op that is linear in it. What an equation cannot say goes into the entry's other facets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch

from weft.core.errors import OpDefinitionError, TypeMismatch
from weft.core.layout import Atom, Dim, Layout, O, P, Placement, Replicated, dim_size, show_dim
from weft.core.node import DTYPE_NAMES, OPS, Attrs, Node, Op, Type, user_line
from weft.core.node import Kind as Kind
from weft.core.node import Linear as Linear

Types: TypeAlias = tuple[Type, ...]
ArgSets: TypeAlias = tuple[frozenset[int], ...]
Ordered: TypeAlias = "ArgSets | Mapping[str, ArgSets]"  # for every partial max and min, or by kind
ONE = "1"  # the label of a dim of size 1 that is stretched over the others


@dataclass(frozen=True)
class Equation:
    """Labels of every dim of every operand and output. A label no output keeps is reduced."""

    ins: tuple[tuple[str, ...], ...]
    outs: tuple[tuple[str, ...], ...]
    unsharded: frozenset[str] = frozenset()  # labels that may not be sharded
    reduce: str = "sum"
    sizes: Mapping[str, int] = field(default_factory=dict)  # of labels only an output has

    @staticmethod
    def parse(text: str, unsharded: str = "", reduce: str = "sum", **sizes: int) -> Equation:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise OpDefinitionError("this is no index equation", needed="labels of operands -> labels of results", found=repr(text), try_="'i k, k j -> i j'")
        sides = [tuple(tuple(part.split()) for part in side.split(",")) for side in (left, right)]
        ins = sides[0] if left.strip() else ()
        return Equation(ins, sides[1], frozenset(unsharded.split()), reduce, sizes)

    def label(self, arg: int, dim: int) -> str:
        return self.ins[arg][dim]

    def dims_of(self, label: str) -> list[tuple[int, int]]:
        """(operand, dim) of every place the label stands."""
        return [(a, d) for a, labels in enumerate(self.ins) for d, x in enumerate(labels) if x == label]


@dataclass(frozen=True)
class Local:
    """What a rank knows when it runs one node: the node, and its own place on the mesh."""

    node: Node
    coords: Mapping[str, int]

    def positions(self, arg: int, dim: int) -> torch.Tensor:
        """Global indices, along a dim of an operand, of what this rank holds."""
        return self.node.args[arg].type.layout.positions(dim, self.coords)

    def run(self, arg: int, dim: int) -> range | None:
        """The same where they follow each other without a gap, else None."""
        return self.node.args[arg].type.layout.run(dim, self.coords)

    def out_positions(self, dim: int, out: int = 0) -> torch.Tensor:
        return self.node.types[out].layout.positions(dim, self.coords)

    def out_shape(self, out: int = 0) -> tuple[int, ...]:
        return self.node.types[out].layout.local_shape(self.coords)


FACETS = tuple(f.name for f in fields(Op) if f.name not in ("name", "infer"))


def define(
    name: str,
    *,
    kind: Kind,
    run: Callable[..., Any],
    equation: str | Callable[[Types, Attrs], Equation] | None = None,
    infer: Callable[[Types, Attrs], Type | Types] | None = None,
    dtype: Callable[[Types, Attrs], Any] | None = None,
    **facets: Any,
) -> Op:
    """Adds an op. A facet that is missing, unknown or contradicts another fails here, at import.

    `run(*tensors, **attrs)` is its meaning. `local(ctx, *tensors, **attrs)` is what a rank does where it must know which
    slice it holds. `vjp(node, *cotangents)` gives one cotangent per operand, in weft ops. `field` is its meaning over
    integers mod a prime, for polynomial ops. `core.node.Op` lists them all.
    """
    if name in OPS:
        raise OpDefinitionError(f"op {name!r} is defined twice", needed="a new name", found=name)
    if (equation is None) == (infer is None):
        raise OpDefinitionError(
            f"op {name!r} needs an equation or an infer rule, and one of them",
            needed="equation= or infer=",
            found="both" if equation else "neither",
        )
    if not callable(run):
        raise OpDefinitionError(f"op {name!r} has no meaning", needed="run=, a torch function", found=repr(run))
    for facet in facets:
        if facet not in FACETS:
            raise OpDefinitionError(
                f"an op has no facet {facet!r}", needed=f"one of {', '.join(FACETS)}", found=f"{facet}= of {name!r}", try_=get_close_matches(facet, FACETS),
            )  # fmt: skip

    def by_equation(types: Types, attrs: Attrs) -> Types:
        return _infer_from_equation(op, types, attrs, dtype or _common_dtype)

    op = Op(name, infer or by_equation, kind, run, _as_equation(equation), **facets)
    OPS[name] = op
    return op


def _as_equation(equation: str | Callable[[Types, Attrs], Equation] | None) -> Callable[[Types, Attrs], Equation] | None:
    if not isinstance(equation, str):
        return equation
    parsed = Equation.parse(equation)
    return lambda types, attrs: parsed


def equation_of(node: Node) -> Equation | None:
    """The node's equation, or None where its op has a layout rule of its own."""
    make = node.op.equation
    return None if make is None else make(tuple(a.type for a in node.args), dict(node.attrs))


# -- types from equations ------------------------------------------------------------------------------------------------


def _infer_from_equation(op: Op, types: Types, attrs: Attrs, dtype: Callable[[Types, Attrs], Any]) -> Types:
    eq = op.equation(types, attrs) if op.arity in (None, len(types)) else None
    if eq is None or len(eq.ins) != len(types):
        raise _bad(op.name, types, f"{op.arity if eq is None else len(eq.ins)} operands", f"{len(types)}")
    labels = _bind(op.name, eq, types)
    placements = _placements_of(op.name, eq, types, labels, op.linear, op.monotone)
    dtypes = dtype(types, attrs)
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,) * len(eq.outs)
    mesh = types[0].mesh if types else attrs["mesh"]
    return tuple(_output(eq, out, d, mesh, labels, placements) for out, d in zip(eq.outs, dtypes, strict=True))


def _bind(name: str, eq: Equation, types: Types) -> dict[str, Dim]:
    """The dim every label stands for; all operands must hold it the same."""
    bound: dict[str, tuple[Dim, int]] = {}
    for k, (labels, t) in enumerate(zip(eq.ins, types, strict=True)):
        if len(labels) != len(t.shape):
            raise _bad(name, types, f"operand {k} of {len(labels)} dims", f"{len(t.shape)} dims")
        for d, (label, dim) in enumerate(zip(labels, t.layout.dims, strict=True)):
            if label == ONE or label in eq.unsharded:
                _require_uncut(name, types, label, k, d, dim)
            if label == ONE:
                continue
            seen, first = bound.setdefault(label, (dim, k))
            if dim_size(seen) != dim_size(dim):
                raise _bad(
                    name, types, f"equal sizes along {label!r}", f"{dim_size(seen)} in operand {first}, {dim_size(dim)} in operand {k}"
                )
            if seen != dim:
                raise _bad(
                    name,
                    types,
                    f"{label!r} sharded the same in operands {first} and {k}",
                    f"{_show_shard(seen)} and {_show_shard(dim)}",
                    try_=_repair(types, first, k),
                )
    return {label: dim for label, (dim, _) in bound.items()}


def _require_uncut(name: str, types: Types, label: str, k: int, d: int, dim: Dim) -> None:
    if any(a.axes for a in dim):
        axis = next(a.axes[-1] for a in dim if a.axes)
        why = "a dim that is stretched" if label == ONE else f"dim {d} of operand {k}, which {name} needs in full,"
        raise _bad(name, types, f"{why} unsharded", _show_shard(dim), try_=f"all_gather(operand {k}, {axis!r})")


def _show_shard(dim: Dim) -> str:
    sharded = [f"{a.size} sharded by {', '.join(a.axes)}" for a in dim if a.axes]
    return f"[{show_dim(dim)}: {'; '.join(sharded)}]" if sharded else f"[{show_dim(dim)}: unsharded]"


def _repair(types: Types, a: int, b: int) -> str:
    for axis in types[a].mesh.axes:
        x, y = types[a].on(axis), types[b].on(axis)
        if isinstance(x, Replicated) != isinstance(y, Replicated):
            full = a if isinstance(x, Replicated) else b
            return f"slice operand {full} along {axis}, or all_gather operand {a + b - full}"
    return f"bring operands {a} and {b} to one layout first"


def _placements_of(
    name: str, eq: Equation, types: Types, labels: dict[str, Dim], linear: Linear | ArgSets, monotone: Ordered
) -> dict[str, Placement]:
    """What every axis holds of the outputs apart from shards they keep; a sharded label is listed under its axis."""
    placements: dict[str, Placement] = {}
    for axis in types[0].mesh.axes if types else ():
        places = [t.on(axis) for t in types]
        cutting = [label for label, dim in labels.items() if any(axis in a.axes for a in dim)]
        if cutting:
            _check_shard(name, eq, types, axis, cutting, places)
        elif any(isinstance(p, O) for p in places):
            placements[axis] = _at_root(name, types, axis, places)
        elif any(isinstance(p, P) for p in places):
            placements[axis] = _partial_placement(name, types, axis, places, linear, _ordered(eq, monotone))
    return placements


def _ordered(eq: Equation, monotone: Ordered) -> dict[str, ArgSets]:
    """Which operands a partial max or min may pass; an op that reduces lets only its own kind through. What is kept in one piece and not summed is
    no reduction: of a dim that is narrowed, each element stays what it was."""
    reduces = any(x not in out and (x not in eq.unsharded or eq.reduce != "sum") for labels in eq.ins for x in labels for out in eq.outs if x != ONE)
    by_kind = monotone if isinstance(monotone, Mapping) else dict.fromkeys(("max", "min"), monotone)
    return {kind: by_kind.get(kind, ()) if not reduces or eq.reduce == kind else () for kind in ("max", "min")}


def _check_shard(name: str, eq: Equation, types: Types, axis: str, cutting: list[str], places: list[Placement]) -> None:
    if len(cutting) > 1:
        raise _bad(
            name,
            types,
            f"axis {axis} to shard one label",
            f"it shards {' and '.join(map(repr, cutting))}",
            try_=f"gather one of them along {axis}",
        )
    for k, (labels, place) in enumerate(zip(eq.ins, places, strict=True)):
        if cutting[0] not in labels and not isinstance(place, Replicated):
            raise _bad(
                name,
                types,
                f"operand {k} replicated along {axis}, which shards {cutting[0]!r}",
                f"{axis}:{place}",
                try_=f"all_reduce(operand {k}, {axis!r})" if isinstance(place, P) else None,
            )


def _at_root(name: str, types: Types, axis: str, places: list[Placement]) -> Placement:
    roots = {p for p in places if not isinstance(p, Replicated)}
    if len(roots) > 1:
        raise _bad(
            name,
            types,
            f"all operands at one rank of {axis}",
            " and ".join(f"{axis}:{p}" for p in sorted(roots, key=str)),
            try_=f"send or broadcast one of them along {axis}",
        )
    return roots.pop()


def _partial_placement(
    name: str, types: Types, axis: str, places: list[Placement], linear: Linear | ArgSets, ordered: dict[str, ArgSets]
) -> Placement:
    kinds = {p.op for p in places if isinstance(p, P)}
    who = frozenset(k for k, p in enumerate(places) if isinstance(p, P))
    if len(kinds) == 1:
        kind = kinds.pop()
        legal = arg_sets(linear, len(types)) if kind == "sum" else ordered[kind]
        if who in legal:
            return P(kind)
        needed = f"{name} to be linear in operand{'s' if len(who) > 1 else ''} {', '.join(map(str, sorted(who)))}, the others replicated"
        if kind != "sum":
            needed = f"{name} to keep the order of operand {min(who)}"
        k = min(who)
        raise _bad(
            name,
            types,
            needed,
            f"a partial {kind} along {axis} in operand{'s' if len(who) > 1 else ''} {', '.join(map(str, sorted(who)))}",
            try_=f"all_reduce(operand {k}, {axis!r})",
        )
    raise _bad(name, types, "one kind of partial reduction", " and ".join(sorted(kinds)))


def arg_sets(linear: Linear | ArgSets, args: int) -> ArgSets:
    """The sets of operands in which the op is linear, the others fixed."""
    if linear is Linear.NONE:
        return ()
    if linear is Linear.FIRST:
        return (frozenset({0}),)
    if linear is Linear.EACH:
        return tuple(frozenset({k}) for k in range(args))
    if linear is Linear.JOINTLY:
        return (frozenset(range(args)),)
    return linear  # type: ignore[return-value]


def passing(op: Op, kind: str, args: int) -> ArgSets:
    """The sets of operands in which a partial sum, max or min may pass the op, the others replicated; its type rule has the last word."""
    if kind == "sum":
        return arg_sets(op.linear, args)
    ordered: Ordered = op.monotone
    return ordered.get(kind, ()) if isinstance(ordered, Mapping) else ordered


def _output(eq: Equation, out: tuple[str, ...], dtype: torch.dtype, mesh: Any, labels: dict[str, Dim], placements: dict[str, Placement]) -> Type:
    dims = tuple(labels[x] if x in labels else (Atom(eq.sizes.get(x, 1)),) for x in out)
    layout = Layout(mesh, dims)
    lost = [a for x, dim in labels.items() if x not in out for atom in dim for a in atom.axes]
    for axis in mesh.axes:
        if axis in lost:
            layout = layout.hold(axis, P(eq.reduce))
        elif axis in placements:
            layout = layout.hold(axis, placements[axis])
    return Type(dtype, layout)


def _common_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    dtypes = dict.fromkeys(t.dtype for t in types)
    if len(dtypes) > 1:
        raise TypeMismatch(
            "operands of several dtypes",
            needed="one dtype",
            found=" and ".join(DTYPE_NAMES[d] for d in dtypes),
            try_="cast(x, dtype)",
            where=user_line(),
        )
    return next(iter(dtypes))


def _bad(name: str, types: Types, needed: str, found: str, try_: str | None = None) -> TypeMismatch:
    shown = "\n".join(f"    operand {k}  {t}" for k, t in enumerate(types))
    return TypeMismatch(f"{name} does not fit its operands", needed=needed, found=found, try_=try_, program=shown, where=user_line())


# -- work ----------------------------------------------------------------------------------------------------------------


def flops(node: Node) -> float:
    """Floating-point operations of the busiest rank."""
    if node.op.flops is not None:
        return float(node.op.flops(node))
    if node.op.kind in (Kind.VIEW, Kind.COMM, Kind.SOURCE):
        return 0.0
    eq = equation_of(node)
    if eq is None:
        return float(sum(math.prod(t.layout.largest_local) for t in node.types))
    sizes = {
        x: n
        for labels, a in zip(eq.ins, node.args, strict=True)
        for x, n in zip(labels, a.type.layout.largest_local, strict=True)
        if x != ONE
    }
    return (2.0 if node.op.kind is Kind.CONTRACT else 1.0) * math.prod(sizes.values())


def nbytes(type_: Type) -> int:
    """Bytes the busiest rank holds of a value."""
    return math.prod(type_.layout.largest_local) * int(type_.dtype.itemsize)


def memory_traffic(node: Node) -> int:
    """Bytes the busiest rank reads and writes, each operand once."""
    if node.op.kind in (Kind.VIEW, Kind.COMM):
        return 0
    if node.op.traffic is not None:
        return int(node.op.traffic(node))
    return sum(nbytes(a.type) for a in node.args) + sum(nbytes(t) for t in node.types)
