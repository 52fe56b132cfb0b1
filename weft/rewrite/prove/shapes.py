"""The most general shapes of a rule's holes: dims that an equation makes equal share a label, a dim joined of others is their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from weft.core.errors import WeftError
from weft.core.layout import Layout, Mesh
from weft.core.node import Node, Type, toposort
from weft.ops.registry import ONE, Kind, equation_of
from weft.ops.source import input_node
from weft.rewrite.schema import make_node

Sum = tuple[str, ...]  # labels, and numbers as text, in order
INT = "int:"
ALONE = Mesh()
LABELS = "ijklmnopqrstuvw"


def size_of(label: str, sizes: Mapping[str, int]) -> int:
    """A label's size; `k+l` is a sum."""
    return sum(int(x) if x.isdigit() else sizes[x] for x in label.split("+"))


def base_labels(shapes: Mapping[str, Sequence[str]]) -> list[str]:
    """The labels that sizes are chosen for."""
    return list(dict.fromkeys(x for dims in shapes.values() for d in dims if d != INT for x in d.split("+") if not x.isdigit()))


def infer_shapes(exprs: Sequence[object], ranks: Mapping[str, tuple[int, bool]]) -> dict[str, tuple[str, ...]] | None:
    """Labels for every hole, from its rank and whether it is an integer; None where the dims do not fit."""
    bound = {h: input_node(h, Type(torch.int64 if full else torch.float64, Layout.of(ALONE, (4,) * n))) for h, (n, full) in ranks.items()}
    try:
        roots = [make_node(e, bound) for e in exprs]
        solved = _Solver(bound).solve(roots)
    except (WeftError, IndexError, KeyError):
        return None
    return None if solved is None else {h: ((INT,) if ranks[h][1] else ()) + labels for h, labels in solved.items()}


class _Solver:
    """Unification of dims as sums of labels."""

    def __init__(self, bound: Mapping[str, Node]) -> None:
        self.bound = bound
        self.means: dict[str, Sum] = {}
        self.dims: dict[Node, list[Sum]] = {}
        self.equal: list[tuple[Sum, Sum]] = []
        self.fits = True

    def solve(self, roots: Sequence[Node]) -> dict[str, tuple[str, ...]] | None:
        for h, node in self.bound.items():
            self.dims[node] = [(f"{h}{d}",) for d in range(node.ndim)]
        for node in toposort(roots):
            if node not in self.dims:
                self.dims[node] = self._of(node)
        half = len(roots) // 2  # the left sides, then the right sides
        for a, b in zip(roots[:half], roots[half:], strict=True):
            self.fits = self.fits and a.ndim == b.ndim
            for x, y in zip(self.dims[a], self.dims[b], strict=False):
                self._unify(x, y)
        self._solve()
        return self._named() if self.fits else None

    def _of(self, node: Node) -> list[Sum]:
        eq = equation_of(node)
        if eq is None:
            self.fits = self.fits and node.op.is_number
            return []
        places: dict[str, Sum] = {}
        for labels, a in zip(eq.ins, node.args, strict=True):
            for x, dim in zip(labels, self.dims[a], strict=True):
                if x != ONE:
                    self._unify(places.setdefault(x, dim), dim)
        joined = tuple(sorted(y for x, dim in places.items() if x in eq.unsharded for y in dim))
        return [places.get(x) or (joined if node.op.kind is Kind.VIEW else (str(eq.sizes.get(x, 1)),)) for x in eq.outs[0]]

    def _full(self, s: Sum) -> Sum:
        out: list[str] = []
        for x in s:
            out += self._full(self.means[x]) if x in self.means else [x]
        return tuple(sorted(out))

    def _unify(self, a: Sum, b: Sum) -> None:
        self.equal.append((a, b))

    def _solve(self) -> None:
        """Works through the equations until none can be solved; what is left does not fit."""
        moved = True
        while self.equal and moved:
            left = [pair for pair in self.equal if not self._solved(*pair)]
            moved, self.equal = len(left) < len(self.equal), left
        self.fits = self.fits and not self.equal

    def _solved(self, a: Sum, b: Sum) -> bool:
        """Common labels are cancelled; a label alone means the other side, as does one repeated as often as another."""
        x, y = Counter(self._full(a)), Counter(self._full(b))
        x, y = x - y, y - x
        for one, other in ((x, y), (y, x)):
            if one.total() == 1 and not (name := next(iter(one))).isdigit() and other:
                self.means[name] = tuple(sorted(other.elements()))
                return True
        if len(x) == len(y) == 1 and x.total() == y.total() and not (name := next(iter(x))).isdigit():
            self.means[name] = (next(iter(y)),)
            return True
        return not x and not y

    def _named(self) -> dict[str, tuple[str, ...]]:
        names: dict[str, str] = {}
        out = {}
        for h, node in self.bound.items():
            dims = [self._full(d) for d in self.dims[node]]
            for x in (x for d in dims for x in d if not x.isdigit()):
                names.setdefault(x, LABELS[len(names)] if len(names) < len(LABELS) else f"l{len(names)}")
            out[h] = tuple("+".join(names.get(x, x) for x in d) for d in dims)
        return out
