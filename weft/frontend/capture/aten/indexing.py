"""ATen ops that read and write by index, and those along an order."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from weft.core.errors import CaptureError
from weft.core.node import Node, user_line
from weft.frontend.capture.aten.pointwise import as_node
from weft.frontend.capture.constants import counting
from weft.frontend.capture.handlers import aten, function, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.ops import embed, order
from weft.ops import pointwise as w
from weft.ops import reduce as wr
from weft.ops.fill import arange, arange_op, full, full_op, scale_gradient
from weft.ops.order import argmax_op, sort_op, topk_op
from weft.ops.segment import segment_max
from weft.ops.shape import expand, expand_op, narrow, permute, reshape, reshape_op


def _wrapped(index: Node, size: int) -> Node:
    """Negative indices counted from the end, as torch counts them; known sources of integers need none of it."""
    source = index
    while source.op in (reshape_op, expand_op) or source.op.is_item:
        source = source.args[0]
    if source.op in (argmax_op, topk_op, sort_op) or (source.op is arange_op and min(source.attr("start"), source.attr("step")) >= 0):
        return index
    return w.where(w.lt(index, 0), w.add(index, size), index)


@function(torch.Tensor.fill_diagonal_, tensors=True)
def _fill_diagonal(r: Recorder, x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
    """Torch writes through strides; the diagonal of all dims is that of pairs, one after another."""
    if wrap and x.ndim == 2 and x.shape[0] > x.shape[1] + 1:
        raise CaptureError(
            "fill_diagonal_ with wrap=True is not captured", needed="wrap=False", found=f"wrap=True of {tuple(x.shape)}", where=user_line()
        )
    place = x
    for _ in range(x.ndim - 1):
        place = place.diagonal()
    place.fill_(value)
    return x


@function(F.embedding)
def embedding(r: Recorder, index: Node, weight: Node, padding_idx: int | None = None, max_norm: Any = None,
              norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False) -> Node:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq:
        return NotImplemented
    return embed.embedding(weight, index, padding_idx)


@aten("embedding")
def _embedding(r: Recorder, weight: Node, index: Node, padding_idx: int = -1, by_frequency: bool = False, sparse: bool = False) -> Node:
    rows = embed.embedding(weight, index, None if padding_idx < 0 else padding_idx)
    return _per_use(r, rows, weight, index) if by_frequency else rows


def _per_use(r: Recorder, rows: Node, weight: Node, index: Node) -> Node:
    """The same rows, but each row's gradient is divided by how often it was looked up."""
    flat = reshape(index, (-1,))
    uses = embed.put(full(flat.shape, 1.0, r.mesh, rows.dtype), flat, arange(weight.shape[0], r.mesh), 0)
    return scale_gradient(rows, w.div(1.0, reshape(embed.take(uses, index, 0), (*index.shape, 1))))


@function(F.embedding_bag)
def _bag(r: Recorder, index: Node, weight: Node, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
         scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
         include_last_offset: bool = False, padding_idx: int | None = None) -> Node:  # fmt: skip
    """Rows looked up, then reduced: over bags of equal size, [bags, size], or over those that begin at `offsets`."""
    if max_norm is not None or scale_grad_by_freq or mode == "max" or padding_idx is not None:
        return NotImplemented
    rows = embed.take(weight, index, 0)
    if offsets is not None:
        starts = narrow(offsets, 0, 0, offsets.shape[0] - include_last_offset)
        return _by_offsets(r, rows, starts, per_sample_weights, mode)
    if per_sample_weights is not None:
        rows = w.mul(rows, reshape(per_sample_weights, (*index.shape, 1)))
    return wr.sum_(rows, dims=(1,)) if mode == "sum" else wr.mean(rows, (1,))


def _by_offsets(r: Recorder, rows: Node, starts: Node, weights: Any, mode: str) -> Node:
    """Every row added to its bag: the number of starts up to it, less one."""
    count, bags = rows.shape[0], starts.shape[0]
    marks = embed.put(full((bags,), 1, r.mesh, torch.int64), starts, arange(count + 1, r.mesh), 0)
    bag = w.sub(narrow(order.cumsum(marks, 0), 0, 0, count), 1)
    rows = rows if weights is None else w.mul(rows, reshape(weights, (count, 1)))
    total = embed.put(rows, bag, arange(bags, r.mesh), 0)
    if mode == "sum":
        return total
    sizes = embed.put(full((count,), 1.0, r.mesh, rows.dtype), bag, arange(bags, r.mesh), 0)
    return w.div(total, reshape(w.clamp(sizes, lo=1.0), (bags, 1)))


def _tabled(x: Node, index: Node) -> bool:
    """Whether x has a dim to look along, and the index integers to look by."""
    return x.ndim > 0 and index.ndim > 0 and index.dtype in (torch.int64, torch.int32)


