"""Nodes as arrays of Z3 terms over the reals: what every rank of a mesh holds, and what one device computes.

Ops of arithmetic and views mean what they say. Of any other op only its equation and linearity are taken: each element is an unknown function
of the elements it may see, added up over the labels it loses; where the op is linear, that function is a sum with unknown coefficients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from weft.core.layout import Layout, O, P
from weft.core.node import Node
from weft.ops.embed import take_op
from weft.ops.registry import ONE, Equation, Kind, arg_sets, equation_of

Array = Any  # a numpy array of Z3 terms, a tuple of them, or None where a rank holds nothing
Place = Mapping[str, int]


class Inexpressible(Exception):
    """A value this judge has no meaning for; the text says which."""


def boxed(shape: Sequence[int], terms: Iterable[Any]) -> Array:
    out = np.empty(tuple(shape), dtype=object)
    flat = out.reshape(-1)
    for k, t in enumerate(terms):
        flat[k] = t
    return out


def _indices(shape: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(n) for n in shape))


class Meaning:
    """The terms of nodes; equal inputs have equal unknowns, so two sides can be compared."""

    def __init__(self) -> None:
        import z3

        self.z3 = z3
        self._held: dict[Node, list[Array]] = {}
        self._alone: dict[Node, Array] = {}
        self._functions: dict[Any, Any] = {}

    # -- unknowns ------------------------------------------------------------------------------------------------------------------

    def unknown(self, name: str, sort: str) -> Any:
        return self.z3.Int(name) if sort == "int" else self.z3.Real(name)

    def function(self, name: str, args: Sequence[Any]) -> Any:
        """An unknown function of that name at the arguments; without any, an unknown number."""
        z3 = self.z3
        if not args:
            return z3.Real(name)
        key = (name, tuple(str(a.sort()) for a in args))
        if key not in self._functions:
            self._functions[key] = z3.Function(f"{name}/{len(args)}", *(a.sort() for a in args), z3.RealSort())
        return self._functions[key](*args)

    def number(self, value: float) -> Any:
        f = Fraction(value)
        return self.z3.RealVal(f"{f.numerator}/{f.denominator}")

    def total(self, terms: Sequence[Any], kind: str = "sum") -> Any:
        if kind == "sum":
            return self.z3.Sum(*terms) if len(terms) > 1 else terms[0] if terms else self.number(0)
        return functools.reduce(self._larger if kind == "max" else self._smaller, terms)

    def _larger(self, a: Any, b: Any) -> Any:
        return self.z3.If(a >= b, a, b)

    def _smaller(self, a: Any, b: Any) -> Any:
        return self.z3.If(a <= b, a, b)

    # -- inputs --------------------------------------------------------------------------------------------------------------------

    def _term(self, node: Node, index: Sequence[int], salt: Sequence[int]) -> Any:
        name = f"{node.attr('name')}{'@' + ','.join(map(str, salt)) if salt else ''}[{','.join(map(str, index))}]"
        return self.unknown(name, "real" if node.dtype.is_floating_point else "int")

    def _input(self, node: Node, at: Place) -> Array:
        layout = node.layout
        if not layout.present(at):
            return None
        salt = [at[a] for a, p in layout.partials if isinstance(p, P)]
        where = _positions(layout, at)
        return boxed([len(w) for w in where], (self._term(node, i, salt) for i in itertools.product(*where)))

    def _full_input(self, node: Node) -> Array:
        """The value that inputs held by ranks denote."""
        pending = [(a, p.op) for a, p in node.layout.partials if isinstance(p, P)]
        salts = list(itertools.product(*(range(node.mesh.size(a)) for a, _ in pending)))
        kind = pending[0][1] if pending else "sum"
        terms = (self.total([self._term(node, i, s) for s in salts], kind) for i in _indices(node.shape))
        return boxed(node.shape, terms)

    # -- nodes ---------------------------------------------------------------------------------------------------------------------

    def alone(self, node: Node) -> Array:
        """What one device computes: communication does nothing."""
        if node not in self._alone:
            args = [self.alone(a) for a in node.args]
            if node.op.is_input:
                made = self._full_input(node)
            elif node.op.kind is Kind.COMM:
                made = args[0] if len(args) == 1 else tuple(args)
            else:
                made = self._computed(node, args, None)
            self._alone[node] = made
        return self._alone[node]

    def local_values(self, node: Node) -> list[Array]:
        """What every rank holds."""
        if node not in self._held:
            args = [self.local_values(a) for a in node.args]
            places = list(node.mesh.places())
            if node.op.kind is Kind.COMM:
                made = self._moved(node, args, places)
            elif node.op.is_input:
                made = [self._input(node, at) for at in places]
            else:
                made = [self._on_rank(node, [a[r] for a in args], at) for r, at in enumerate(places)]
            self._held[node] = made
        return self._held[node]

    def _on_rank(self, node: Node, args: list[Array], at: Place) -> Array:
        gone = any(a is None for a in args) or not node.types[0].layout.present(at)
        return None if gone else self._computed(node, args, at)

    def reduced_values(self, node: Node) -> list[Array]:
        """What every rank would hold were its partial sums done."""
        values = list(self.local_values(node))
        for axis, place in node.layout.partials:
            if isinstance(place, P):
                for group in node.mesh.groups(axis):
                    xs = [values[r] for r in group]
                    done = None if any(x is None for x in xs) else self._folded(xs, place.op)
                    for r in group:
                        values[r] = done
        return values

    def _folded(self, xs: list[Array], kind: str) -> Array:
        return boxed(xs[0].shape, (self.total(list(column), kind) for column in zip(*(x.reshape(-1) for x in xs), strict=True)))

    # -- communication -------------------------------------------------------------------------------------------------------------

    def _moved(self, node: Node, args: list[list[Array]], places: Sequence[Place]) -> list[Array]:
        axis = node.attr("axis")
        outs = []
        for arg, type_, values in zip(node.args, node.types, args, strict=True):
            out: list[Array] = [None] * len(places)
            for group in node.mesh.groups(axis):
                tables = [_table(values[r], arg.layout, places[r]) for r in group]
                for k, r in enumerate(group):
                    out[r] = self._fetched(tables, k, arg.layout, type_.layout, axis, places[r])
            outs.append(out)
        return outs[0] if len(outs) == 1 else list(zip(*outs, strict=True))

    def _fetched(self, tables: list[dict[Any, Any] | None], own: int, have: Layout, want: Layout, axis: str, at: Place) -> Array:
        """The elements a rank is to hold, from its own or from a rank of its group; a partial sum is added up over the group."""
        place = have.placement(axis)
        if not want.present(at) or all(t is None for t in tables):
            return None
        if isinstance(place, O):
            tables = [tables[place.root]]
        elif not isinstance(place, P):
            tables = [tables[own], *tables[:own], *tables[own + 1 :]]
        where = _positions(want, at)
        found = [[t[i] for t in tables if t is not None and i in t] for i in itertools.product(*where)]
        if not all(found):
            raise Inexpressible(f"no rank of the group along {axis} holds what {want} asks for")
        terms = (self.total(xs, place.op) for xs in found) if isinstance(place, P) else (xs[0] for xs in found)
        return boxed([len(w) for w in where], terms)

    # -- computation ---------------------------------------------------------------------------------------------------------------

    def _computed(self, node: Node, args: list[Array], at: Place | None) -> Array:
        shape = node.types[0].layout.local_shape(at) if at is not None and len(node.types) == 1 else node.types[0].shape
        known: Callable[..., Any] | None = MEANINGS.get(node.op.name)
        if known is not None:
            return known(self, node, shape, *args)
        if node.op is take_op:
            return self._take(node, args, at)
        if node.op.local is not None:
            raise Inexpressible(f"{node.op.name} knows which slice it holds")
        if node.op.kind in (Kind.VIEW, Kind.SOURCE):
            raise Inexpressible(f"{node.op.name} has no meaning here")
        if node.op.update is not None:
            return self._update_by_rows(node, args)
        eq = equation_of(node)
        if eq is None:
            raise Inexpressible(f"{node.op.name} has no equation")
        outs = [self._by_equation(node, eq, k, args) for k in range(len(eq.outs))]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _update_by_rows(self, node: Node, args: list[Array]) -> Array:
        """An optimizer's update of the rows looked up: rows of equal index are added, one after another, before the update sees them."""
        _, update = node.op.parts(node)
        p, x, index, rows, *rest = args
        return self._computed(update, [p, self._put(x, index, rows, node.attr("dim")), *rest], None)

    def _take(self, node: Node, args: list[Array], at: Place | None) -> Array:
        """Rows by index: of those a rank holds, zero for the rest."""
        x, index, dim = np.moveaxis(args[0], node.attr("dim"), 0), args[1], node.attr("dim")
        if index.ndim != 1:
            raise Inexpressible("a lookup by an index of several dims")
        rows = range(x.shape[0]) if at is None else node.args[0].layout.positions(dim, at).tolist()
        out = np.empty((len(index), *x.shape[1:]), dtype=object)
        for n, rest in itertools.product(range(len(index)), _indices(x.shape[1:])):
            out[(n, *rest)] = self.total([self.z3.If(index[n] == r, x[(k, *rest)], self.number(0)) for k, r in enumerate(rows)])
        return np.moveaxis(out, 0, dim)

    def _put(self, x: Array, index: Array, rows: Array, dim: int) -> Array:
        if index.ndim != 1:
            raise Inexpressible("a put of an index of several dims")
        moved = np.moveaxis(x, dim, 0)
        out = np.empty((len(rows), *moved.shape[1:]), dtype=object)
        for r, rest in itertools.product(range(len(rows)), _indices(moved.shape[1:])):
            out[(r, *rest)] = self.total([self.z3.If(index[n] == rows[r], moved[(n, *rest)], self.number(0)) for n in range(len(index))])
        return np.moveaxis(out, 0, dim)

    def _by_equation(self, node: Node, eq: Equation, k: int, args: list[Array]) -> Array:
        sizes = {x: n for labels, a in zip(eq.ins, args, strict=True) for x, n in zip(labels, a.shape, strict=True) if x != ONE}
        lost = [x for x in sizes if x not in eq.outs[k] and x not in eq.unsharded]
        shape = [sizes.get(x, eq.sizes.get(x, 1)) for x in eq.outs[k]]
        attrs = [(key, v) for key, v in node.attrs if key not in ("mesh", "layout", "shards")]
        name = f"{node.op.name}{attrs or ''}{k or ''}"
        terms = []
        for index in _indices(shape):
            env = dict(zip(eq.outs[k], index, strict=True))
            which = [env[x] for x in eq.outs[k] if x in eq.unsharded or x not in sizes]
            parts = []
            for more in _indices([sizes[x] for x in lost]):
                full = {**env, **dict(zip(lost, more, strict=True))}
                rows = [_seen(a, labels, full, eq.unsharded) for a, labels in zip(args, eq.ins, strict=True)]
                parts.append(self._applied(f"{name}{which or ''}", node, rows))
            terms.append(self.total(parts, eq.reduce))
        return boxed(shape, terms)

    def _applied(self, name: str, node: Node, rows: list[list[Any]]) -> Any:
        """The unknown function at what it sees; a sum of matmuls with unknown coefficients where it is linear."""
        sets = arg_sets(node.op.linear, len(rows))
        each = sorted({k for s in sets if len(s) == 1 for k in s})
        joint = max((sorted(s) for s in sets if len(s) > 1), key=len, default=[])
        linear = each or joint
        rest = [t for k, row in enumerate(rows) if k not in linear for t in row]
        name = f"{name}:{','.join(str(len(r)) for r in rows)}"
        if not linear:
            return self.function(name, rest)
        choices: Iterable[Any]
        if each:
            choices = itertools.product(*([(k, e) for e in range(len(rows[k]))] for k in each))
        else:
            choices = (((k, e),) for k in joint for e in range(len(rows[k])))
        return self.total([self._multiply([self.function(f"{name}{list(c)}", rest), *(rows[k][e] for k, e in c)]) for c in choices])

    def _multiply(self, terms: Sequence[Any]) -> Any:
        return functools.reduce(lambda a, b: a * b, terms)

    def contract(self, labels: Sequence[str], out: str, args: Sequence[Array]) -> Array:
        sizes = {x: n for own, a in zip(labels, args, strict=True) for x, n in zip(own, a.shape, strict=True)}
        lost = [x for x in sizes if x not in out]
        terms = []
        for index in _indices([sizes[x] for x in out]):
            env = dict(zip(out, index, strict=True))
            parts = []
            for more in _indices([sizes[x] for x in lost]):
                full = {**env, **dict(zip(lost, more, strict=True))}
                parts.append(self._multiply([a[tuple(full[x] for x in own)] for own, a in zip(labels, args, strict=True)]))
            terms.append(self.total(parts))
        return boxed([sizes[x] for x in out], terms)


