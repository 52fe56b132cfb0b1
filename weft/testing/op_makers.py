"""One little maker per op: it picks or makes operands that fit, and emits the op. A test fails when an op has none.

Here the elementwise ops, the views, reductions and matmuls; larger ops and communication are in modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weft.core.node import Node, op_named
from weft.ops.comm import all_reduce_partials
from weft.ops.fill import arange, full, overwritten, scale_gradient, shardings_of
from weft.ops.linalg import einsum
from weft.ops.pointwise import UNARY, clamp, dropout, keep_where, pow_, where
from weft.ops.reduce import logsumexp, mean, squares_about, var_mean
from weft.ops.shape import concat, expand, expand_like, narrow, pad, permute, reshape
from weft.testing.maker import Maker, Stuck

Grow = Callable[[Maker], Any]
MAKERS: dict[str, Grow] = {}
POSITIVE = ("log", "sqrt", "rsqrt")  # take no others


def makes(*names: str) -> Callable[[Grow], Grow]:
    """Enters a maker into the table, for the ops named."""

    def enter(grow: Grow) -> Grow:
        MAKERS.update(dict.fromkeys(names, grow))
        return grow

    return enter


# -- elementwise -----------------------------------------------------------------------------------------------------------------


def _other_operand(m: Maker, x: Node) -> Any:
    """Another operand: the same, stretched over x, or a number."""
    what = m.rng.random()
    if what < 0.15:
        return m.rng.choice((0.5, 2.0, -1.5))
    shape = x.shape if what < 0.75 else tuple(n if m.rng.random() < 0.5 else 1 for n in x.shape)[m.rng.randint(0, x.ndim) :]
    return m.sized(shape)


def _binary(name: str) -> Grow:
    def grow(m: Maker) -> Any:
        op, x = op_named(name), m.some()
        y = m.positive(x.shape) if name == "div" and m.rng.random() < 0.7 else _other_operand(m, x)
        if not isinstance(y, Node):
            swapped = m.rng.random() < 0.5 and name != "div"
            return m.emit(lambda a: op(y, a) if swapped else op(a, y), x)
        return m.emit(op, *((x, y) if name == "div" or m.rng.random() < 0.7 else (y, x)))

    return grow


def _of_positives(name: str) -> Grow:
    return lambda m: m.emit(op_named(name), m.positive())


def _unary(name: str) -> Grow:
    return lambda m: m.emit(op_named(name), m.some())


MAKERS |= {n: _binary(n) for n in ("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le")}
MAKERS |= {n: _unary(n) for n in ("neg", "relu", "gelu", "silu", "abs", "sign", *(n for n in UNARY if n not in POSITIVE))}
MAKERS |= {n: _unary(n) for n in ("square", "floor", "isfinite", "stop_gradient")}
MAKERS |= {n: _of_positives(n) for n in POSITIVE}


@makes("eq", "ne")
def _equal(m: Maker) -> Any:
    x = m.index(4, m.shape())
    return m.emit(op_named(m.rng.choice(("eq", "ne"))), x, m.index(4, x.shape))


@makes("logical_and", "logical_or", "logical_not")
def _logic(m: Maker) -> Any:
    name = m.rng.choice(("logical_and", "logical_or", "logical_not"))
    x = m.some(dtype="bool", kind="flags")
    return m.emit(op_named(name), *([x] if name == "logical_not" else [x, m.sized(x.shape, "bool", "flags")]))


@makes("pow")
def _power(m: Maker) -> Any:
    return m.emit(lambda x: pow_(x, m.rng.choice((2.0, 0.5, -1.0))), m.positive())


@makes("where")
def _where(m: Maker) -> Any:
    x = m.some()
    return m.emit(where, m.sized(x.shape, "bool", "flags"), x, m.sized(x.shape))


@makes("keep_where")
def _keep_where(m: Maker) -> Any:
    x = m.some()
    return m.emit(keep_where, x, m.sized(x.shape, "bool", "flags"))


@makes("overwritten")
def _overwritten(m: Maker) -> Any:
    x = m.some()
    return m.emit(overwritten, x, m.sized(x.shape))


@makes("scale_gradient")
def _scale_gradient(m: Maker) -> Any:
    x = m.some()
    return m.emit(scale_gradient, x, m.sized(x.shape))


@makes("clamp")
def _clamp(m: Maker) -> Any:
    bounds = m.rng.choice(({"lo": -0.5}, {"hi": 0.5}, {"lo": -0.5, "hi": 0.7}))
    return m.emit(lambda x: clamp(x, **bounds), m.some())


@makes("cast")
def _cast(m: Maker) -> Any:
    source = m.rng.choice(("bool", "i64", "f64"))
    to = "f64" if source != "f64" else m.rng.choice(("i64", "f64"))
    kind = {"bool": "flags", "i64": "below 4"}.get(source, "normal")
    return m.emit(lambda x: op_named("cast")(x, dtype=to), m.some(dtype=source, kind=kind))


@makes("dropout")
def _dropout(m: Maker) -> Any:
    site, p = m.rng.randrange(100), m.rng.choice((0.1, 0.5))
    if m.rng.random() < 0.5:
        return m.emit(lambda x: dropout(x, 7, p=p, site=site), m.some())
    return m.emit(lambda x, seed: dropout(x, seed, p=p, site=site), m.some(), m.input((), {}, dtype="i64", kind="below 99"))


# -- shapes ------------------------------------------------------------------------------------------------------------------------


def _factored(m: Maker, n: int) -> list[int]:
    """A size as one, two or three factors."""
    out = [n]
    for _ in range(m.rng.randint(0, 2)):
        a = m.rng.choice([d for d in range(1, out[-1] + 1) if out[-1] % d == 0])
        out[-1:] = [a, out[-1] // a]
    return out


@makes("reshape")
def _reshape(m: Maker) -> Any:
    x = m.some(1)
    if m.rng.random() < 0.5:
        shape = _factored(m, math.prod(x.shape))
    else:
        shape = [f for n in x.shape for f in _factored(m, n)][:5]
    if math.prod(shape) != math.prod(x.shape) or tuple(shape) == x.shape:
        raise Stuck
    return m.emit(lambda v: reshape(v, shape), x)


@makes("permute")
def _permute(m: Maker) -> Any:
    x = m.some(2)
    return m.emit(lambda v: permute(v, m.rng.sample(range(v.ndim), v.ndim)), x)


@makes("expand")
def _expand(m: Maker) -> Any:
    shape = [m.rng.choice((1, n)) for n in m.shape(1)]
    big = [m.rng.choice(m.sizes) if n == 1 else n for n in shape]
    if m.rng.random() < 0.5:
        return m.emit(lambda v: expand(v, big), m.sized(shape))
    return m.emit(expand_like, m.sized(shape), m.sized(big))


@makes("narrow")
def _narrow(m: Maker) -> Any:
    x = m.some(1)
    d = m.dim(x)
    a, b = sorted((m.rng.randint(0, x.shape[d]), m.rng.randint(0, x.shape[d])))
    return m.emit(lambda v: narrow(v, d, a, max(b, a + 1) if a < x.shape[d] else b, m.rng.choice((1, 1, 2))), x)


@makes("concat")
def _concat(m: Maker) -> Any:
    x = m.some(1)
    d = m.dim(x)
    shape = tuple(m.rng.choice(m.sizes) if i == d else n for i, n in enumerate(x.shape))
    return m.emit(lambda *xs: concat(xs, d), x, m.sized(shape))


@makes("pad")
def _pad(m: Maker) -> Any:
    x = m.some(1)
    d, before, after = m.dim(x), m.rng.randint(0, 2), m.rng.randint(0, 2)
    return m.emit(lambda v: pad(v, d, before, after), x)


@makes("optimization_barrier", "item")
def _joined(m: Maker) -> Any:
    x = m.some()
    return m.emit(op_named("optimization_barrier"), x, m.some())


@makes("full")
def _full(m: Maker) -> Any:
    like = m.some()
    return m.make(lambda: full(like.shape, m.rng.choice((0.5, -1.0)), m.mesh, "f64", shardings_of(like)))


@makes("arange")
def _arange(m: Maker) -> Any:
    like = m.some(1, 1)
    start, step, dtype = m.rng.randint(0, 3), m.rng.choice((1, 2)), m.rng.choice(("i64", "f64"))
    return m.make(lambda: arange(like.shape[0], m.mesh, start=start, step=step, dtype=dtype, shards=shardings_of(like)))


@makes("input")
def _input(m: Maker) -> Any:
    return m.input(m.shape())


@makes("const")
def _const(m: Maker) -> Any:
    return m.emit(lambda x: x * 0.5, m.some())


# -- reductions, matmuls ----------------------------------------------------------------------------------------------------------


@makes("squares_about", "var_mean", "logsumexp")
def _reduce_whole(m: Maker) -> Any:
    x = m.some(1)
    d, keep = m.dim(x), m.rng.random() < 0.5
    options = [lambda v: squares_about(v, all_reduce_partials(mean(v, d, True)), dims=(d,), keepdim=keep), lambda v: logsumexp(v, dims=(d,), keepdim=keep)]
    options += [lambda v: var_mean(v, less=1, dims=(d,), keepdim=keep)] if x.shape[d] > 1 else []
    return m.emit(m.rng.choice(options), x)


@makes("sum", "amax", "amin")
def _reduce(m: Maker) -> Any:
    op, x = op_named(m.rng.choice(("sum", "sum", "amax", "amin"))), m.some(1)
    dims = tuple(d for d in range(x.ndim) if m.rng.random() < 0.6) or None
    return m.emit(lambda v: op(v, dims=dims, keepdim=m.rng.random() < 0.3), x)


@makes("matmul")
def _matmul(m: Maker) -> Any:
    x = m.some(2)
    batch = x.shape[:-2] if m.rng.random() < 0.3 else ()
    return m.emit(op_named("matmul"), x, m.sized((*batch, x.shape[-1], m.rng.choice(m.sizes))))


EINSUMS = ("ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "ij,ij->i", "ij,ij->", "i,j->ij", "ijk,jk->ik", "ij->ji", "ij,jk,k->i", "ij->i")


@makes("einsum")
def _einsum(m: Maker) -> Any:
    text = m.rng.choice(EINSUMS)
    ins = text.split("->")[0].split(",")
    first = m.some(len(ins[0]), len(ins[0]))
    size = dict(zip(ins[0], first.shape, strict=True))
    for c in "".join(ins):
        size.setdefault(c, m.rng.choice(m.sizes))
    return m.emit(lambda *xs: einsum(text, *xs), first, *(m.sized([size[c] for c in x]) for x in ins[1:]))
