"""Reading and writing by index: take and gather, and their transposes, which add values up at the rows they came from.

A lookup along a sharded dim reads the rows this rank holds, zero for the rest, so the result is a partial sum. The transposes take
the rows they fill as an operand (`indices` makes them, sharded as one likes), so their layouts too follow from the equation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.core.errors import NotDifferentiable, TypeMismatch
from weft.core.layout import P
from weft.core.node import Attrs, Node, Type, user_line
from weft.ops.comm import all_reduce, is_comm
from weft.ops.fill import arange_op, indices, one_dim, stop_gradient, zeros_like
from weft.ops.pointwise import eq, where
from weft.ops.registry import Equation, Kind, Linear, Local, Types, define, nbytes
from weft.ops.shape import reshape


def need_index(name: str, types: Types, *args: int) -> None:
    for k in args:
        if types[k].dtype not in (torch.int64, torch.int32):
            needed = f"i64 or i32 in operand {k}"
            raise TypeMismatch(f"{name} looks up by integers", needed=needed, found=str(types[k]), where=user_line())


def find(index: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each index stands among the ascending rows held, and whether it is there at all."""
    if not len(stored):
        return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    stored = stored.to(index.device, index.dtype)
    traced = isinstance(index, FakeTensor)  # Inductor does not search in what it makes on the way; to count, it reads once
    at = (stored < index.unsqueeze(-1)).sum(-1) if traced else torch.searchsorted(stored, index.contiguous())
    at = at.clamp(max=len(stored) - 1)
    return at, stored[at] == index