@aten("index_select")
def _index_select(r: Recorder, x: Node, dim: int, index: Node) -> Node:
    return embed.take(x, index, dim) if _tabled(x, index) else NotImplemented


@aten("gather")
def _gather(r: Recorder, x: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    if not _tabled(x, index):
        return NotImplemented
    return embed.gather(_trimmed(x, index, dim), index, dim)


def _trimmed(x: Node, like: Node, dim: int) -> Node:
    """Torch lets the index be smaller along other dims; the rest of x is then never read."""
    for d in range(x.ndim):
        if d != dim % x.ndim:
            x = narrow(x, d, 0, like.shape[d])
    return x


@aten("scatter.src", "scatter.value")
def _scatter(r: Recorder, x: Node, dim: int, index: Node, source: Any) -> Node:
    if not _tabled(x, index):
        return NotImplemented
    source = as_node(r, source, x.dtype)
    source = expand(source, index.shape) if source.ndim == 0 else _trimmed_to(source, index)
    return embed.scatter(x, index, source, dim) if _fits(x, index, dim) else NotImplemented


@aten("scatter_add", "scatter_reduce.two")
def _scatter_add(r: Recorder, x: Node, dim: int, index: Node, source: Node, reduce: str = "sum", include_self: bool = True) -> Node:
    rows = _same_along(index)
    if reduce == "amax" and not include_self and dim % x.ndim == 0 and rows is not None and x.op is full_op and x.attr("value") == 0:
        return segment_max(_trimmed_to(source, index), rows, arange(x.shape[0], x.mesh)) if _fits(x, index, dim) else NotImplemented
    if reduce != "sum" or not include_self or not _tabled(x, index) or not _fits(x, index, dim):
        return NotImplemented
    return embed.scatter_add(x, index, _trimmed_to(source, index), dim)


def _same_along(index: Node) -> Node | None:
    """The index of one dim that stands for all elements of each slice."""
    inner = index.args[0] if index.op is expand_op else index
    inner = inner.args[0] if inner.op is reshape_op and inner.shape == (inner.shape[0], *(1,) * (inner.ndim - 1)) else inner
    return inner if inner.ndim == 1 and inner.shape == index.shape[:1] and inner.dtype in (torch.int64, torch.int32) else None


def _trimmed_to(x: Node, like: Node) -> Node:
    for d in range(x.ndim):
        x = narrow(x, d, 0, like.shape[d])
    return x


def _fits(x: Node, index: Node, dim: int) -> bool:
    return all(x.shape[d] == index.shape[d] for d in range(x.ndim) if d != dim % x.ndim)


@aten("index_add")
def _index_add(r: Recorder, x: Node, dim: int, index: Node, source: Node, alpha: float = 1) -> Node:
    if not _tabled(x, index):
        return NotImplemented
    source = source if alpha == 1 else w.mul(source, float(alpha))
    return embed.index_add(x, index, to_dtype(source, x.dtype), dim)


@aten("index_copy")
def _index_copy(r: Recorder, x: Node, dim: int, index: Node, source: Node) -> Node:
    if not _tabled(x, index):
        return NotImplemented
    dim %= x.ndim
    shape = tuple(n if d == dim else 1 for d, n in enumerate(source.shape))
    return embed.scatter(x, expand(reshape(index, shape), source.shape), source, dim)


# -- x[i, :, j]: neighbouring index tensors become one index over the joined dims ------------------------------------------


@aten("index.Tensor", "_unsafe_index")
def _index(r: Recorder, x: Node, indices: Any) -> Node:
    found = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype == torch.bool for d in found) or not found:
        return NotImplemented
    sliced = _sliced(r, x, indices) if found == list(range(len(found))) else None
    if sliced is not None:
        return sliced
    x, first, flat, shape = _joined(x, indices, found)
    out = embed.take(x, flat, first)
    return out if found == list(range(found[0], found[-1] + 1)) else _front(out, first, len(shape))


def _sliced(r: Recorder, x: Node, indices: Any) -> Node | None:
    """x[i, j] where i and j count along dims of their own, i before j: slices of x, whose dims can then be sharded."""
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    last = -1
    for d, index in enumerate(indices):
        wide = (1,) * (len(shape) - index.ndim) + tuple(index.shape)
        along = [k for k, n in enumerate(wide) if n > 1]
        counts = counting(r, index) if len(along) <= 1 else None
        start = None if counts is None else counts + x.shape[d] * (counts < 0)
        if start is None or (along and along[0] <= last) or not 0 <= start <= x.shape[d] - math.prod(index.shape):
            return None
        last = along[0] if along else last
        x = narrow(x, d, start, start + math.prod(index.shape))
    return reshape(x, (*shape, *x.shape[len(indices) :]))


def _front(x: Node, first: int, count: int) -> Node:
    """Torch puts the indexed dims first when a slice stands between them."""
    moved = tuple(range(first, first + count))
    return permute(x, (*moved, *(d for d in range(x.ndim) if d not in moved)))


