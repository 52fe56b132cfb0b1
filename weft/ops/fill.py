"""Values made from nothing in any layout at no cost: a rank makes its own slice, knowing where it lies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch

from weft.core.errors import TypeMismatch
from weft.core.layout import Layout, Mesh, S, Within
from weft.core.node import DTYPE_NAMES, Attrs, Node, Type, dtype_of, user_line
from weft.ops.pointwise import cast, elementwise, eq, fit
from weft.ops.registry import Kind, Linear, Local, Types, define
from weft.ops.shape import one_dim, reshape

Shards: TypeAlias = tuple[tuple[str, int, Within], ...]


_AS_CUT: ContextVar[bool] = ContextVar("as_cut", default=False)


@contextmanager
def assuming_sharded() -> Iterator[None]:
    """Ops are written as where a dim is sharded that they keep full, whether it is or not."""
    token = _AS_CUT.set(True)
    try:
        yield
    finally:
        _AS_CUT.reset(token)


def is_sharded(x: Node, dim: int) -> bool:
    """Whether any axis shards the dim."""
    if not -x.ndim <= dim < x.ndim:
        raise TypeMismatch(f"no dim {dim} in a tensor of {x.ndim} dims", needed=f"{abs(dim)} dims or more", found=str(x.type), where=user_line())
    return _AS_CUT.get() or any(atom.axes for atom in x.layout.dims[dim])


def shardings_of(x: Node, dims: Iterable[int] | None = None) -> Shards:
    """How (some) dims of a value are sharded, as (axis, dim, within)."""
    wanted = range(x.ndim) if dims is None else [d % x.ndim for d in dims]
    places = [(axis, x.type.on(axis)) for axis in x.mesh.axes]
    return tuple((axis, p.dim, p.within) for axis, p in places if isinstance(p, S) and p.dim in wanted)


def _layout_of(shape: tuple[int, ...], attrs: Attrs) -> Type:
    layout = Layout.of(Mesh(**dict(attrs["mesh"])), shape)
    for axis, dim, within in attrs.get("shards", ()):
        layout = layout.shard(axis, dim, within)
    return Type(dtype_of(attrs["dtype"]), layout)


def _source_normal(attrs: Attrs) -> Attrs:
    """Names and plain tuples only, so that the node prints and parses back."""
    mesh = attrs["mesh"]
    out = {**attrs, "dtype": DTYPE_NAMES[dtype_of(attrs["dtype"])], "mesh": mesh.key if isinstance(mesh, Mesh) else mesh}
    return {k: v for k, v in out.items() if k != "shards" or v}


# -- full ----------------------------------------------------------------------------------------------------------------------


def _full_normal(attrs: Attrs) -> Attrs:
    value, shape = attrs["value"], tuple(int(n) for n in attrs["shape"])
    plain = isinstance(value, (str, bool, int)) or math.isfinite(value)
    return _source_normal({**attrs, "shape": shape, "value": value if plain else str(value)})


def _filled(shape: tuple[int, ...], value: float | str, dtype: str) -> torch.Tensor:
    return torch.full(shape, float(value) if isinstance(value, str) else value, dtype=dtype_of(dtype))


full_op = define(
    "full",
    kind=Kind.SOURCE,
    infer=lambda types, attrs: _layout_of(attrs["shape"], attrs),
    run=lambda shape, value, dtype, mesh, shards=(): _filled(shape, value, dtype),
    local=lambda ctx, shape, value, dtype, mesh, shards=(): _filled(ctx.out_shape(), value, dtype),
    vjp=lambda n, ct: (),
    normal=_full_normal,
)


def full(shape: Iterable[int], value: float, mesh: Mesh, dtype: str | torch.dtype = "f32", shards: Shards = ()) -> Any:
    """One number everywhere."""
    return full_op(shape=tuple(shape), value=value, dtype=dtype, mesh=mesh, shards=shards)


def zeros_like(x: Any) -> Any:
    """Zeros of the same type, replicated along axes where `x` is partial."""
    return full(x.shape, 0.0 if x.dtype.is_floating_point else 0, x.mesh, x.dtype, shardings_of(x))


# -- arange --------------------------------------------------------------------------------------------------------------------


def _arange_infer(types: Types, attrs: Attrs) -> Type:
    if attrs["size"] < 0:
        raise TypeMismatch("arange of a negative size", needed="a size of 0 or more", found=str(attrs["size"]), where=user_line())
    return _layout_of((attrs["size"],), attrs)


def _steps(at: torch.Tensor, start: float, step: float, dtype: str) -> torch.Tensor:
    fine = isinstance(step, float) or isinstance(start, float)
    return ((at.double() if fine else at) * step + start).to(dtype_of(dtype))


def _arange_local(ctx: Local, size: int, start: float, step: float, dtype: str, mesh: Any, shards: Shards = ()) -> torch.Tensor:
    return _steps(ctx.out_positions(0), start, step, dtype)


arange_op = define(
    "arange",
    kind=Kind.SOURCE,
    infer=_arange_infer,
    run=lambda size, start, step, dtype, mesh, shards=(): _steps(torch.arange(size), start, step, dtype),
    local=_arange_local,
    vjp=lambda n, ct: (),
    normal=_source_normal,
)


def arange(size: int, mesh: Mesh, *, start: float = 0, step: float = 1, dtype: str | torch.dtype = "i64", shards: Shards = ()) -> Any:
    """start, start + step, ...: `size` numbers, each rank making those it holds."""
    return arange_op(size=size, start=start, step=step, dtype=dtype, mesh=mesh, shards=shards)


def indices(x: Any, dim: int) -> Any:
    """The indices of a dim, laid out as the dim is."""
    dim = one_dim(dim, x.ndim)
    return arange(x.shape[dim], x.mesh, shards=tuple((axis, 0, within) for axis, _, within in shardings_of(x, [dim])))


def one_hot(index: Any, size: int, dtype: str | torch.dtype = "i64", shards: Shards = ()) -> Any:
    """A new last dim of `size` with 1 at the index; `shards` (axis, 0, within) of it cost nothing."""
    hit = eq(reshape(index, (*index.shape, 1)), arange(size, index.mesh, dtype=index.dtype, shards=shards))
    return cast(hit, dtype=dtype)


# -- no gradient ---------------------------------------------------------------------------------------------------------------

stop_gradient = define(
    "stop_gradient",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=1,
    run=lambda x: x.detach().clone(),
    linear=Linear.FIRST,
    monotone=(frozenset({0}),),
    vjp=lambda n, ct: (None,),
    field=lambda p, x: x.clone(),
    doc="the value itself, taken as a constant",
)


class _Guided(torch.autograd.Function):
    """A value whose gradient goes elsewhere, so that torch too takes it as the op's vjp does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, to: torch.Tensor, by: torch.Tensor | None) -> torch.Tensor:
        ctx.shape, ctx.by = to.shape, by
        return value.clone()

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> Any:  # type: ignore[override]
        return None, (ct if ctx.by is None else ct * ctx.by).sum_to_size(ctx.shape), None


def _guided(value: torch.Tensor, to: torch.Tensor, by: torch.Tensor | None = None) -> torch.Tensor:
    value = value.expand(torch.broadcast_shapes(value.shape, (to if by is None else by).shape)).detach()
    return _Guided.apply(value, to, by) if torch.is_grad_enabled() and to.requires_grad else value.clone()  # type: ignore[no-any-return,no-untyped-call]


scale_gradient = define(
    "scale_gradient",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=2,
    run=lambda x, by: _guided(x, x, by.detach()),
    linear=Linear.FIRST,
    vjp=lambda n, ct: (fit(ct * n.args[1], n.args[0]), None),
    doc="(x, by) -> x itself, whose gradient is multiplied",
)

overwritten = define(
    "overwritten",
    kind=Kind.POINTWISE,
    equation=elementwise,
    arity=2,
    run=_guided,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (None, fit(ct, n.args[1])),
    doc="(x, old) -> x itself, whose gradient goes to old: what is written in place where gradients are off",
)

__all__ = [
    "Shards", "arange", "full", "indices", "is_sharded", "one_dim", "one_hot", "overwritten", "scale_gradient", "shardings_of", "stop_gradient", "zeros_like",
]  # fmt: skip
