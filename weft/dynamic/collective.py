"""Collectives inside a vertex function, as one torch op, so that they are steps of a round like any other.

All ranks of a group run the same rounds, so their collectives meet. Only dims within a row are exchanged; rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.codegen.local_memory import local_shape_of, partial_op
from weft.core.errors import StructureError
from weft.core.layout import Layout
from weft.core.node import Node, Type
from weft.dynamic.sizes import unit_of
from weft.ops.comm import all_gather, all_reduce, all_to_all, reduce_scatter, slice_
from weft.ops.registry import Kind, define
from weft.runtime import comm

Groups = Mapping[str, Any]  # axis -> process group of this rank along it; the default group where none is named


@dataclass(frozen=True)
class Exchange:
    """One collective of a program, seen from one rank."""

    kind: str
    have: Layout
    want: Layout
    axis: str
    at: tuple[tuple[str, int], ...]
    group: Any

    def run(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What the rank is to hold, in its shape there. Rows come before what is sharded, however many there are."""
        if self.kind == "all_reduce":
            return comm.all_reduce(x, self.group, partial_op(self.have, self.axis)).wait()  # type: ignore[no-any-return]
        if self.kind == "reduce_scatter":
            part, op = local_shape_of(self.want, self.axis, dict(self.at)), partial_op(self.have, self.axis)
            span = (-1, part.full, part.after)
            return comm.reduce_scatter(x, self.group, op, span=span, mine=part.mine, shape=shape).wait()  # type: ignore[no-any-return]
        if self.kind == "slice":
            return self._mine(x, shape)
        part, joined = local_shape_of(self.have, self.axis, dict(self.at)), self.have.gather(self.axis)
        full = shape if self.kind == "all_gather" else _of_rows(joined.local_shape(dict(self.at)))
        gathered = comm.all_gather(x, self.group, span=(-1, part.mine, part.after), full=part.full, shape=full).wait()
        return gathered if self.kind == "all_gather" else self._mine(gathered, shape)

    def _mine(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The part of a value replicated along the axis that this rank is to hold."""
        part = local_shape_of(self.want, self.axis, dict(self.at))
        return comm.slice_span(x, span=(-1, part.full, part.after), start=part.start, stop=part.start + part.mine, shape=shape)


def _of_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """However many rows there are."""
    return tuple(-1 if unit_of(n) else n for n in shape)


_KNOWN: list[Exchange] = []


def key(node: Node, at: Mapping[str, int], groups: Groups) -> int:
    """The number under which a collective is known to `exchange`."""
    axis = node.attr("axis")
    made = Exchange(node.op.name, node.args[0].layout, node.layout, axis, tuple(at.items()), groups.get(axis))
    if node.op not in (slice_, all_reduce, reduce_scatter, all_gather, all_to_all):
        raise StructureError("a vertex function cannot do this collective", needed="a gather, a slice or a sum", found=node.op.name)
    for layout in (made.have, made.want):
        shard = layout.where_sharded(axis)
        if shard is not None and unit_of(layout.shape[shard[0]]):
            raise StructureError(
                "vertices of a batch cannot be spread over ranks", needed="a sharding within the row of a vertex", found=str(layout),
                try_="give full samples to ranks: dynamic.assign",
            )  # fmt: skip
    if made not in _KNOWN:
        _KNOWN.append(made)
    return _KNOWN.index(made)


exchange = define(
    "exchange", kind=Kind.COMPOSITE, infer=lambda types, attrs: Type(types[0].dtype, Layout.of(types[0].mesh, attrs["shape"])),
    run=lambda x, key, shape: _KNOWN[key].run(x, shape), doc="a collective seen from one rank, by the number it is known under",
)  # fmt: skip
