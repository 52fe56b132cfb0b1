"""Sources, lookups and their transposes, orders, cross_entropy, rotary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.cases_norm import gradient_of
from tests.ops.harness import Input, case, distinct, index, normal
from weft.core.node import op_named
from weft.ops import comm, embed, fill, loss, order, segment
from weft.ops.rotary import rotary


def permutation(n: int) -> Input:
    return Input((n,), lambda g, s: torch.randperm(n, generator=g))


def permutations(rows: int, n: int) -> Input:
    """Per column a choice of `rows` different ones of n."""
    return Input((rows, 2), lambda g, s: torch.stack([torch.randperm(n, generator=g)[:rows] for _ in range(2)], 1))


def _segment_max(x: torch.Tensor, i: torch.Tensor, rows: int = 4) -> torch.Tensor:
    """Row by row, zeros where a segment has none."""
    return torch.stack([x[i == r].amax(0) if (i == r).any() else x[0] * 0 for r in range(rows)])


def _segment_max_of_nine(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return _segment_max(x, i, 9)


def _put(x: torch.Tensor, i: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    flat = x.reshape(*x.shape[:dim], i.numel(), *x.shape[dim + i.ndim :])
    return x.new_zeros(*x.shape[:dim], size, *x.shape[dim + i.ndim :]).index_add(dim, i.reshape(-1), flat)


def _embed_padded(w: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return F.embedding(i, w, padding_idx=2)


_SOURCES = [
    case(
        "arange",
        lambda x: x + fill.arange(5, x.mesh, start=2, step=3, dtype="f64", shards=fill.shardings_of(x)),
        lambda x: x + torch.arange(2, 17, 3).double(),
        normal(5),
        local=True,
    ),
    case(
        "indices",
        lambda x: op_named("cast")(fill.indices(x, 0), dtype="f64") * x,
        lambda x: torch.arange(5.0, dtype=torch.float64) * x,
        normal(5),
        local=True,
    ),
    case("full", lambda x: x * fill.full((5, 2), 1.5, x.mesh, "f64", fill.shardings_of(x)), lambda x: x * 1.5, normal(5, 2)),
    case("one_hot", lambda i: fill.one_hot(i, 4), lambda i: F.one_hot(i, 4), index(4, 5), smooth=False, local=True),
    case(
        "scale_gradient",
        lambda x, by: fill.scale_gradient(x, fill.stop_gradient(by)),
        lambda x, by: x * by.detach() + (x * (1 - by)).detach(),
        normal(5, 2),
        normal(5, 1),
        inner=False,
        refused="what multiplies is data, of which the value does not depend",
    ),
    case(
        "overwritten",
        fill.overwritten,
        lambda x, old: x.detach() + old - old.detach(),
        normal(5, 2),
        normal(5, 2),
        refused="what is overwritten has the gradient, and the value does not depend on it",
    ),
    case("stop_gradient", lambda x: fill.stop_gradient(x) * 2.0, lambda x: x.detach() * 2.0, normal(5, 2)),
]

_LOOKUPS = [
    case("embedding", embed.embedding, lambda w, i: F.embedding(i, w), normal(5, 3), index(5, 2, 3), local=True),
    case("embedding of one row", embed.embedding, lambda w, i: F.embedding(i, w), normal(5, 3), index(5), local=True),
    case("embedding of few", embed.embedding, lambda w, i: F.embedding(i, w), normal(1, 3), index(1, 5), local=True),
    case("embedding with padding", lambda w, i: embed.embedding(w, i, padding_idx=2), _embed_padded, normal(5, 3), index(5, 7), local=True),
    case(
        "index_select", lambda x, i: embed.take(x, i, 1), lambda x, i: torch.index_select(x, 1, i), normal(2, 5, 3), index(5, 4), local=True
    ),
    case(
        "put", lambda x, i: embed.put(x, i, fill.arange(4, x.mesh), 0), lambda x, i: _put(x, i, 4, 0), normal(5, 3), index(4, 5), local=True
    ),
    case(
        "segment_max",
        lambda x, i: segment.segment_max(x, i, fill.arange(4, x.mesh)),
        _segment_max,
        normal(7, 3),
        index(4, 7),
    ),
    case(
        "segment_max of one dim",
        lambda x, i: segment.segment_max(x, i, fill.arange(9, x.mesh)),
        _segment_max_of_nine,
        normal(7),
        index(9, 7),
    ),
    case(
        "segment_max with a dim of one",
        lambda x, i: segment.segment_max(x, i, fill.arange(4, x.mesh)),
        _segment_max,
        normal(7, 1, 3),
        index(4, 7),
    ),
    case(
        "segment_max of sharded segments",
        lambda x, i: segment.segment_max(x, i, comm.slice_(fill.arange(4, x.mesh), axis=next(iter(x.mesh.axes)), dim=0)),
        _segment_max,
        normal(7, 3),
        index(4, 7),
        refused="the axis shards the segments",
    ),
    case(
        "put along a later dim",
        lambda x, i: embed.put(x, i, fill.arange(3, x.mesh), 1),
        lambda x, i: _put(x, i, 3, 1),
        normal(2, 5, 3),
        index(3, 5),
        local=True,
    ),
    case(
        "index_add",
        lambda x, i, s: embed.index_add(x, i, s, 1),
        lambda x, i, s: x.index_add(1, i, s),
        normal(2, 5),
        index(5, 3),
        normal(2, 3),
        local=True,
        inner=False,
    ),
    case("gather", lambda x, i: embed.gather(x, i, 1), lambda x, i: x.gather(1, i), normal(3, 5), index(5, 3, 4), local=True),
    case("gather along dim 0", lambda x, i: embed.gather(x, i, 0), lambda x, i: x.gather(0, i), normal(2, 5), index(2, 3, 5), local=True),
    case("pick", embed.pick, lambda x, i: x.gather(-1, i[..., None])[..., 0], normal(2, 3, 5), index(5, 2, 3), local=True),
    case(
        "scatter_sum",
        lambda x, i: embed.scatter_sum(x, i, fill.arange(4, x.mesh), 0),
        lambda x, i: x.new_zeros(4, x.shape[1]).scatter_add(0, i, x),
        normal(5, 2),
        index(4, 5, 2),
        local=True,
    ),
    case(
        "scatter_add",
        lambda x, i, s: embed.scatter_add(x, i, s, 0),
        lambda x, i, s: x.scatter_add(0, i, s),
        normal(5, 2),
        index(5, 3, 2),
        normal(3, 2),
        local=True,
        inner=False,
    ),
    case(
        "scatter",
        lambda x, i, s: embed.scatter(x, i, s, 0),
        lambda x, i, s: x.scatter(0, i, s),
        normal(5, 2),
        permutations(3, 5),
        normal(3, 2),
        local=True,
        inner=False,
    ),
]

_ORDERS = [
    case("cumsum", lambda x: order.cumsum(x, 1), lambda x: x.cumsum(1), normal(5, 4)),
    case("cumsum from the end", lambda x: order.cumsum(x, 0, reverse=True), lambda x: x.flip(0).cumsum(0).flip(0), normal(5, 3)),
    case("cumsum of whole numbers", lambda x: order.cumsum(x, 0), lambda x: x.cumsum(0), index(9, 5, 3), smooth=False),
    case("sort", lambda x: order.sort(x, 1), lambda x: tuple(x.sort(1)), distinct(3, 5)),
    case("sort down", lambda x: order.sort(x, 0, descending=True), lambda x: tuple(x.sort(0, descending=True)), distinct(5, 2)),
    case("topk", lambda x: order.topk(x, 2), lambda x: tuple(x.topk(2)), distinct(3, 5)),
    case("topk along dim 0", lambda x: order.topk(x, 3, 0), lambda x: tuple(x.topk(3, 0)), distinct(5, 2)),
    case("argmax", lambda x: order.argmax(x, 1), lambda x: x.argmax(1), distinct(5, 4), smooth=False),
]


def targets(classes: int, *shape: int) -> Input:
    """Some of them ignored."""
    return Input(shape, lambda g, s: torch.where(torch.rand(s, generator=g) < 0.3, -100, torch.randint(0, classes, s, generator=g)))


def _ref_loss(**more: Any) -> Any:
    def ref(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        out = F.cross_entropy(x.flatten(0, -2), t.flatten(), **more)
        return out.reshape(t.shape) if more.get("reduction") == "none" else out

    return ref


def _loss_back(ct: Any, x: Any, t: Any) -> Any:
    return op_named("cross_entropy_backward")(ct, x, t, ignore_index=-100, smoothing=0.1)


def _ref_loss_back(ct: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return gradient_of(lambda y: F.cross_entropy(y, t, reduction="none", label_smoothing=0.1))(ct, x)[0]


_LOSSES = [
    case("cross_entropy", loss.cross_entropy, _ref_loss(), normal(5, 7), targets(7, 5), local=True),
    case("cross_entropy of sequences", loss.cross_entropy, _ref_loss(), normal(2, 3, 5), targets(5, 2, 3), local=True),
    case(
        "cross_entropy smoothed",
        lambda x, t: loss.cross_entropy(x, t, label_smoothing=0.1),
        _ref_loss(label_smoothing=0.1),
        normal(5, 7),
        targets(7, 5),
        local=True,
    ),
    case(
        "cross_entropy summed",
        lambda x, t: loss.cross_entropy(x, t, reduction="sum"),
        _ref_loss(reduction="sum"),
        normal(5, 4),
        targets(4, 5),
        local=True,
    ),
    case(
        "cross_entropy of each",
        lambda x, t: loss.cross_entropy(x, t, reduction="none", ignore_index=1),
        _ref_loss(reduction="none", ignore_index=1),
        normal(5, 4),
        index(4, 5),
        local=True,
    ),
    case("cross_entropy backward", _loss_back, _ref_loss_back, normal(5), normal(5, 4), targets(4, 5), smooth=False, inner=False),
]


def _turned(x: torch.Tensor, at: torch.Tensor, dim: int, interleaved: bool = False, base: float = 10000.0) -> torch.Tensor:
    """Pairs of features as complex numbers, multiplied by exp(i * position * frequency)."""
    d = x.shape[-1]
    x = x.movedim(dim, -2)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    angle = at.double()[..., None] * base ** (-torch.arange(0, d, 2).double() / d)
    while angle.ndim < x.ndim and at.ndim == 2:
        angle = angle.unsqueeze(1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    y = torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return y.movedim(-2, dim)


_ROTARY = [
    case("rotary", rotary, lambda x: _turned(x, torch.arange(5), -2), normal(2, 5, 4), local=True),
    case(
        "rotary by heads", lambda x: rotary(x, dim=1, start=3), lambda x: _turned(x, torch.arange(3, 8), 1), normal(2, 5, 2, 4), local=True
    ),
    case(
        "rotary interleaved",
        lambda x: rotary(x, interleaved=True, base=100.0),
        lambda x: _turned(x, torch.arange(5), -2, True, 100.0),
        normal(5, 6),
        local=True,
    ),
    case(
        "rotary of some features",
        lambda x: rotary(x, rotated=4),
        lambda x: torch.cat([_turned(x[..., :4], torch.arange(5), -2), x[..., 4:]], -1),
        normal(5, 7),
        local=True,
    ),
    case(
        "rotary by positions",
        lambda x, at: rotary(x, positions=at),
        lambda x, at: _turned(x, at, -2),
        normal(2, 5, 4),
        index(9, 5),
        local=True,
    ),
    case(
        "rotary by positions of each",
        lambda x, at: rotary(x, positions=at),
        lambda x, at: _turned(x, at, -2),
        normal(2, 3, 5, 4),
        index(9, 2, 5),
        local=True,
        inner=False,
    ),
]

CASES = [*_SOURCES, *_LOOKUPS, *_ORDERS, *_LOSSES, *_ROTARY]
