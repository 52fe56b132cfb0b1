"""The language of programs: `from weft import lang`, then `lang.all_reduce(g, "dp")`, `lang.sqrt(v)`, `lang.f32(1024, dp=P())`.

Ops, the types of inputs, gradients, programs as text, and ops of your own.
"""

from __future__ import annotations

from typing import Any

from weft.autodiff import grad, vjp
from weft.core.layout import Layout, Within
from weft.core.node import Node, op_named
from weft.core.text import parse
from weft.frontend.trace import TensorSpec, bf16, f32, f64, i64, tensor
from weft.ops import comm as _comm
from weft.ops.attention import attention
from weft.ops.embed import embedding
from weft.ops.linalg import einsum, matmul
from weft.ops.loss import cross_entropy
from weft.ops.norm import layer_norm, log_softmax, rms_norm, softmax
from weft.ops.pointwise import (
    abs_ as abs,
)
from weft.ops.pointwise import (
    cos,
    dropout,
    eq,
    erf,
    exp,
    floor,
    gelu,
    isfinite,
    log,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    ne,
    relu,
    rsqrt,
    sigmoid,
    sign,
    silu,
    sin,
    sqrt,
    square,
    tanh,
    where,
)
from weft.ops.reduce import mean, norm_dims
from weft.ops.registry import Linear, define
from weft.ops.shape import concat, expand, narrow, pad, permute, reshape, transpose


def sum(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    """Over some dims, or all. Of a sharded dim the result is partial."""
    return _reduced("sum", x, dims, keepdim)


def amax(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    """The largest over some dims, or all."""
    return _reduced("amax", x, dims, keepdim)


def amin(x: Any, dims: Any = None, keepdim: bool = False) -> Any:
    """The smallest over some dims, or all."""
    return _reduced("amin", x, dims, keepdim)


def _reduced(op: str, x: Any, dims: Any, keepdim: bool) -> Any:
    """-1 and the last dim are one node."""
    at = norm_dims(dims, x.ndim) if dims is not None and isinstance(x, Node) else dims
    return op_named(op)(x, dims=at, keepdim=keepdim)


def cast(x: Any, dtype: Any) -> Any:
    """The values in another dtype, as Tensor.to."""
    return op_named("cast")(x, dtype=dtype)


def clamp(x: Any, lo: float | None = None, hi: float | None = None) -> Any:
    """Elements brought between two numbers, or to one side of one."""
    return op_named("clamp")(x, lo=lo, hi=hi)


def norm(x: Any) -> Any:
    """The L2 norm over all dims: the root of a reduced sum of squares. On a sharded value its partial sum is reduced first."""
    return sqrt(_comm.all_reduce_partials(sum(x * x)))


def all_reduce(x: Any, *axes: str) -> Any:
    """P -> R along each axis in turn."""
    for axis in axes:
        x = _comm.all_reduce(x, axis=axis)
    return x


def reduce_scatter(x: Any, axis: str, dim: int, within: Within = None) -> Any:
    """P -> S(dim)"""
    return _comm.reduce_scatter(x, axis=axis, dim=dim, within=within)


def all_gather(x: Any, axis: str) -> Any:
    """S -> R"""
    return _comm.all_gather(x, axis=axis)


def all_to_all(x: Any, axis: str, dim: int, within: Within = None) -> Any:
    """S -> S(dim)"""
    return _comm.all_to_all(x, axis=axis, dim=dim, within=within)


def slice(x: Any, axis: str, dim: int, within: Within = None) -> Any:
    """R -> S(dim), nothing on the wire"""
    return _comm.slice_(x, axis=axis, dim=dim, within=within)


def reduce(x: Any, axis: str, root: int = 0) -> Any:
    """P -> O(root)"""
    return _comm.reduce_(x, axis=axis, root=root)


def broadcast(x: Any, axis: str) -> Any:
    """O -> R"""
    return _comm.broadcast(x, axis=axis)


def send(x: Any, axis: str, to: int) -> Any:
    """O -> O(to): a value moves to another stage"""
    return _comm.send(x, axis=axis, to=to)


reshard, all_reduce_partials = _comm.reshard, _comm.all_reduce_partials

__all__ = [
    "Layout", "Linear", "TensorSpec", "abs", "all_gather", "all_reduce", "all_reduce_partials", "all_to_all", "amax", "amin", "attention", "bf16",
    "broadcast", "cast", "clamp", "concat", "cos", "cross_entropy", "define", "dropout", "einsum", "embedding", "eq", "erf", "exp",
    "expand", "f32", "f64", "floor", "gelu", "grad", "i64", "isfinite", "layer_norm", "log", "log_softmax", "logical_and",
    "logical_not", "logical_or", "matmul", "maximum", "mean", "minimum", "narrow", "ne", "norm", "pad", "parse", "permute", "reduce",
    "reduce_scatter", "relu", "reshape", "reshard", "rms_norm", "rsqrt", "send", "sigmoid", "sign", "silu", "sin", "slice",
    "softmax", "sqrt", "square", "sum", "tanh", "tensor", "transpose", "vjp", "where",
]  # fmt: skip
