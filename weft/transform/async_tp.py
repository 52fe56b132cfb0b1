"""Tensor parallelism in chunks: while one chunk of a matmul's result is summed over the ranks, or of its operand gathered, another is multiplied."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from weft.core.errors import InvalidTransform
from weft.core.layout import S
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.comm import all_gather, all_reduce, reduce_scatter
from weft.ops.registry import Kind
from weft.schedule import overlap

CHUNKS = 4  # at most


def async_tp(p: Program, axis: str) -> Program:
    """The placed program with a group for every matmul and the collective along the axis that it makes the operand of, or whose result it reads."""
    for stages in list(_pairs(p, axis)):
        grouped = {n for g in p.groups for n in g.nodes}
        if grouped.isdisjoint(stages):
            p = _in_chunks(p, stages)
    return p


def _pairs(p: Program, axis: str) -> Iterator[tuple[Node, ...]]:
    readers: dict[Node, list[Node]] = {}
    for n in p.nodes:
        for a in dict.fromkeys(n.args):
            readers.setdefault(a, []).append(n)
    kept = {n for _, n in p.outputs}
    for n in p.nodes:
        if n.attr("axis") != axis:
            continue
        if n.op in (all_reduce, reduce_scatter) and n.args[0].op.kind is Kind.CONTRACT and readers[n.args[0]] == [n] and n.args[0] not in kept:
            yield n.args[0], n
        elif n.op is all_gather:
            matmuls = [r for r in readers.get(n, ()) if r.op.kind is Kind.CONTRACT]
            if matmuls:
                yield n, matmuls[0]


def _in_chunks(p: Program, stages: tuple[Node, ...]) -> Program:
    """Along the first dim that all of them treat chunk by chunk, in as many even chunks as every rank has; as it was where there is none."""
    for dim, size in enumerate(stages[0].shape):
        layouts = [n.layout for n in (*stages, *stages[0].args, *stages[1].args) if n.ndim > dim]
        axes = {a for layout in layouts for a, place in layout.placements.items() if isinstance(place, S) and place.dim == dim}
        each = math.prod(map(p.mesh.size, axes))
        for chunks in range(CHUNKS, 1, -1):
            if size % (each * chunks) == 0:
                with contextlib.suppress(InvalidTransform):
                    return overlap(p, *stages, dim=dim, chunks=chunks)
    return p
