"""softmax, log_softmax, layer_norm and rms_norm: replicated along the dim they normalise, or, where it is split, in pieces.

Where the dim is uncut each is one op, and so is its backward, which needs the operand (or the result) and nothing else.
Where it is sharded the functions emit the reductions and their all_reduces, visible in the program.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.core.errors import TypeMismatch
from weft.core.node import Attrs, Node, user_line
from weft.ops.comm import all_reduce_partials
from weft.ops.fill import is_sharded, one_dim, stop_gradient
from weft.ops.pointwise import cast, exp, log, rsqrt, square
from weft.ops.reduce import amax, mean, sum_
from weft.ops.registry import Equation, Kind, Linear, Types, define

HALF = (torch.bfloat16, torch.float16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over many elements are kept."""
    return torch.float32 if dtype in HALF else dtype


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide_dtype(x.dtype))


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """The value in another dtype; nothing is emitted where it has that dtype."""
    return x if x.dtype == dtype else cast(x, dtype=dtype)


def need_float(name: str, types: Types, *args: int) -> None:
    for k in args or range(len(types)):
        if not types[k].dtype.is_floating_point:
            raise TypeMismatch(f"{name} takes floats", needed=f"a float in operand {k}", found=str(types[k]), where=user_line())


# -- softmax -------------------------------------------------------------------------------------------------------------------


def _along(name: str) -> Any:
    """Every operand and the result the same; `dim` must be replicated."""

    def equation(types: Types, attrs: Attrs) -> Equation:
        need_float(name, types)
        labels = tuple(f"d{i}" for i in range(len(types[0].shape)))
        dim = one_dim(attrs["dim"], len(labels))
        return Equation((labels,) * len(types), (labels,), unsharded=frozenset({labels[dim]}))

    return equation


