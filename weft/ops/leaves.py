"""Sums whose bits do not depend on how ranks hold what is summed: a fixed tree over global indices.

A dim of n = odd * 2^k indices is 2^k equal parts. Each is summed by pairs of neighbours, a last one without a neighbour waiting for the next
round; the parts are summed by pairs too. A rank that holds one of 2^j equal shards holds a subtree, so its sum is a node of the tree, and the
ranks' sums, summed by pairs in order, give the root. `by_leaves` does the same to an op that multiplies and sums in one call: it is computed
on leaves, whose sizes are global, and what they give is put side by side, or summed by pairs where the op sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Dim, Mesh
from weft.core.node import Attrs, Node, Op, Type, make, op_named, user_line
from weft.core.pairs import pairs
from weft.ops.reduce import norm_dims, sum_
from weft.ops.registry import ONE, Equation, Kind, Linear, Local, Types, define, flops, memory_traffic, nbytes

Span = tuple[int, int]  # first index and how many


def _halved(x: torch.Tensor) -> torch.Tensor:
    """`pairs` along the first dim, each round in one call."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


def tree(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum along a dim, which is dropped."""
    n = x.shape[dim]
    if not n:
        return torch.sum(x, dim)
    x = x.movedim(dim, 0)
    parts = x.unflatten(0, (n & -n, -1)).transpose(0, 1)
    return _halved(_halved(parts))


def _tree_sum(x: torch.Tensor, dims: Any = None, keepdim: bool = False) -> torch.Tensor:
    if not x.dtype.is_floating_point:
        return sum_.run(x, dims, keepdim)  # type: ignore[no-any-return]
    for d in reversed(gone := norm_dims(dims, x.ndim)):
        x = tree(x, d)
    for d in gone if keepdim else ():
        x = x.unsqueeze(d)
    return x


tree_sum = define(
    "tree_sum", kind=Kind.REDUCE, equation=sum_.equation, run=_tree_sum, linear=Linear.FIRST, vjp=sum_.vjp, field=sum_.field, normal=sum_.normal,
    dtype=lambda types, attrs: types[0].dtype if types[0].dtype.is_floating_point else torch.int64,
    erased=sum_, doc="the sum along dims, each by a fixed tree over its indices, the last dim first",
)  # fmt: skip


# -- an op leaf by leaf -----------------------------------------------------------------------------------------------------------


def _inner(attrs: Attrs) -> Attrs:
    return {k: v for k, v in attrs.items() if k not in ("inner", "leaves")}


def _equation(types: Types, attrs: Attrs) -> Equation:
    eq: Equation = op_named(attrs["inner"]).equation(types, _inner(attrs))
    return eq


def _infer(types: Types, attrs: Attrs) -> Type | Types:
    op, eq, leaf = op_named(attrs["inner"]), _equation(types, attrs), dict(attrs["leaves"])
    for labels, t in zip(eq.ins, types, strict=True):
        for label, dim in zip(labels, t.layout.dims, strict=True):
            kept = all(label in out for out in eq.outs)
            strict = label in leaf or not kept or multiplies(op)  # other rows are computed each by itself
            if strict and any(a.axes for a in dim) and not in_leaves(dim, leaf.get(label, 0), kept, t.mesh):
                needed = f"shards of dim {label!r} of entire leaves" + (f" of {leaf[label]}" if label in leaf else "")
                raise TypeMismatch(f"{op.name} is not sharded between leaves", needed=needed, found=str(t), where=user_line())
    return op.infer(types, _inner(attrs))  # type: ignore[no-any-return]


def multiplies(op: Op) -> bool:
    """Whether it multiplies and sums two operands, as matmuls and convolutions do, for several rows at once by code that their number chooses."""
    return op.kind is Kind.CONTRACT or op.kind is Kind.COMPOSITE and op.linear is Linear.EACH


def in_leaves(dim: Dim, leaf: int, kept: bool, mesh: Mesh) -> bool:
    """Whether every shard of a dim is made of entire leaves, as many on every rank; of one that is summed, in one run."""
    inside = [a for a in dim if a.size > 1]
    for k, atom in enumerate(inside):
        ranks, after = math.prod(mesh.size(axis) for axis in atom.axes), math.prod(a.size for a in inside[k + 1 :])
        if ranks > 1 and (not leaf or ((k or ranks & (ranks - 1)) and not kept) or atom.size % ranks or atom.size // ranks * after % leaf):
            return False
    return True


@dataclass(frozen=True)
class _Leaf(Local):
    """What a rank knows when it runs one leaf of its node."""

    eq: Equation
    spans: Mapping[str, Span]

    def positions(self, arg: int, dim: int) -> torch.Tensor:
        return _narrow(super().positions(arg, dim), self.eq.ins[arg][dim : dim + 1], self.spans)

    def run(self, arg: int, dim: int) -> range | None:
        full, (at, size) = super().run(arg, dim), self.spans.get(self.eq.ins[arg][dim], (0, 1 << 62))
        return None if full is None else full[at : at + size]

    def out_positions(self, dim: int, out: int = 0) -> torch.Tensor:
        return _narrow(super().out_positions(dim, out), self.eq.outs[out][dim : dim + 1], self.spans)

    def out_shape(self, out: int = 0) -> tuple[int, ...]:
        return tuple(self.spans[x][1] if x in self.spans else n for x, n in zip(self.eq.outs[out], super().out_shape(out), strict=True))


def _narrow(x: torch.Tensor, labels: Sequence[str], spans: Mapping[str, Span]) -> torch.Tensor:
    for d, label in enumerate(labels):
        x = x.narrow(d, *spans[label]) if label in spans else x
    return x


def _local(ctx: Local, *xs: torch.Tensor, inner: str, leaves: Sequence[tuple[str, int]], **attrs: Any) -> Any:
    op = op_named(inner)
    eq = _equation(tuple(a.type for a in ctx.node.args), {"inner": inner, **attrs})
    sizes = {x: n for labels, t in zip(eq.ins, xs, strict=True) for x, n in zip(labels, t.shape, strict=True) if x != ONE}
    if op.kind is Kind.CONTRACT and op.local is None and _is_matmul(eq):
        return _matmul(xs[0], xs[1], eq, dict(leaves))

    def run(spans: dict[str, Span], waiting: Sequence[tuple[str, int]]) -> tuple[torch.Tensor, ...]:
        if not waiting:
            parts = [_copied(_narrow(x, labels, spans)) for x, labels in zip(xs, eq.ins, strict=True)]
            made = op.run(*parts, **attrs) if op.local is None else op.local(_Leaf(ctx.node, ctx.coords, eq, spans), *parts, **attrs)
            return made if isinstance(made, tuple) else (made,)
        label, leaf = waiting[0]
        each = [run({**spans, label: (at, leaf)}, waiting[1:]) for at in range(0, sizes[label], leaf)]
        return tuple(torch.cat(ys, out.index(label)) if label in out else pairs(ys) for ys, out in zip(zip(*each, strict=True), eq.outs, strict=True))

    if op.kind is Kind.POINTWISE and op.local is None:
        return _without_tail(op.run, xs, attrs)
    found = run({}, leaves)
    return found if len(found) > 1 else found[0]


FULL = 64  # elements: several of a processor's vectors


def _without_tail(run: Any, xs: Sequence[torch.Tensor], attrs: Attrs) -> torch.Tensor:
    """A function of every element, of as many as fill vectors: what is left over is computed by other code, whose last digit differs."""
    xs = torch.broadcast_tensors(*xs)
    size = xs[0].numel()
    flat = [torch.cat([x.reshape(-1), x.new_ones(-size % FULL)]) for x in xs]
    made: torch.Tensor = run(*flat, **attrs)
    return made[:size].reshape(xs[0].shape)


def _is_matmul(eq: Equation) -> bool:
    """Whether it is one matmul of two matrices: what both operands have is summed."""
    return len(eq.ins) == 2 and all((c in eq.outs[0]) != (c in eq.ins[0] and c in eq.ins[1]) and c != ONE for labels in eq.ins for c in labels)


def _matmul(x: torch.Tensor, y: torch.Tensor, eq: Equation, leaf: Mapping[str, int]) -> torch.Tensor:
    """Every operand is split once; each leaf is one call on contiguous matrices."""
    (a, b), out = eq.ins, eq.outs[0]
    summed, left, right = [c for c in a if c not in out], [c for c in a if c in out], [c for c in b if c in out]
    rows = [_matrices(r, len(left) - 1, leaf.get(summed[0], 0)) for r in _cut(x.permute([a.index(c) for c in (*left, *summed)]), leaf.get(left[0], 0))]
    y = y.permute([b.index(c) for c in (*right, *summed)])
    columns = [[_copied(m.t()) for m in _matrices(c, len(right) - 1, leaf.get(summed[0], 0))] for c in _cut(y, leaf.get(right[0], 0))]
    made = torch.cat([torch.cat([pairs([torch.mm(m, n) for m, n in zip(r, c, strict=True)]) for c in columns], 1) for r in rows])
    sizes = [dict(zip((*a, *b), (*x.shape, *y.permute([(*right, *summed).index(c) for c in b]).shape), strict=True))[c] for c in (*left, *right)]
    return made.reshape(sizes).permute([(*left, *right).index(c) for c in out])


def _cut(x: torch.Tensor, leaf: int, dim: int = 0) -> Sequence[torch.Tensor]:
    return x.split(leaf, dim) if leaf else (x,)


def _matrices(x: torch.Tensor, more: int, leaf: int) -> list[torch.Tensor]:
    """[rows ..., summed ...] as matrices, one for each leaf of the first summed dim; `more` dims of rows come after the first."""
    return [_copied(m.reshape(math.prod(m.shape[: more + 1]), -1)) for m in _cut(x, leaf, more + 1)]


def _copied(x: torch.Tensor) -> torch.Tensor:
    """In memory of its own: a library chooses its kernel, and so the bits, by strides, also those of dims of one element, and by alignment."""
    return x.clone(memory_format=torch.contiguous_format)


def _pieces(node: Node) -> tuple[Node, dict[str, int], int]:
    """The op in one piece, on how many leaves of each label the busiest rank computes it, and bytes: operands are copied, results joined."""
    full = make(op_named(node.attr("inner")), node.args, _inner(dict(node.attrs)))
    eq = _equation(tuple(a.type for a in node.args), dict(node.attrs))
    local = {x: n for labels, a in zip(eq.ins, node.args, strict=True) for x, n in zip(labels, a.type.layout.largest_local, strict=True)}
    counts = {label: -(-local[label] // leaf) for label, leaf in node.attr("leaves")}
    return full, counts, 2 * memory_traffic(full) + 2 * sum(nbytes(t) for t in node.types) * (math.prod(counts.values()) > 1)


def _as_inner(*xs: Any, inner: str, leaves: Any, **attrs: Any) -> Any:
    return op_named(inner)(*xs, **attrs)


by_leaves = define(
    "by_leaves",
    kind=Kind.COMPOSITE,
    infer=_infer,
    run=lambda *xs, inner, leaves, **attrs: op_named(inner).run(*xs, **attrs),
    local=_local,
    written=_as_inner,
    erased=_as_inner,
    flops=lambda n: flops(_pieces(n)[0]),
    traffic=lambda n: _pieces(n)[2],
    pieces=_pieces,
    doc="another op, computed leaf by leaf: what it multiplies and sums is in an order that no layout changes",
)

__all__ = ["by_leaves", "in_leaves", "multiplies", "tree", "tree_sum"]
