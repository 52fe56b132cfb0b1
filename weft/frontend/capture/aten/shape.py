"""Views and other ops that only move elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import CaptureError
from weft.core.node import Node, constant, user_line
from weft.frontend.capture.aten.pointwise import promoted
from weft.frontend.capture.handlers import aten, views
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import Step, view
from weft.ops.embed import take
from weft.ops.fill import arange, stop_gradient
from weft.ops.pointwise import add
from weft.ops.registry import Kind
from weft.ops.shape import concat, expand, narrow, pad, permute, reshape

Shape = tuple[int, ...]


def _full(shape: Any, numel: int) -> Shape:
    """Sizes with a -1 worked out."""
    known = math.prod(n for n in shape if n != -1)
    return tuple(numel // known if n == -1 else int(n) for n in shape)


@views("view.default", "_unsafe_view", "reshape", "_reshape_alias")
def _view(shape: Shape, size: Any, *_: Any) -> list[Step]:
    return [("reshape", _full(size, math.prod(shape)))]


@views("alias", "detach", "lift_fresh")
def _same(shape: Shape) -> list[Step]:
    return []


@views("permute")
def _permute(shape: Shape, dims: Any) -> list[Step]:
    return [("permute", tuple(d % len(shape) for d in dims))]


@views("transpose.int")
def _transpose(shape: Shape, a: int, b: int) -> list[Step]:
    order = list(range(len(shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return [("permute", tuple(order))]


@views("t")
def _t(shape: Shape) -> list[Step]:
    return [("permute", (1, 0))] if len(shape) == 2 else []


@views("unsqueeze")
def _unsqueeze(shape: Shape, dim: int) -> list[Step]:
    dim %= len(shape) + 1
    return [("reshape", (*shape[:dim], 1, *shape[dim:]))]


@views("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(shape: Shape, dim: Any = None) -> list[Step]:
    given = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    gone = {d % max(len(shape), 1) for d in given}
    return [("reshape", tuple(n for i, n in enumerate(shape) if i not in gone or n != 1))]


@views("expand")
def _expand(shape: Shape, size: Any, implicit: bool = False) -> list[Step]:
    extra = len(size) - len(shape)
    full = tuple(shape[i - extra] if n == -1 else int(n) for i, n in enumerate(size))
    return [("reshape", (1,) * extra + shape), ("expand", full)] if extra else [("expand", full)]


@views("slice.Tensor")
def _slice(shape: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> list[Step]:
    dim %= len(shape)
    lo, hi, by = slice(start, end, step).indices(shape[dim])
    return [("narrow", (dim, lo, max(lo, hi), by))]


@views("select.int")
def _select(shape: Shape, dim: int, index: int) -> list[Step]:
    dim %= len(shape)
    index %= shape[dim]
    return [("narrow", (dim, index, index + 1, 1)), ("reshape", shape[:dim] + shape[dim + 1 :])]


@views("unbind.int")
def _unbind(shape: Shape, dim: int = 0) -> list[list[Step]]:
    return [_select(shape, dim, i) for i in range(shape[dim])]


@views("split.Tensor")
def _split(shape: Shape, size: int, dim: int = 0) -> list[list[Step]]:
    """Equal parts are a dim of their own, so that what is inside a part can still be sharded."""
    dim %= len(shape)
    full = shape[dim]
    if size and full % size == 0 and full > size:
        parts = (*shape[:dim], full // size, size, *shape[dim + 1 :])
        return [[("reshape", parts), *_select(parts, dim, i)] for i in range(full // size)]
    return _split_sizes(shape, [min(size, full - at) for at in range(0, max(full, 1), max(size, 1))], dim)


@views("split_with_sizes")
def _split_sizes(shape: Shape, sizes: Any, dim: int = 0) -> list[list[Step]]:
    dim %= len(shape)
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return _split(shape, sizes[0], dim)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [[("narrow", (dim, end - n, end, 1))] for end, n in zip(ends, sizes, strict=True)]


@views("diagonal")
def _diagonal(shape: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> list[Step]:
    """The two dims last and flat, then every so many elements."""
    dim1, dim2 = dim1 % len(shape), dim2 % len(shape)
    rest = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    rows, columns = shape[dim1], shape[dim2]
    count = max(0, min(rows + min(offset, 0), columns - max(offset, 0)))
    start = offset if offset >= 0 else -offset * columns
    lead = tuple(shape[d] for d in rest)
    stop = start + (count - 1) * (columns + 1) + 1 if count else (start := 0)
    return [("permute", (*rest, dim1, dim2)), ("reshape", (*lead, rows * columns)), ("narrow", (len(rest), start, stop, columns + 1))]


@aten("pixel_shuffle")
def _pixel_shuffle(r: Recorder, x: Node, factor: int) -> Node:
    *lead, c, h, wide = x.shape
    out = c // factor**2
    y = reshape(x, (*lead, out, factor, factor, h, wide))
    n = len(lead)
    y = permute(y, (*range(n + 1), n + 3, n + 1, n + 4, n + 2))
    return reshape(y, (*lead, out, h * factor, wide * factor))


@aten("pixel_unshuffle")
def _pixel_unshuffle(r: Recorder, x: Node, factor: int) -> Node:
    *lead, c, h, wide = x.shape
    y = reshape(x, (*lead, c, h // factor, factor, wide // factor, factor))
    n = len(lead)
    y = permute(y, (*range(n + 1), n + 2, n + 4, n + 1, n + 3))
    return reshape(y, (*lead, c * factor**2, h // factor, wide // factor))


@aten("unsafe_split.Tensor", "unsafe_split_with_sizes")
def _unsafe_split(r: Recorder, x: Node, size: Any, dim: int = 0) -> list[Node]:
    """Parts that torch promises not to write through."""
    out = []
    for path in _split(x.shape, size, dim) if isinstance(size, int) else _split_sizes(x.shape, size, dim):
        part = x
        for step in path:
            part = view(part, step)
        out.append(part)
    return out


@aten("cat")
def _cat(r: Recorder, parts: list[Node], dim: int = 0) -> Node:
    same = promoted(r, *parts)
    same = [p for p in same if p.shape != (0,)] or same[:1]  # torch lets an empty vector stand anywhere in a cat
    return concat(same, dim) if len(same) > 1 else same[0]


@aten("stack")
def _stack(r: Recorder, parts: list[Node], dim: int = 0) -> Node:
    dim %= parts[0].ndim + 1
    return concat([reshape(p, (*p.shape[:dim], 1, *p.shape[dim:])) for p in promoted(r, *parts)], dim)


@aten("constant_pad_nd")
def _pad(r: Recorder, x: Node, sizes: Any, value: float = 0) -> Node:
    """Zeros come from pad; another value is added where the padding is. Negative padding trims."""
    for i in range(0, len(sizes), 2):
        dim, (before, after) = x.ndim - 1 - i // 2, sizes[i : i + 2]
        x = narrow(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
        x = _pad_dim(r, x, dim, max(0, before), max(0, after), value)
    return x


def _pad_dim(r: Recorder, x: Node, dim: int, before: int, after: int, value: float) -> Node:
    if value == 0 or before == after == 0:
        return pad(x, dim, before, after)
    fill = r.number(value, x.dtype)
    edges = [expand(fill, (*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in (before, after)]
    return concat([p for p in (edges[0], x, edges[1]) if p.shape[dim]], dim)


@aten("repeat")
def _repeat(r: Recorder, x: Node, times: Any) -> Node:
    shape = (1,) * (len(times) - x.ndim) + x.shape
    wide = reshape(x, tuple(n for s in shape for n in (1, s)))
    wide = expand(wide, tuple(n for s, t in zip(shape, times, strict=True) for n in (t, s)))
    return reshape(wide, tuple(s * t for s, t in zip(shape, times, strict=True)))


@aten("repeat_interleave.self_int")
def _repeat_interleave(r: Recorder, x: Node, times: int, dim: int | None = None, output_size: Any = None) -> Node:
    if dim is None:
        x, dim = reshape(x, (-1,)), 0
    dim %= x.ndim
    wide = expand(reshape(x, (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :])), (*x.shape[: dim + 1], times, *x.shape[dim + 1 :]))
    return reshape(wide, (*x.shape[:dim], x.shape[dim] * times, *x.shape[dim + 1 :]))


@aten("roll")
def _roll(r: Recorder, x: Node, shifts: Any, dims: Any = ()) -> Node:
    if not dims:
        return reshape(_roll(r, reshape(x, (-1,)), shifts, (0,)), x.shape)
    pairs = zip((shifts,) if isinstance(shifts, int) else shifts, (dims,) if isinstance(dims, int) else dims, strict=True)
    for shift, dim in pairs if x.ndim else ():
        dim, size = dim % x.ndim, x.shape[dim]
        at = (-shift) % size if size else 0
        x = concat([narrow(x, dim, at, size), narrow(x, dim, 0, at)], dim) if at else x
    return x


@aten("upsample_nearest2d.default", "upsample_nearest2d.vec")
def _upsample(r: Recorder, x: Node, size: Any, *_: Any, **__: Any) -> Node:
    """Multiples are repeats."""
    (n, c, h, wide), factors = x.shape, _[-1] if _ and isinstance(_[-1], (list, tuple)) else None
    height, width = size if size is not None else (int(h * factors[0]), int(wide * factors[1]))
    if height % h or width % wide:
        return NotImplemented
    up, across = height // h, width // wide
    tall = expand(reshape(x, (n, c, h, 1, wide, 1)), (n, c, h, up, wide, across))
    return reshape(tall, (n, c, height, width))


@aten("slice_scatter")
def _slice_scatter(r: Recorder, x: Node, source: Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Node:
    (_, (dim, lo, hi, by)) = _slice(x.shape, dim, start, end, step)[0]
    if by != 1:
        return NotImplemented
    parts = [narrow(x, dim, 0, lo), source, narrow(x, dim, hi, x.shape[dim])]
    return concat([p for p in parts if p.shape[dim]], dim)


@aten("as_strided.default", "as_strided_copy.default", tensors=True)
def _by_strides(recorder: Recorder, x: Tensor, shape: Any, strides: Any, offset: int | None = None) -> Node:
    """What lies at given places of memory: elements of x, where x lies there in order."""
    first = 0 if offset is None else offset - x.storage_offset()
    last = first + sum((n - 1) * by for n, by in zip(shape, strides, strict=True)) if math.prod(shape) else first
    outside = recorder.node(x)  # how an input lies in memory is not part of the program
    while outside.op.kind is Kind.VIEW or outside.op is stop_gradient:
        outside = outside.args[0]
    order = sorted(range(x.ndim), key=lambda d: -x.stride(d))  # as its elements lie one after another
    dense = x.permute(order).is_contiguous()
    if outside.op.is_input or not dense or first < 0 or last >= max(x.numel(), 1):
        raise CaptureError(
            "as_strided reads memory that weft does not lay out as torch does",
            needed="a contiguous tensor that the step computes, and places inside it",
            found=f"shape {tuple(x.shape)} with strides {tuple(x.stride())}, places {first} to {last}",
            try_="unfold, or slices",
            where=user_line(),
        )
    at: Node = constant(first, torch.int64, recorder.mesh)
    for d, (n, by) in enumerate(zip(shape, strides, strict=True)):
        at = add(reshape(arange(n, recorder.mesh, step=by), tuple(n if i == d else 1 for i in range(len(shape)))), at)
    return take(reshape(permute(recorder.node(x), order), (-1,)), expand(at, tuple(shape)), 0)
