"""Tensors from nothing: filled, counted, random."""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.core.errors import CaptureError
from weft.core.node import DTYPE_NAMES, Node, constant, user_line
from weft.frontend.capture.handlers import aten, function, to_dtype
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.unknown_ops import alone
from weft.ops import pointwise as w
from weft.ops.fill import arange, full, one_hot
from weft.ops.order import argmax, bincount, sort, topk
from weft.ops.random import normal, uniform
from weft.ops.shape import expand, reshape


def _kind(dtype: Any, default: torch.dtype | None = None) -> torch.dtype:
    return dtype or default or torch.get_default_dtype()


def _filled(r: Recorder, shape: Any, value: Any, dtype: torch.dtype) -> Node:
    if isinstance(value, Node):
        return expand(to_dtype(value, dtype), tuple(shape))
    return full(tuple(shape), value, r.mesh, dtype)


aten("zeros", "empty.memory_format", "empty_strided")(
    lambda r, size, *_, dtype=None, **__: _filled(r, size, 0, _kind(dtype))
)
aten("ones")(lambda r, size, dtype=None, **_: _filled(r, size, 1, _kind(dtype)))
aten("zeros_like", "empty_like")(lambda r, x, dtype=None, **_: _filled(r, x.shape, 0, _kind(dtype, x.dtype)))
aten("ones_like")(lambda r, x, dtype=None, **_: _filled(r, x.shape, 1, _kind(dtype, x.dtype)))
aten("full_like")(lambda r, x, value, dtype=None, **_: _filled(r, x.shape, value, _kind(dtype, x.dtype)))
aten("new_zeros", "new_empty", "new_empty_strided")(lambda r, x, size, *_, dtype=None, **__: _filled(r, size, 0, _kind(dtype, x.dtype)))
aten("new_ones")(lambda r, x, size, dtype=None, **_: _filled(r, size, 1, _kind(dtype, x.dtype)))
aten("new_full")(lambda r, x, size, value, dtype=None, **_: _filled(r, size, value, _kind(dtype, x.dtype)))
aten("scalar_tensor")(lambda r, value, dtype=None, **_: r.number(value, _kind(dtype)))


@aten("full")
def _full(r: Recorder, size: Any, value: Any, dtype: Any = None, **_: Any) -> Node:
    guess = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else None
    return _filled(r, size, value, _kind(dtype, guess))


@aten("arange")
def _arange(r: Recorder, *bounds: Any, dtype: Any = None, **_: Any) -> Node:
    start, end, step = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    full = all(isinstance(x, int) for x in (start, end, step))
    kind = dtype or (torch.int64 if full else torch.get_default_dtype())
    return arange(max(0, math.ceil((end - start) / step)), r.mesh, start=start, step=step, dtype=kind)


@aten("linspace")
def _linspace(r: Recorder, start: float, end: float, steps: int, dtype: Any = None, **_: Any) -> Node:
    """Counted in float64, then rounded once."""
    if isinstance(start, Node) or isinstance(end, Node):
        return NotImplemented
    by = (end - start) / max(steps - 1, 1)
    return to_dtype(arange(steps, r.mesh, start=float(start), step=float(by), dtype=torch.float64), _kind(dtype))


@aten("eye.default", "eye.m")
def _eye(r: Recorder, rows: int, columns: int | None = None, dtype: Any = None, **_: Any) -> Node:
    wide = rows if columns is None else columns
    return one_hot(arange(rows, r.mesh), wide, _kind(dtype)) if rows and wide else _filled(r, (rows, wide), 0, _kind(dtype))


def _grid(r: Recorder, x: Node) -> tuple[Node, Node]:
    """Row and column numbers of the last two dims."""
    rows, columns = x.shape[-2:]
    return reshape(arange(rows, r.mesh), (rows, 1)), arange(columns, r.mesh)


@aten("tril")
def _tril(r: Recorder, x: Node, diagonal: int = 0) -> Node:
    row, column = _grid(r, x)
    return w.where(w.le(w.sub(column, row), diagonal), x, r.number(0, x.dtype))


