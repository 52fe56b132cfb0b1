"""Rotary position embedding: pairs of features turned by an angle that grows with the global position, or by given tables."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.node import DTYPE_NAMES, Attrs, Node, user_line
from weft.ops.embed import out_elements
from weft.ops.fill import arange, one_dim
from weft.ops.norm import need_float, wide, wide_dtype
from weft.ops.pointwise import elementwise, exp, fit
from weft.ops.registry import Equation, Kind, Linear, Local, Types, define
from weft.ops.shape import concat, narrow


def _equation(types: Types, attrs: Attrs) -> Equation:
    """x [..., s, ..., d], frequencies [d / 2], positions [s] or [b, s] if given -> like x."""
    need_float("rotary", types, 0, 1)
    shape, dim = types[0].shape, attrs["dim"]
    if not 0 <= dim < len(shape) - 1 or shape[-1] % 2 or types[1].shape != (shape[-1] // 2,):
        needed = "x [..., s, ..., d] with d even and frequencies [d / 2]"
        raise TypeMismatch("rotary does not fit its operands", needed=needed, found=f"{types[0]} and {types[1]}", where=user_line())
    x = (*(f"d{i}" for i in range(len(shape) - 1)), "d")
    at = () if len(types) < 3 else ((x[dim],),) if len(types[2].shape) == 1 else ((x[0], x[dim]),)
    return Equation((x, ("f",), *at), (x,), unsharded=frozenset("df"))


def _rotate(x: torch.Tensor, freq: torch.Tensor, at: torch.Tensor, attrs: Attrs) -> torch.Tensor:
    """`at` [s] or [b, s]: the positions of the elements there."""
    angle = at.to(freq.device, freq.dtype)[..., None] * freq
    dim, ndim = attrs["dim"], x.ndim
    shape = [1] * (ndim - 1) + [len(freq)]
    shape[dim] = at.shape[-1]
    if at.ndim == 2:
        shape[0] = at.shape[0]
    cos, sin = angle.cos().reshape(shape), angle.sin().reshape(shape)
    sin = -sin if attrs.get("inverse") else sin
    h, w = x.shape[-1] // 2, wide(x)
    a, b = (w[..., 0::2], w[..., 1::2]) if attrs.get("interleaved") else (w[..., :h], w[..., h:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(pair, -1).flatten(-2) if attrs.get("interleaved") else torch.cat(pair, -1)
    return out.to(x.dtype)


def _run(x: torch.Tensor, freq: torch.Tensor, *at: torch.Tensor, **attrs: Any) -> torch.Tensor:
    here = at[0] if at else torch.arange(x.shape[attrs["dim"]])
    return _rotate(x, freq, here + attrs.get("start", 0), attrs)


def _local(ctx: Local, x: torch.Tensor, freq: torch.Tensor, *at: torch.Tensor, **attrs: Any) -> torch.Tensor:
    here = at[0] if at else ctx.positions(0, attrs["dim"])
    return _rotate(x, freq, here + attrs.get("start", 0), attrs)


def _vjp(n: Any, ct: Any) -> Any:
    attrs = {**dict(n.attrs), "inverse": not n.attr("inverse", False)}
    return _rotary(ct, *n.args[1:], **attrs), *(None for _ in n.args[1:])


_rotary = define(
    "rotary",
    kind=Kind.COMPOSITE,
    equation=_equation,
    run=_run,
    local=_local,
    by_dim=True,
    dtype=lambda types, attrs: types[0].dtype,
    linear=Linear.FIRST,
    vjp=_vjp,
    normal=lambda attrs: {k: v for k, v in attrs.items() if k == "dim" or v},
    flops=lambda n: 3.0 * out_elements(n),
    doc="turns pairs of features by position * frequency; the frequencies are data and get no gradient",
    adds_nothing=True,
)


def frequencies(d: int, like: Any, base: float = 10000.0) -> Any:
    """base^(-2i/d) for i < d/2."""
    dtype = DTYPE_NAMES[wide_dtype(like.dtype)] if like.dtype.is_floating_point else "f32"
    return exp(arange(d // 2, like.mesh, dtype=dtype) * (-2 * math.log(base) / d))


def rotary(
    x: Any,
    freq: Any = None,
    positions: Any = None,
    *,
    dim: int = -2,
    base: float = 10000.0,
    rotated: int | None = None,
    interleaved: bool = False,
    start: int = 0,
) -> Any:
    """x [..., s, d] turned by its index along `dim`, counted from `start`, or by `positions` [s] or [b, s].

    Pairs are (i, i + d/2), or (2i, 2i + 1) if interleaved. With `rotated`, only the first so many features are turned.
    """
    dim, d = one_dim(dim, x.ndim), rotated or x.shape[-1]
    if d < x.shape[-1]:
        first = rotary(narrow(x, -1, 0, d), freq, positions, dim=dim, base=base, interleaved=interleaved, start=start)
        return concat([first, narrow(x, -1, d, x.shape[-1])], -1)
    freq = frequencies(d, x, base) if freq is None else freq
    at = [] if positions is None else [positions]
    return _rotary(x, freq, *at, dim=dim, interleaved=interleaved, start=start)


# -- rotary embedding by tables of cosines and sines -----------------------------------------------------------------------


def _rope_equation(types: Types, attrs: Attrs) -> Equation:
    """x [..., d] and tables stretched over it; the last dim, whose halves meet, stays replicated."""
    eq = elementwise(types, attrs)
    return Equation(eq.ins, eq.outs, unsharded=frozenset({eq.outs[0][-1]}))


def _other_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _rope_run(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    return x * cos - _other_half(x * sin) if inverse else x * cos + _other_half(x) * sin


def _rope_vjp(n: Node, ct: Node) -> Any:
    rotated = rope(ct, *n.args[1:], **({} if n.attr("inverse") else {"inverse": True}))
    return fit(rotated, n.args[0]), None, None


rope = define(
    "rope",
    kind=Kind.COMPOSITE,
    equation=_rope_equation,
    run=_rope_run,
    linear=Linear.FIRST,
    vjp=_rope_vjp,
    flops=lambda n: 3.0 * out_elements(n),
    doc="x cos + (-x2, x1) sin; the tables are data and get no gradient",
    adds_nothing=True,
)


__all__ = ["frequencies", "rope", "rotary"]
