"""Ops along an order: cumsum, sort, topk, argmax, bincount. The dim they run along is replicated; ties are broken as torch breaks them."""

from __future__ import annotations

from typing import Any

import torch

from weft.core.errors import RuntimeFault, TypeMismatch
from weft.core.node import Attrs, Node, user_line
from weft.ops.embed import out_elements, scatter_sum
from weft.ops.fill import indices, one_dim
from weft.ops.registry import Equation, Kind, Linear, Types, define


def _labels(types: Types) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(len(types[0].shape)))


def _same(types: Types, attrs: Attrs) -> Equation:
    labels = _labels(types)
    return Equation((labels,), (labels,), unsharded=frozenset({labels[one_dim(attrs["dim"], len(labels))]}))


def _cumsum_run(x: torch.Tensor, dim: int, reverse: bool = False) -> torch.Tensor:
    y = (x.flip(dim) if reverse else x).cumsum(dim).to(x.dtype)
    return y.flip(dim) if reverse else y


_cumsum = define(
    "cumsum",
    kind=Kind.COMPOSITE,
    equation=_same,
    run=_cumsum_run,
    linear=Linear.FIRST,
    vjp=lambda n, ct: (cumsum(ct, n.attr("dim"), reverse=not n.attr("reverse", False)),),
    field=lambda p, x, dim, reverse=False: _cumsum_run(x, dim, reverse) % p,
)


def cumsum(x: Any, dim: int, reverse: bool = False) -> Any:
    """Sums of all up to and with each index along a dim; in reverse, from the end."""
    return _cumsum(x, dim=one_dim(dim, x.ndim), **({"reverse": True} if reverse else {}))


# -- sort and topk: values and where they stood ----------------------------------------------------------------------------------


def _value_and_index(types: Types, attrs: Attrs) -> tuple[torch.dtype, torch.dtype]:
    return types[0].dtype, torch.int64


def _ordered_vjp(n: Node, ct: Node, _: Any) -> Any:
    dim = n.attr("dim")
    _, index = n
    return (scatter_sum(ct, index, indices(n.args[0], dim), dim),)


def _sort_equation(types: Types, attrs: Attrs) -> Equation:
    eq = _same(types, attrs)
    return Equation(eq.ins, eq.outs * 2, unsharded=eq.unsharded)


def _sort_run(x: torch.Tensor, dim: int, descending: bool = False, stable: bool = True) -> Any:
    return tuple(torch.sort(x, dim=dim, descending=descending, stable=stable or x.device.type != "cpu"))


sort_op = define(
    "sort", kind=Kind.COMPOSITE, equation=_sort_equation, run=_sort_run, dtype=_value_and_index, vjp=_ordered_vjp, flops=out_elements,
    adds_nothing=True,
)


def sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Values in order and the indices they had; equal ones keep their order, or, not `stable`, come as torch's own sort has them."""
    return sort_op(x, dim=one_dim(dim, x.ndim), descending=descending, **({} if stable else {"stable": False}))


def _topk_equation(types: Types, attrs: Attrs) -> Equation:
    labels, k = _labels(types), attrs["k"]
    dim = one_dim(attrs["dim"], len(labels))
    if not 0 <= k <= types[0].shape[dim]:
        raise TypeMismatch("topk asks for more than there is", needed=f"k from 0 to {types[0].shape[dim]}", found=str(k), where=user_line())
    out = tuple("k" if i == dim else x for i, x in enumerate(labels))
    return Equation((labels,), (out, out), unsharded=frozenset({labels[dim]}), sizes={"k": k})


def _topk_run(x: torch.Tensor, k: int, dim: int, largest: bool = True, sorted: bool = True) -> Any:
    """Torch's own choice among equals where it does not depend on how many rows a rank holds; elsewhere a stable sort's."""
    if x.device.type == "cpu":
        return tuple(torch.topk(x, k, dim, largest, sorted))
    values, index = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), index.narrow(dim, 0, k)


topk_op = define(
    "topk", kind=Kind.COMPOSITE, equation=_topk_equation, run=_topk_run, dtype=_value_and_index, vjp=_ordered_vjp, flops=out_elements,
    adds_nothing=True,
)


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """The k largest, or least, along a dim and their indices, the first one first where `sorted`; of equal ones those that torch takes."""
    how = {name: False for name, given in (("largest", largest), ("sorted", sorted)) if not given}
    return topk_op(x, k=k, dim=one_dim(dim, x.ndim), **how)


def _argmax_equation(types: Types, attrs: Attrs) -> Equation:
    labels = _labels(types)
    dim = one_dim(attrs["dim"], len(labels))
    return Equation((labels,), (labels[:dim] + labels[dim + 1 :],), unsharded=frozenset({labels[dim]}))


argmax_op = define(
    "argmax",
    kind=Kind.COMPOSITE,
    equation=_argmax_equation,
    run=lambda x, dim, least=False: (torch.argmin if least else torch.argmax)(x, dim),
    dtype=lambda types, attrs: torch.int64,
    adds_nothing=True,
)


def argmax(x: Any, dim: int, least: bool = False) -> Any:
    """The index of the largest, or the least, along a dim; of equal ones the first."""
    return argmax_op(x, dim=one_dim(dim, x.ndim), **({"least": True} if least else {}))


# -- how often each number comes ------------------------------------------------------------------------------------------


def _bincount_run(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.device.type == "cpu" and x.numel() and int(x.max()) >= size:
        raise RuntimeFault(
            f"torch.bincount(minlength={size}) would give more counts than were captured",
            needed=f"values below {size}",
            found=f"{int(x.max())}",
            try_="a minlength above every value",
        )
    return (x.unsqueeze(-1) == torch.arange(size, device=x.device)).sum(0)


bincount = define(
    "bincount",
    kind=Kind.COMPOSITE,
    equation=lambda types, attrs: Equation((("i",),), (("n",),), sizes={"n": attrs["size"]}),
    run=_bincount_run,
    dtype=lambda types, attrs: torch.int64,
    doc="how often each number from 0 to size comes; a larger one is refused",
    adds_nothing=True,
)


__all__ = ["argmax", "bincount", "cumsum", "sort", "topk"]