@aten("triu")
def _triu(r: Recorder, x: Node, diagonal: int = 0) -> Node:
    row, column = _grid(r, x)
    return w.where(w.ge(w.sub(column, row), diagonal), x, r.number(0, x.dtype))


# -- random: keyed by the step's seed, the site and the global index, so every layout draws the same ---------------------


def _draw(op: Any, r: Recorder, shape: Any, dtype: torch.dtype) -> Node:
    return op(r.seed, shape=tuple(int(n) for n in shape), dtype=DTYPE_NAMES[dtype], site=r.next_site())


aten("rand.default")(lambda r, size, dtype=None, **_: _draw(uniform, r, size, _kind(dtype)))
aten("randn.default")(lambda r, size, dtype=None, **_: _draw(normal, r, size, _kind(dtype)))
aten("rand_like")(lambda r, x, dtype=None, **_: _draw(uniform, r, x.shape, _kind(dtype, x.dtype)))
aten("randn_like")(lambda r, x, dtype=None, **_: _draw(normal, r, x.shape, _kind(dtype, x.dtype)))
aten("bernoulli.p")(lambda r, x, p=0.5, generator=None: _coin(r, x.shape, r.number(p, torch.float32), x.dtype))
aten("bernoulli.default", "bernoulli.Tensor")(lambda r, x, p=None, generator=None: _coin(r, x.shape, x if p is None else p, x.dtype))


def _coin(r: Recorder, shape: Any, chance: Node, dtype: torch.dtype) -> Node:
    """1 with this chance: as dropout keeps, where the number drawn is not below the chance of a 0."""
    zero = w.sub(r.number(1.0, torch.float32), to_dtype(chance, torch.float32))
    return to_dtype(w.ge(_draw(uniform, r, shape, torch.float32), zero), dtype)


@aten("uniform")
def _uniform(r: Recorder, x: Node, low: float = 0, high: float = 1, generator: Any = None) -> Node:
    u = _draw(uniform, r, x.shape, x.dtype)
    return w.add(w.mul(u, float(high - low)), float(low))


@aten("normal_functional")
def _normal(r: Recorder, x: Node, mean: float = 0, std: float = 1, generator: Any = None) -> Node:
    return w.add(w.mul(_draw(normal, r, x.shape, x.dtype), float(std)), float(mean))