def _softmax_backward_run(ct: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    c, p = wide(ct), wide(y)
    return (p * (c - (c * p).sum(dim, keepdim=True))).to(y.dtype)


def _log_softmax_backward_run(ct: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    c = wide(ct)
    return (c - wide(y).exp() * c.sum(dim, keepdim=True)).to(y.dtype)


def _softmax_back(ct: Any, y: Any, dim: int) -> Any:
    c, p = (to_dtype(t, wide_dtype(y.dtype)) for t in (ct, y))
    return to_dtype(p * (c - all_reduce_partials(sum_(c * p, dims=dim, keepdim=True))), y.dtype)


def _log_softmax_back(ct: Any, y: Any, dim: int) -> Any:
    c, p = to_dtype(ct, wide_dtype(y.dtype)), exp(to_dtype(y, wide_dtype(y.dtype)))
    return to_dtype(c - p * all_reduce_partials(sum_(c, dims=dim, keepdim=True)), y.dtype)


def _backward_of(name: str, run: Any, written: Any) -> Any:
    return define(name, kind=Kind.COMPOSITE, equation=_along(name), run=run, linear=Linear.FIRST, written=written, across=written, transcendental=True)


_softmax_backward = _backward_of("softmax_backward", _softmax_backward_run, _softmax_back)
_log_softmax_backward = _backward_of("log_softmax_backward", _log_softmax_backward_run, _log_softmax_back)


def _softmax_across(x: Any, dim: int) -> Any:
    w = to_dtype(x, wide_dtype(x.dtype))
    e = exp(w - _peak(w, dim))
    return to_dtype(e / all_reduce_partials(sum_(e, dims=dim, keepdim=True)), x.dtype)


def _log_softmax_across(x: Any, dim: int) -> Any:
    w = to_dtype(x, wide_dtype(x.dtype))
    y = w - _peak(w, dim)
    return to_dtype(y - log(all_reduce_partials(sum_(exp(y), dims=dim, keepdim=True))), x.dtype)


_softmax = define(
    "softmax",
    kind=Kind.COMPOSITE,
    equation=_along("softmax"),
    run=lambda x, dim: torch.softmax(x, dim),
    vjp=lambda n, ct: (_softmax_backward(ct, n, dim=n.attr("dim")),),
    across=_softmax_across,
    transcendental=True,
)
_log_softmax = define(
    "log_softmax",
    kind=Kind.COMPOSITE,
    equation=_along("log_softmax"),
    run=lambda x, dim: torch.log_softmax(x, dim),
    vjp=lambda n, ct: (_log_softmax_backward(ct, n, dim=n.attr("dim")),),
    across=_log_softmax_across,
    transcendental=True,
)


def softmax(x: Any, dim: int = -1) -> Any:
    """exp(x) over its sum along a dim; along a sharded dim, with an all_reduce of the maximum and one of the sum."""
    dim = one_dim(dim, x.ndim)
    return (_softmax_across if is_sharded(x, dim) else _softmax)(x, dim=dim)


def log_softmax(x: Any, dim: int = -1) -> Any:
    """log(softmax(x)), computed without overflow."""
    dim = one_dim(dim, x.ndim)
    return (_log_softmax_across if is_sharded(x, dim) else _log_softmax)(x, dim=dim)


def _peak(x: Node, dim: int) -> Any:
    """The maximum along a dim; the result does not depend on it, so no gradient goes through."""
    return all_reduce_partials(amax(stop_gradient(x), dims=dim, keepdim=True))


# -- layer_norm and rms_norm ---------------------------------------------------------------------------------------------------


def _rows(rank: int) -> tuple[str, ...]:
    return (*(f"d{i}" for i in range(rank - 1)), "d")


def _norm_equation(name: str, most: int) -> Any:
    """x [..., d] and up to `most` vectors [d] -> [..., d]."""

    def equation(types: Types, attrs: Attrs) -> Equation:
        need_float(name, types)
        if not types[0].shape or len(types) > 1 + most:
            found = ", ".join(map(str, types))
            raise TypeMismatch(f"{name} takes [..., d] and at most {most} vectors [d]", needed="those", found=found, where=user_line())
        labels = _rows(len(types[0].shape))
        return Equation((labels, *(("d",),) * (len(types) - 1)), (labels,), unsharded=frozenset("d"))

    return equation


def _norm_backward_equation(types: Types, attrs: Attrs) -> Equation:
    """ct, x and the weight, if any -> dx, and what `outs` asks of dw and db, which are summed over the rows."""
    labels = _rows(len(types[0].shape))
    vectors = (("d",),) * (len(types) - 2)
    return Equation((labels, labels, *vectors), (labels, *(("d",),) * attrs["vectors"]), unsharded=frozenset("d"))


def _standard(x: torch.Tensor, eps: float, center: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x brought to mean 0 (if centred) and square mean 1, and the factor that did it."""
    x = x - x.mean(-1, keepdim=True) if center else x
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * r, r


def _norm_run(center: bool) -> Any:
    def run(x: torch.Tensor, *vectors: torch.Tensor, eps: float) -> torch.Tensor:
        y, _ = _standard(wide(x), eps, center)
        if vectors:
            y = y * wide(vectors[0])
        return (y + wide(vectors[1]) if len(vectors) > 1 else y).to(x.dtype)

    return run


def _norm_backward_run(center: bool) -> Any:
    def run(ct: torch.Tensor, x: torch.Tensor, *weight: torch.Tensor, eps: float, vectors: int) -> Any:
        c = wide(ct)
        y, r = _standard(wide(x), eps, center)
        dy = c * wide(weight[0]) if weight else c
        dx = dy - y * (dy * y).mean(-1, keepdim=True)
        dx = (dx - dy.mean(-1, keepdim=True) if center else dx) * r
        rows = tuple(range(x.ndim - 1))
        sums = [(t.sum(rows) if rows else t).to(x.dtype) for t in (c * y, c)[:vectors]]
        return (dx.to(x.dtype), *sums) if sums else dx.to(x.dtype)

    return run


def _norm_backward_written(center: bool) -> Any:
    """The same in ops, for a gradient of the gradient."""

    def written(ct: Node, x: Node, *weight: Node, eps: float, vectors: int) -> Any:
        kind = wide_dtype(x.dtype)
        c, x0 = to_dtype(ct, kind), to_dtype(x, kind)
        off = x0 - mean(x0, -1, keepdim=True) if center else x0
        r = rsqrt(mean(square(off), -1, keepdim=True) + eps)
        y, dy = off * r, c * to_dtype(weight[0], kind) if weight else c
        dx = dy - y * mean(dy * y, -1, keepdim=True)
        dx = (dx - mean(dy, -1, keepdim=True) if center else dx) * r
        rows = tuple(range(x.ndim - 1))
        return tuple(to_dtype(t, x.dtype) for t in (dx, *(sum_(t, dims=rows) for t in (c * y, c)[:vectors])))

    return written


def _norm(name: str, center: bool, most: int) -> Any:
    """A norm and its backward; the norm is linear in its vectors, the backward in the cotangent."""
    back = define(
        f"{name}_backward",
        kind=Kind.COMPOSITE,
        equation=_norm_backward_equation,
        run=_norm_backward_run(center),
        linear=Linear.FIRST,
        written=_norm_backward_written(center),
        flops=lambda n: 12.0 * _elements(n),
    )

    def vjp(n: Node, ct: Node) -> Any:
        vectors = len(n.args) - 1
        weight = [all_reduce_partials(w) for w in n.args[1:2]]
        out = back(ct, n.args[0], *weight, eps=n.attr("eps"), vectors=vectors)
        return tuple(out) if vectors else (out,)

    return define(
        name,
        kind=Kind.COMPOSITE,
        equation=_norm_equation(name, most),
        run=_norm_run(center),
        linear=(frozenset(range(1, 1 + most)),),
        vjp=vjp,
        flops=lambda n: 8.0 * _elements(n),
    )


def _elements(n: Node) -> float:
    out = 1.0
    for size in n.types[0].layout.largest_local:
        out *= size
    return out


_layer_norm = _norm("layer_norm", center=True, most=2)
_rms_norm = _norm("rms_norm", center=False, most=1)


def layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """The last dim brought to mean 0 and variance 1, scaled and shifted; with two all_reduces where that dim is sharded."""
    if bias is not None and weight is None:
        raise TypeMismatch("layer_norm with a bias has a weight", needed="a weight", found="None", where=user_line())
    if not is_sharded(x, -1):
        return _layer_norm(*[v for v in (x, weight, bias) if v is not None], eps=float(eps))
    w = to_dtype(x, wide_dtype(x.dtype))
    w = w - all_reduce_partials(mean(w, -1, keepdim=True))
    return _affine(to_dtype(_scaled(w, eps), x.dtype), weight, bias)


def rms_norm(x: Any, weight: Any = None, eps: float = 1e-6) -> Any:
    """The last dim brought to square mean 1, and scaled; with one all_reduce where that dim is sharded."""
    if not is_sharded(x, -1):
        return _rms_norm(*[v for v in (x, weight) if v is not None], eps=float(eps))
    y = _scaled(to_dtype(x, wide_dtype(x.dtype)), eps)
    return _affine(to_dtype(y, x.dtype), weight, None)


def _scaled(x: Node, eps: float) -> Any:
    return x * rsqrt(all_reduce_partials(mean(square(x), -1, keepdim=True)) + eps)


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


__all__ = ["layer_norm", "log_softmax", "need_float", "rms_norm", "softmax", "to_dtype", "wide", "wide_dtype"]