def _positions(layout: Layout, at: Place) -> list[list[int]]:
    return [layout.positions(d, at).tolist() for d in range(layout.rank)]


def _table(x: Array, layout: Layout, at: Place) -> dict[Any, Any] | None:
    """What a rank holds, by global index."""
    return None if x is None else dict(zip(itertools.product(*_positions(layout, at)), x.reshape(-1), strict=True))


def _seen(a: Array, labels: Sequence[str], env: Mapping[str, int], full: frozenset[str]) -> list[Any]:
    at = tuple(0 if x == ONE else slice(None) if x in full else env[x] for x in labels)
    return list(boxed((), [a[at]]).reshape(-1)) if not isinstance(a[at], np.ndarray) else list(a[at].reshape(-1))


# -- ops that mean what they say ---------------------------------------------------------------------------------------------------


def _each(f: Callable[..., Any]) -> Callable[..., Array]:
    """An op that is elementwise, on operands stretched to one shape."""

    def run(m: Meaning, node: Node, shape: Any, *xs: Array) -> Array:
        wide = np.broadcast_arrays(*xs)
        return boxed(wide[0].shape, (f(m, *column) for column in zip(*(x.reshape(-1) for x in wide), strict=True)))

    return run


def _matmul(m: Meaning, node: Node, shape: Any, x: Array, y: Array) -> Array:
    if x.ndim < 2 or y.ndim < 2:
        raise Inexpressible("a matmul of vectors")
    batch = "abcdefg"[: max(x.ndim, y.ndim) - 2]
    shared = y.ndim > 2
    return m.contract([batch[-(x.ndim - 2) :] + "ik" if x.ndim > 2 else "ik", (batch if shared else "") + "kj"], batch + "ij", [x, y])


