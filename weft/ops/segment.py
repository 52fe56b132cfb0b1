"""The maximum over segments of rows, next to `put`, which adds them up: `index` names the segment of each row."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.node import Attrs, Node
from weft.ops.comm import all_reduce_partials
from weft.ops.embed import find, first_elements, need_index, put, take
from weft.ops.pointwise import cast, eq, maximum
from weft.ops.registry import Equation, Kind, Types, define


def _equation(types: Types, attrs: Attrs) -> Equation:
    """The rows of one segment may lie anywhere, so they stay in one piece; the segments may be sharded."""
    need_index("segment_max", types, 1, 2)
    rest = tuple(f"d{i}" for i in range(1, len(types[0].shape)))
    return Equation((("e", *rest), ("e",), ("v",)), (("v", *rest),), unsharded=frozenset("e"))


def _run(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    at, hit = find(index, rows)
    x, at = x.index_select(0, hit.nonzero().reshape(-1)), at[hit]
    spread = at.long().reshape(-1, *[1] * (x.ndim - 1)).expand_as(x)
    return x.new_zeros((len(rows), *x.shape[1:])).scatter_reduce(0, spread, x, "amax", include_self=False)


def _vjp(n: Node, ct: Node) -> Any:
    """Rows that attain the maximum share the cotangent."""
    x, index, rows = n.args
    hit = cast(eq(x, all_reduce_partials(take(n, index, 0))), dtype=x.dtype)  # partial where the segments are sharded
    ties = put(hit, index, rows, 0)
    return hit * take(ct / maximum(ties, 1.0), index, 0), None, None


segment_max_op = define(
    "segment_max", kind=Kind.COMPOSITE, equation=_equation, run=_run, dtype=lambda types, attrs: types[0].dtype, vjp=_vjp, flops=first_elements,
    doc="(x, index, rows) -> for each of the ascending rows the maximum of the slices of x whose index names it; 0 where there are none",
)  # fmt: skip


def segment_max(x: Any, index: Any, rows: Any) -> Any:
    """The maximum of the rows of `x` in each segment, 0 in one without rows."""
    return segment_max_op(x, index, rows)


__all__ = ["segment_max"]
