"""Collectives inside a vertex function, as one torch op, so that they are steps of a round like any other.

All ranks of a group run the same rounds, so their collectives meet. Only dims within a row are exchanged; rows stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import StructureError
from weft.core.layout import Layout
from weft.core.node import Node, Type
from weft.dynamic.sizes import EDGES, ROWS
from weft.ops.comm import all_gather, all_reduce, all_to_all, reduce_scatter, slice_
from weft.ops.registry import Kind, define

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

    def run(self, x: Tensor) -> Tensor:
        if self.kind == "slice":
            return self._mine(x)
        if self.kind in ("all_reduce", "reduce_scatter"):
            total = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            return total if self.kind == "all_reduce" else self._mine(total)
        whole = self._gathered(x)
        return whole if self.kind == "all_gather" else self._mine(whole)

    def _mine(self, x: Tensor) -> Tensor:
        """The part of a value replicated along the axis that this rank is to hold."""
        dim = _sharded_dim(self.want, self.axis)
        return x.index_select(dim, self.want.positions(dim, dict(self.at)).to(x.device))

    def _gathered(self, x: Tensor) -> Tensor:
        """What every rank along the axis holds, put together."""
        dim, size = _sharded_dim(self.have, self.axis), self.have.mesh.size(self.axis)
        places = [self.have.positions(dim, {**dict(self.at), self.axis: k}) for k in range(size)]
        parts = [x.new_empty([len(p) if d == dim else n for d, n in enumerate(x.shape)]) for p in places]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        order = torch.argsort(torch.cat(places)).to(x.device)
        return torch.cat(parts, dim).index_select(dim, order)


_KNOWN: list[Exchange] = []


def key(node: Node, at: Mapping[str, int], groups: Groups) -> int:
    """The number under which a collective is known to `exchange`."""
    axis = node.attr("axis")
    made = Exchange(node.op.name, node.args[0].layout, node.layout, axis, tuple(at.items()), groups.get(axis))
    if node.op not in (slice_, all_reduce, reduce_scatter, all_gather, all_to_all):
        raise StructureError("a vertex function cannot do this collective", needed="a gather, a slice or a sum", found=node.op.name)
    for layout in (made.have, made.want):
        cut = layout.where_sharded(axis)
        if cut is not None and any(n and layout.shape[cut[0]] % n == 0 for n in (ROWS, EDGES)):
            raise StructureError(
                "vertices of a batch cannot be spread over ranks", needed="a sharding within the row of a vertex", found=str(layout),
                try_="give full samples to ranks: dynamic.assign",
            )  # fmt: skip
    if made not in _KNOWN:
        _KNOWN.append(made)
    return _KNOWN.index(made)


def _sharded_dim(layout: Layout, axis: str) -> int:
    found = layout.where_sharded(axis)
    assert found is not None
    return found[0]


exchange = define(
    "exchange", kind=Kind.WHOLE, infer=lambda types, attrs: Type(types[0].dtype, Layout.of(types[0].mesh, attrs["shape"])),
    run=lambda x, key, shape: _KNOWN[key].run(x), doc="a collective seen from one rank, by the number it is known under",
)  # fmt: skip