def find_local(ctx: Local, index: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same among the rows of the first operand that this rank holds."""
    run = ctx.run(0, dim)
    if not run:
        return find(index, ctx.positions(0, dim))
    at = index - run.start
    return at.clamp(0, len(run) - 1), (at >= 0) & (at < len(run))


def out_elements(n: Node) -> float:
    """Elements of the results, on the busiest rank."""
    return float(sum(math.prod(t.layout.largest_local) for t in n.types))


def first_elements(n: Node) -> float:
    return float(math.prod(n.args[0].type.layout.largest_local))


def _labels(rank: int, dim: int, *instead: str) -> tuple[str, ...]:
    """One label per dim, with others in place of `dim`."""
    return (*(f"d{i}" for i in range(dim)), *instead, *(f"d{i}" for i in range(dim + 1, rank)))


def _first(types: Types, attrs: Attrs) -> torch.dtype:
    return types[0].dtype


# -- take: full rows, by one index of any shape ---------------------------------------------------------------------------------


def _take_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("take", types, 1)
    rank = len(types[0].shape)
    dim = one_dim(attrs["dim"], rank)
    at = tuple(f"i{k}" for k in range(len(types[1].shape)))
    return Equation((_labels(rank, dim, "v"), at), (_labels(rank, dim, *at),))


def _take_run(x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    rows = x.index_select(dim, index.reshape(-1))
    return rows.reshape((*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def _take_local(ctx: Local, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    if not _is_sharded(ctx.node.args[0].type, dim):
        return _take_run(x, index, dim)
    if x.shape[dim] == 0:
        return x.new_zeros(ctx.out_shape())
    at, hit = find_local(ctx, index, dim)
    hit = hit.reshape((*index.shape, *(1,) * (x.ndim - 1 - dim)))
    return torch.where(hit, _take_run(x, at, dim), torch.zeros((), dtype=x.dtype, device=x.device))


def _is_sharded(type_: Type, dim: int) -> bool:
    return any(atom.axes for atom in type_.layout.dims[dim])


take_op = define(
    "take",
    kind=Kind.COMPOSITE,
    equation=_take_equation,
    run=_take_run,
    local=_take_local,
    by_dim=True,
    dtype=_first,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (put(ct, n.args[1], indices(n.args[0], n.attr("dim")), n.attr("dim")), None),
    field=lambda p, x, index, dim: _take_run(x, index, dim),
    flops=out_elements,
    traffic=lambda n: nbytes(n.args[1].type) + 2 * nbytes(n.type),  # rows that are asked for, not the table
    adds_nothing=True,
)


def take(x: Any, index: Any, dim: int = 0) -> Any:
    """The slices of `x` along a dim that the index names; its shape stands in place of the dim."""
    return take_op(x, index, dim=one_dim(dim, x.ndim))


def embedding(weight: Any, index: Any, padding_idx: int | None = None) -> Any:
    """Rows of a table [v, d]. A table sharded along v gives a partial sum. The padding row gets no gradient."""
    if weight.ndim != 2:
        raise TypeMismatch("embedding needs a table", needed="weight of 2 dims, [v, d]", found=str(weight.type), where=user_line())
    rows = take(weight, index, 0)
    if padding_idx is None:
        return rows
    pad = eq(reshape(index, (*index.shape, 1)), padding_idx % weight.shape[0])
    return where(pad, stop_gradient(rows), rows)


def _put_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("put", types, 1, 2)
    spread = len(types[1].shape)
    rank = len(types[0].shape) - spread + 1
    at = tuple(f"i{k}" for k in range(spread))
    dim = attrs["dim"]
    return Equation((_labels(rank, dim, *at), at, ("v",)), (_labels(rank, dim, "v"),))


def _put_run(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    at, hit = find(index.reshape(-1), rows)
    x = x.reshape(*x.shape[:dim], index.numel(), *x.shape[dim + index.ndim :])
    x = x.index_select(dim, hit.nonzero().reshape(-1))
    out = x.new_zeros(*x.shape[:dim], len(rows), *x.shape[dim + 1 :])
    return out.index_add(dim, at[hit], x)


put_op = define(
    "put",
    kind=Kind.COMPOSITE,
    equation=_put_equation,
    run=_put_run,
    dtype=_first,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (take(ct, _all_rows(n), n.attr("dim")), None, None),
    flops=first_elements,
    traffic=lambda n: nbytes(n.type) + 3 * nbytes(n.args[0].type) + nbytes(n.args[1].type),  # zeros, and slices added to theirs
)


def _all_rows(n: Node) -> Node:
    """The index of a put, if its rows count from 0: only then do the rows of the result go by their index."""
    rows = before_comm(n.args[2])
    if rows.op is not arange_op or (rows.attr("start"), rows.attr("step")) != (0, 1):
        needed = "rows made by indices(...)"
        raise NotDifferentiable(f"{n.op.name} has no gradient for rows of one's own", needed=needed, found=rows.op.name, where=user_line())
    return n.args[1]


def before_comm(x: Node) -> Node:
    """What a value was before it was communicated; the value is the same."""
    while True:
        if is_comm(x) and len(x.args) == 1:
            x = x.args[0]
        elif x.op.is_item and is_comm(x.args[0]):
            x = x.args[0].args[x.attr("index")]
        else:
            return x


def put(x: Any, index: Any, rows: Any, dim: int = 0) -> Any:
    """take's transpose: adds each slice of `x` to the row its index names. `rows` [v] are the ascending rows to fill."""
    return put_op(x, index, rows, dim=one_dim(dim, x.ndim - index.ndim + 1))


def index_add(x: Any, index: Any, src: Any, dim: int = 0) -> Any:
    """`x` with slices of `src` added at the rows of a dim that the index [n] names."""
    return _added(x, put(src, index, indices(x, dim), dim))


# -- gather: one element per index, all else the same -------------------------------------------------------------------------------


def _gather_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("gather", types, 1)
    rank = len(types[0].shape)
    dim = one_dim(attrs["dim"], rank)
    return Equation((_labels(rank, dim, "v"), _labels(rank, dim, "k")), (_labels(rank, dim, "k"),))


def _gather_local(ctx: Local, x: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    if not _is_sharded(ctx.node.args[0].type, dim):
        return torch.gather(x, dim, index.long())
    if x.shape[dim] == 0:
        return x.new_zeros(ctx.out_shape())
    at, hit = find_local(ctx, index, dim)
    return torch.where(hit, torch.gather(x, dim, at.long()), torch.zeros((), dtype=x.dtype, device=x.device))


_gather = define(
    "gather",
    kind=Kind.COMPOSITE,
    equation=_gather_equation,
    run=lambda x, index, dim: torch.gather(x, dim, index.long()),
    local=_gather_local,
    by_dim=True,
    dtype=_first,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (scatter_sum(ct, n.args[1], indices(n.args[0], n.attr("dim")), n.attr("dim")), None),
    field=lambda p, x, index, dim: torch.gather(x, dim, index.long()),
    traffic=lambda n: nbytes(n.args[1].type) + 2 * nbytes(n.type),  # elements that are asked for
    flops=out_elements,
    adds_nothing=True,
)


def gather(x: Any, index: Any, dim: int) -> Any:
    """torch.gather, the other dims of equal size: out[.., k, ..] = x[.., index[.., k, ..], ..]."""
    return _gather(x, index, dim=one_dim(dim, x.ndim))


def pick(x: Any, index: Any) -> Any:
    """One element of the last dim for each index: x[..., v], index[...] -> [...]; partial where that dim is sharded."""
    return reshape(gather(x, reshape(index, (*index.shape, 1)), -1), index.shape)


def _scatter_sum_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("scatter_sum", types, 1, 2)
    rank = len(types[0].shape)
    dim = one_dim(attrs["dim"], rank)
    k = _labels(rank, dim, "k")
    return Equation((k, k, ("v",)), (_labels(rank, dim, "v"),))


def _scatter_sum_run(x: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    out = x.new_zeros(*x.shape[:dim], len(rows), *x.shape[dim + 1 :])
    if not len(rows):
        return out
    at, hit = find(index, rows)
    return out.scatter_add(dim, at.long(), torch.where(hit, x, torch.zeros((), dtype=x.dtype, device=x.device)))


_scatter_sum = define(
    "scatter_sum",
    kind=Kind.COMPOSITE,
    equation=_scatter_sum_equation,
    run=_scatter_sum_run,
    dtype=_first,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (gather(ct, _all_rows(n), n.attr("dim")), None, None),
    flops=first_elements,
)


def scatter_sum(x: Any, index: Any, rows: Any, dim: int) -> Any:
    """gather's transpose: adds each element of `x` to the row its index names. `rows` [v] are the ascending rows to fill."""
    return _scatter_sum(x, index, rows, dim=one_dim(dim, x.ndim))


def scatter_add(x: Any, index: Any, src: Any, dim: int) -> Any:
    """torch.scatter_add, the other dims of equal size."""
    return _added(x, scatter_sum(src, index, indices(x, dim), dim))


def _added(x: Any, more: Any) -> Any:
    """The sum, where a partial addend is first reduced to meet an `x` that is not partial."""
    for axis in x.mesh.axes:
        if isinstance(more.type.on(axis), P) and not isinstance(x.type.on(axis), P):
            more = all_reduce(more, axis=axis)
    return x + more


# -- scatter: overwrites ---------------------------------------------------------------------------------------------------------


def _scatter_equation(types: Types, attrs: Attrs) -> Equation:
    need_index("scatter", types, 1)
    rank = len(types[0].shape)
    dim = one_dim(attrs["dim"], rank)
    v, k = _labels(rank, dim, "v"), _labels(rank, dim, "k")
    return Equation((v, k, k), (v,), unsharded=frozenset("k"))


def _scatter_dtype(types: Types, attrs: Attrs) -> torch.dtype:
    if types[0].dtype != types[2].dtype:
        found = str(types[2])
        raise TypeMismatch("scatter writes its own dtype", needed=str(types[0]), found=found, try_="cast(src, dtype)", where=user_line())
    return types[0].dtype


def _scatter_local(ctx: Local, x: torch.Tensor, index: torch.Tensor, src: torch.Tensor, dim: int) -> torch.Tensor:
    """What falls outside the rows held is written to one row past them, and that row dropped."""
    at, hit = find_local(ctx, index, dim)
    at = torch.where(hit, at, x.shape[dim]).long()
    spare = x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :])
    return torch.cat([x, spare], dim).scatter(dim, at, src).narrow(dim, 0, x.shape[dim])


_scatter = define(
    "scatter",
    kind=Kind.COMPOSITE,
    equation=_scatter_equation,
    run=lambda x, index, src, dim: torch.scatter(x, dim, index.long(), src),
    local=_scatter_local,
    by_dim=True,
    dtype=_scatter_dtype,
    linear=(frozenset({0, 2}),),
    vjp=lambda n, ct: (scatter(ct, n.args[1], zeros_like(n.args[2]), n.attr("dim")), None, gather(ct, n.args[1], n.attr("dim"))),
    flops=out_elements,
    adds_nothing=True,
)


def scatter(x: Any, index: Any, src: Any, dim: int) -> Any:
    """`x` with src[.., k, ..] written at index[.., k, ..] along a dim; an index named twice keeps either value."""
    return _scatter(x, index, src, dim=one_dim(dim, x.ndim))


__all__ = [
    "embedding", "find", "gather", "index_add", "need_index", "out_elements", "pick", "put", "scatter", "scatter_add",
    "scatter_sum", "take",
]  # fmt: skip