def _joined(x: Node, indices: Any, found: list[int]) -> tuple[Node, int, Node, tuple[int, ...]]:
    """The indexed dims of x next to each other and merged, and the one flat index into them."""
    first = found[0]
    order_ = [*range(first), *found, *(d for d in range(first, x.ndim) if d not in found)]
    x = permute(x, order_)
    sizes = x.shape[first : first + len(found)]
    shape = torch.broadcast_shapes(*(indices[d].shape for d in found))
    flat: Node | None = None
    for d, size in zip(found, sizes, strict=True):
        at = to_dtype(expand(_wrapped(indices[d], size), shape), torch.int64)  # torch takes indices of several dtypes
        flat = at if flat is None else w.add(w.mul(flat, size), at)
    x = reshape(x, (*x.shape[:first], math.prod(sizes), *x.shape[first + len(found) :]))
    assert flat is not None
    return x, first, flat, shape


@aten("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(r: Recorder, x: Node, indices: Any, values: Node, accumulate: bool = False, *_: Any) -> Node:
    found = [d for d, i in enumerate(indices) if i is not None]
    if len(found) == 1 and indices[found[0]].dtype == torch.bool and not accumulate and values.ndim == 0:
        mask = indices[found[0]]
        return w.where(reshape(mask, (*mask.shape, *(1,) * (x.ndim - mask.ndim))), to_dtype(values, x.dtype), x)
    if any(indices[d].dtype == torch.bool for d in found) or found != list(range(len(found))):
        return NotImplemented
    flat_x, _, flat, shape = _joined(x, indices, found)
    rest = flat_x.shape[1:]
    source = reshape(expand(to_dtype(values, x.dtype), (*shape, *rest)), (math.prod(shape), *rest))
    flat = reshape(flat, (-1,))
    if accumulate:
        return reshape(embed.index_add(flat_x, flat, source, 0), x.shape)
    return reshape(_index_copy(r, flat_x, 0, flat, source), x.shape)


# -- along an order --------------------------------------------------------------------------------------------------------


@aten("cumsum")
def _cumsum(r: Recorder, x: Node, dim: int, dtype: Any = None) -> Node:
    return order.cumsum(to_dtype(x, dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)), dim) if x.ndim else x


def _line(x: Node) -> Node:
    """A number as a vector of one, since torch takes it for that along a dim."""
    return x if x.ndim else reshape(x, (1,))


@aten("topk")
def _topk(r: Recorder, x: Node, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> list[Node]:
    shape = x.shape if not x.ndim else None
    found = order.topk(_line(x), k, dim, largest, sorted)
    return [v if shape is None else reshape(v, shape) for v in found] if k or x.ndim else NotImplemented


@aten("sort.default", "sort.stable")
def _sort(r: Recorder, x: Node, *given: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> list[Node]:
    for value in given:  # sort.default has them by place
        dim, descending = (dim, value) if isinstance(value, bool) else (value, descending)
    return [reshape(v, x.shape) for v in order.sort(_line(x), dim, descending, bool(stable))]


@aten("argmax")
def _argmax(r: Recorder, x: Node, dim: int | None = None, keepdim: bool = False, least: bool = False) -> Node:
    flat = reshape(x, (-1,)) if dim is None else _line(x)
    at = order.argmax(flat, 0 if dim is None else dim, least)
    if not keepdim and x.ndim:
        return at
    return reshape(at, tuple(1 if dim is None or d == dim % x.ndim else n for d, n in enumerate(x.shape)))


@aten("argmin")
def _argmin(r: Recorder, x: Node, dim: int | None = None, keepdim: bool = False) -> Node:
    return _argmax(r, x, dim, keepdim, least=True)


@aten("max.dim")
def _max_dim(r: Recorder, x: Node, dim: int, keepdim: bool = False, least: bool = False) -> list[Node]:
    """The value at the first largest index, so that its gradient goes to that one alone, as torch's does."""
    full, dim = _line(x), dim % max(x.ndim, 1)
    index = order.argmax(full, dim, least)
    kept = tuple(1 if d == dim else n for d, n in enumerate(full.shape))
    values = embed.gather(full, reshape(index, kept), dim)
    shape = tuple(n for d, n in enumerate(kept) if keepdim or d != dim) if x.ndim else ()
    return [reshape(values, shape), reshape(index, shape)]


@aten("min.dim")
def _min_dim(r: Recorder, x: Node, dim: int, keepdim: bool = False) -> list[Node]:
    return _max_dim(r, x, dim, keepdim, least=True)


@aten("flip")
def _flip(r: Recorder, x: Node, dims: Any) -> Node:
    for dim in dims if x.ndim else ():
        size = x.shape[dim]
        x = embed.take(x, arange(size, r.mesh, start=size - 1, step=-1), dim)
    return x