def _einsum(m: Meaning, node: Node, shape: Any, *xs: Array) -> Array:
    left, _, out = str(node.attr("equation")).replace(" ", "").partition("->")
    return m.contract(left.split(","), out, xs)


def _sum(m: Meaning, node: Node, shape: Any, x: Array) -> Array:
    kept = [d for d in range(x.ndim) if d not in node.attr("dims")]
    transposed = np.transpose(x, [*kept, *node.attr("dims")])
    shape = [x.shape[d] for d in kept]
    out = boxed(shape, (m.total(list(transposed[i].reshape(-1))) for i in _indices(shape)))
    return np.expand_dims(out, tuple(node.attr("dims"))) if node.attr("keepdim") else out


def _narrow(m: Meaning, node: Node, shape: Any, x: Array) -> Array:
    dim = node.attr("dim")
    if x.shape[dim] != node.args[0].shape[dim]:
        raise Inexpressible("a narrow of a dim that is sharded")
    return x[(slice(None),) * dim + (slice(node.attr("start"), node.attr("stop"), node.attr("step") or 1),)]


def _concat(m: Meaning, node: Node, shape: Any, *xs: Array) -> Array:
    dim = node.attr("dim")
    if any(x.shape[dim] != a.shape[dim] for x, a in zip(xs, node.args, strict=True)):
        raise Inexpressible("a concat along a dim that is sharded")
    return np.concatenate(xs, dim)


MEANINGS: dict[str, Callable[..., Array]] = {
    "add": _each(lambda m, a, b: a + b), "sub": _each(lambda m, a, b: a - b), "mul": _each(lambda m, a, b: a * b),
    "div": _each(lambda m, a, b: a / b), "neg": _each(lambda m, a: -a), "square": _each(lambda m, a: a * a),
    "relu": _each(lambda m, a: m.total([a, m.number(0)], "max")), "maximum": _each(lambda m, a, b: m.total([a, b], "max")),
    "minimum": _each(lambda m, a, b: m.total([a, b], "min")),
    "permute": lambda m, node, shape, x: np.transpose(x, node.attr("order")),
    "reshape": lambda m, node, shape, x: x.reshape(shape),
    "const": lambda m, node, shape: boxed((), [m.number(node.attr("value"))]),
    "item": lambda m, node, shape, xs: xs[node.attr("index")],
    "put": lambda m, node, shape, x, index, rows: m._put(x, index, rows, node.attr("dim")),
    "matmul": _matmul, "einsum": _einsum, "sum": _sum, "narrow": _narrow, "concat": _concat,
}  # fmt: skip
