"""Tokens dispatched to experts in chunks: while one chunk is gathered or summed, the experts are at work on another.

An op made of matmuls that reads what is gathered along an axis is done for chunks of that dim, each a part of every rank's slice; results
that have the dim are laid side by side, after their own sums over the ranks, and those that lack it are added up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import finest
from weft.core.node import Node, make, op_named, with_operands
from weft.core.program import Program
from weft.ops.comm import all_gather, all_reduce, reduce_scatter
from weft.ops.pointwise import add, cast
from weft.ops.registry import equation_of
from weft.ops.shape import concat, narrow, reshape, reshape_op
from weft.plan.place import rebuilt


@dataclass(frozen=True)
class _Parts:
    """A value in chunks: their nodes, the dim that they stand side by side along, and the shape of the full tensor, where that dim may be part of another."""

    nodes: tuple[Node, ...]
    dim: int
    shape: tuple[int, ...]

    def full(self) -> Node:
        return reshape(concat(list(self.nodes), self.dim), self.shape)  # type: ignore[no-any-return]

    def each(self, op: Any, shape: Sequence[int], **attrs: Any) -> _Parts:
        return _Parts(tuple(op(n, **attrs) for n in self.nodes), self.dim, tuple(shape))


def in_chunks(p: Program, axis: str, chunks: int = 2) -> Program:
    """The placed program with the experts that are reached along an axis at work in chunks, where a rank's tokens divide."""
    made: dict[Node, Node] = {}
    parts: dict[Node, _Parts] = {}
    items: dict[Node, list[Node | _Parts]] = {}

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        if n.op.is_item and n.args[0] in items:
            found = items[n.args[0]][n.attr("index")]
            if isinstance(found, Node):
                return found
            parts[n] = found
        elif len(n.args) == 1 and n.args[0] in parts and (on := _passed(n, parts[n.args[0]])) is not None and on.full().type == n.type:
            parts[n] = on
        elif (results := _chunked(n, made, axis, chunks)) is not None:
            if len(n.types) > 1:
                items[n] = results
                return n
            parts[n] = results[0]  # type: ignore[assignment]
        else:
            return with_operands(n, args)
        return parts[n].full()

    return rebuilt(p, node, made)


def _chunked(n: Node, made: dict[Node, Node], axis: str, chunks: int) -> list[Node | _Parts] | None:
    """The results of an op made of matmuls, whose tokens, the rows of its first operand, are gathered along the axis; none where there is nothing to be
    chunked. Where experts are gathered instead, picks count all of them, and some alone would be others."""
    eq, first = equation_of(n) if n.op.matmuls is not None else None, n.args[0] if n.args else n
    if eq is None or first.op is not all_gather or first.attr("axis") != axis or len(first.args) != 1:
        return None
    at = first.args[0].layout.where_sharded(axis)
    assert at is not None
    atoms, lone = finest(first.args[0].layout.dims[at[0]], n.mesh)
    last = max((i for i, a in enumerate(atoms) if a.axes), default=-1)
    label, outer = eq.label(0, at[0]), math.prod(a.size for a in atoms[: last + 1])
    inner = first.shape[at[0]] // outer
    dims = dict(eq.dims_of(label))
    if lone or inner % chunks or label in eq.unsharded:
        return None
    try:
        given = [_split(made[a], dims[k], outer, chunks, axis) if k in dims else [made[a]] * chunks for k, a in enumerate(n.args)]
        runs = [with_operands(n, args) for args in zip(*given, strict=True)]
        return [_joined(runs, i, labels, label, outer, n.types[i].shape) for i, labels in enumerate(eq.outs)]
    except (LayoutError, TypeMismatch):  # slices that do not divide so
        return None


def _split(x: Node, dim: int, outer: int, chunks: int, axis: str) -> list[Node]:
    """An operand in chunks; what is gathered is gathered chunk by chunk."""
    gathers = x.op is all_gather and x.attr("axis") == axis and len(x.args) == 1
    full = x.args[0] if gathers else x
    inner = x.shape[dim] // outer
    chunked = reshape(full, (*x.shape[:dim], outer, inner, *x.shape[dim + 1 :]))
    size = inner // chunks
    pieces = [narrow(chunked, dim + 1, i * size, (i + 1) * size) for i in range(chunks)]
    pieces = [all_gather(piece, axis=axis) for piece in pieces] if gathers else pieces
    return [reshape(piece, (*x.shape[:dim], outer * size, *x.shape[dim + 1 :])) for piece in pieces]


def _joined(runs: Sequence[Node], i: int, labels: Sequence[str], label: str, outer: int, shape: tuple[int, ...]) -> Node | _Parts:
    """One result of all chunks."""
    each = [make(op_named("item"), (r,), {"index": i}) if len(r.types) > 1 else r for r in runs]
    if label not in labels:
        return functools.reduce(add, each)
    d = labels.index(label)
    return _Parts(tuple(reshape(x, (*shape[:d], outer, -1, *shape[d + 1 :])) for x in each), d + 1, shape)


def _passed(n: Node, x: _Parts) -> _Parts | None:
    """A cast, a reshape or a sum over ranks of every chunk by itself."""
    merged = len(x.shape) < x.nodes[0].ndim  # the dim of the chunks is the inner part of another
    if n.op is cast:
        return x.each(cast, n.shape, dtype=n.attr("dtype"))
    if n.op is reshape_op:
        return _reshaped(x, n.shape)
    if n.op is all_reduce:
        return x.each(all_reduce, n.shape, axis=n.attr("axis"))
    if n.op is reduce_scatter and not n.attr("within") and (merged or n.attr("dim") != x.dim):
        return x.each(reduce_scatter, n.shape, axis=n.attr("axis"), dim=n.attr("dim") + (merged and n.attr("dim") >= x.dim))
    return None


def _reshaped(x: _Parts, shape: tuple[int, ...]) -> _Parts | None:
    """The chunks of another shape: side by side inside the one dim that what stands before them ends in."""
    before, chunks = math.prod(x.nodes[0].shape[: x.dim]), len(x.nodes)
    for d, size in enumerate(shape):
        outer, over = divmod(before, math.prod(shape[:d]))
        if not over and outer and size % (outer * chunks) == 0:
            split = (*shape[:d], outer, size // outer // chunks, *shape[d + 1 :])
            return _Parts(tuple(reshape(p, split) for p in x.nodes), d + 1, shape)
    return None