@aten("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def _normal_about(r: Recorder, mean: Any, std: Any = 1.0, generator: Any = None) -> Node:
    """Torch gives what it is drawn about a gradient of zeros, not none."""
    given = [x for x in (mean, std) if isinstance(x, Node)]
    shape, kind = torch.broadcast_shapes(*(x.shape for x in given)), given[0].dtype
    drawn = w.add(w.mul(_draw(normal, r, shape, kind), r.stopped(std) if isinstance(std, Node) else float(std)),
                  r.stopped(mean) if isinstance(mean, Node) else float(mean))  # fmt: skip
    for x in given:
        drawn = w.where(constant(False, torch.bool, r.mesh), expand(x, shape), drawn) if r.moves(x) and not r.joint else drawn
    return drawn


@aten("normal.float_float")
def _normal_of(r: Recorder, mean: float, std: float, size: Any, dtype: Any = None, **_: Any) -> Node:
    return w.add(w.mul(_draw(normal, r, size, _kind(dtype)), float(std)), float(mean))


@aten("log_normal")
def _log_normal(r: Recorder, x: Node, mean: float = 1, std: float = 2, generator: Any = None) -> Node:
    return w.exp(_normal(r, x, mean, std))


@aten("exponential")
def _exponential(r: Recorder, x: Node, rate: float = 1, generator: Any = None) -> Node:
    """Never 0, so that its logarithm is a number."""
    u = _draw(uniform, r, x.shape, torch.float64)
    return to_dtype(w.mul(w.clamp(w.neg(w.log(w.sub(1.0, u))), lo=torch.finfo(x.dtype).eps / 2), 1.0 / rate), x.dtype)


@aten("geometric")
def _geometric(r: Recorder, x: Node, p: float, generator: Any = None) -> Node:
    u = _draw(uniform, r, x.shape, torch.float64)
    return to_dtype(w.add(w.floor(w.div(w.log(w.sub(1.0, u)), math.log1p(-p))), 1.0), x.dtype)


@aten("cauchy")
def _cauchy(r: Recorder, x: Node, median: float = 0, sigma: float = 1, generator: Any = None) -> Node:
    turn = w.mul(w.sub(_draw(uniform, r, x.shape, torch.float64), 0.5), math.pi)
    return to_dtype(w.add(w.mul(w.div(w.sin(turn), w.cos(turn)), float(sigma)), float(median)), x.dtype)


def _integers(r: Recorder, shape: Any, low: int, high: int, dtype: torch.dtype) -> Node:
    u = _draw(uniform, r, shape, torch.float64)
    return to_dtype(w.add(to_dtype(w.floor(w.mul(u, float(high - low))), torch.int64), low), dtype)


@aten("randint.default", "randint.low")
def _randint(r: Recorder, *given: Any, dtype: Any = None, **_: Any) -> Node:
    *bounds, size = given
    return _integers(r, size, *([0, *bounds][-2:]), _kind(dtype, torch.int64))


@aten("randint_like.default", "randint_like.low_dtype")
def _randint_like(r: Recorder, x: Node, *bounds: Any, dtype: Any = None, **_: Any) -> Node:
    return _integers(r, x.shape, *([0, *bounds][-2:]), _kind(dtype, x.dtype))


@aten("randperm.default")
def _randperm(r: Recorder, n: int, dtype: Any = None, **_: Any) -> Node:
    _, order = sort(_draw(uniform, r, (n,), torch.float64))
    return to_dtype(order, _kind(dtype, torch.int64))


@aten("multinomial")
def _multinomial(r: Recorder, p: Node, count: int, replacement: bool = False, generator: Any = None) -> Node:
    """By the largest of logarithms with Gumbel noise: one of them for every number, or the first so many where none comes twice."""
    classes, chances = p.shape[-1], w.log(to_dtype(p, torch.float64))
    shape = (*p.shape[:-1], count, classes) if replacement else p.shape
    noise = w.neg(w.log(_exponential(r, full(shape, 0.0, r.mesh, torch.float64))))
    if not replacement:
        _, found = topk(w.add(chances, noise), count)
        return found
    return argmax(w.add(reshape(chances, (*p.shape[:-1], 1, classes)), noise), -1)


@function(torch.nn.functional.rrelu, torch.rrelu)
def _rrelu(r: Recorder, x: Node, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: Any = None, **_: Any) -> Node:
    """A slope drawn for every number that is not positive; their mean where nothing is trained."""
    if inplace is True:
        return NotImplemented
    if not training:
        return alone(r, torch.ops.aten.leaky_relu.default, x, (lower + upper) / 2, dtype=x.dtype)
    slope = w.add(w.mul(_draw(uniform, r, x.shape, x.dtype), float(upper - lower)), float(lower))
    return w.where(w.le(x, 0.0), w.mul(x, slope), x)


@function(torch.nn.functional.one_hot)
def _one_hot(r: Recorder, index: Node, num_classes: int = -1) -> Node:
    if num_classes < 0:
        raise CaptureError(
            "one_hot without the number of classes has a shape that depends on data",
            needed="num_classes",
            found="-1",
            try_="F.one_hot(index, num_classes=N)",
            where=user_line(),
        )
    return one_hot(index, num_classes)


@function(torch.bincount)
def _bincount(r: Recorder, x: Node, weights: Any = None, minlength: int = 0) -> Node:
    """Counts up to `minlength`; beyond it torch would grow the result, and the step is refused when it runs."""
    return NotImplemented if weights is not None or not minlength else bincount(x, size=minlength)
