"""Small programs of the shapes that schedules are made for: optimizer steps, parallel layers, sums over two axes, training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.autodiff import backward
from weft.core.layout import O, P, Placement, R, S
from weft.core.node import Node
from weft.ops import comm
from weft.ops.norm import layer_norm
from weft.ops.pointwise import dropout, gelu, maximum, sqrt, square, tanh
from weft.ops.reduce import mean, sum_
from weft.testing.maker import Maker


def _axis(m: Maker) -> str:
    return m.rng.choice(m.mesh.axes)


def _on(m: Maker, places: Mapping[str, Placement] | None = None) -> dict[str, Placement]:
    """Replicated along every axis but those named."""
    return {**dict.fromkeys(m.mesh.axes, R), **(places or {})}


def _sums(m: Maker, axis: str) -> dict[str, Placement]:
    """Partial along one axis, or along all."""
    return dict.fromkeys(m.mesh.axes, P()) if m.rng.random() < 0.4 else _on(m, {axis: P()})


def _reduced(m: Maker, x: Node) -> Node:
    for axis in m.rng.sample(m.mesh.axes, len(m.mesh.axes)):
        if isinstance(x.type.on(axis), P):
            x = m.keep(comm.all_reduce(x, axis=axis))
    return x


def optimizer(m: Maker) -> None:
    """Several parameters, gradients partial, moments as state; sometimes by norms, as LAMB and clipping do."""
    axis, norms = _axis(m), m.rng.choice(("none", "none", "trust", "clip"))
    shapes = [m.shape(1, 2) for _ in range(m.rng.randint(1, 3))]
    grads = [_reduced(m, m.input(s, _sums(m, axis))) for s in shapes]
    if norms == "clip":
        total = m.keep(sum_(square(grads[0])))
        for g in grads[1:]:
            total = m.keep(total + sum_(square(g)))
        grads = [m.keep(g / maximum(sqrt(total + 0.1), 1.0)) for g in grads]
    for s, g in zip(shapes, grads, strict=True):
        _update(m, s, g, norms == "trust")


def _update(m: Maker, shape: tuple[int, ...], g: Node, trust: bool) -> None:
    w, mo = (m.input(shape, _on(m)) for _ in range(2))
    v = m.input(shape, _on(m), kind="positive")
    m1, v1 = m.keep(0.9 * mo + 0.1 * g), m.keep(0.99 * v + 0.01 * (g * g))
    r = m1 / (sqrt(v1) + 0.1) + 0.01 * w
    if trust:
        r = r * (sqrt(sum_(square(w)) + 0.1) / sqrt(sum_(square(r)) + 0.1))
    w1 = m.keep(w - 0.1 * r)
    m.state += [(w1, w), (m1, mo), (v1, v)]


def layers(m: Maker) -> None:
    """A column-sharded and a row-sharded matmul, the sum, then bias, dropout, residual and perhaps a norm."""
    axis, (b, s, h, f) = _axis(m), (m.rng.choice(m.sizes) for _ in range(4))
    shape = m.rng.choice(((b, h), (b, s, h)))
    others = [a for a in m.mesh.axes if a != axis]
    data: dict[str, Placement] = {a: S(0) for a in others if m.rng.random() < 0.5}
    x, w1 = m.input(shape, _on(m, data)), m.input((h, f), _on(m, {axis: S(1)}))
    y = m.keep(m.rng.choice((gelu, tanh))(x @ w1) @ m.input((f, h), _on(m, {axis: S(0)})))
    y = m.keep(comm.all_reduce(y, axis=axis))
    y = m.keep(dropout(y + m.input((h,), _on(m)), 3, p=0.1, site=m.rng.randrange(9)) + x)
    if m.rng.random() < 0.5:
        m.keep(layer_norm(y, m.input((h,), _on(m)), eps=0.1))
    if m.rng.random() < 0.3:
        m.emit(lambda a, c: a @ c, y, m.input((h, f), _on(m, {axis: S(1)})))


def full_tensors(m: Maker) -> None:
    """Nothing sharded yet."""
    (b, h, f) = (m.rng.choice(m.sizes) for _ in range(3))
    x, w = m.input((b, h), _on(m)), m.input((h, f), _on(m))
    y = m.keep(tanh(x @ w) @ m.input((f, h), _on(m)))
    m.keep(m.rng.choice((lambda v: v + x, lambda v: sum_(v, dims=0), lambda v: layer_norm(v, eps=0.1)))(y))


def boundary(m: Maker) -> None:
    """The end of a stage: a sum, a few elementwise ops, and a send to the next stage."""
    axis = _axis(m)
    shape, sums = m.shape(1), [a for a in m.mesh.axes if a != axis]
    places: dict[str, Placement] = {**_on(m), **dict.fromkeys(sums, P()), axis: O(0)}
    y = _reduced(m, m.input(shape, places))
    y = m.keep(dropout(y + m.input(shape[-1:], _on(m)), 5, p=0.2, site=1))
    m.keep(comm.send(y, axis=axis, to=m.rng.randrange(m.mesh.sizes[axis])))


def training(m: Maker) -> None:
    """A loss, its gradients in the layouts they are born in, their reduction, and a step of descent."""
    axis, (b, h, f) = _axis(m), (m.rng.choice(m.sizes) for _ in range(3))
    x = m.input((b, h), _on(m, {axis: S(0)}))
    ws = [m.input((h, f), _on(m)), m.input((f, h), _on(m))]
    y = tanh(x @ ws[0]) @ ws[1]
    loss = m.keep(mean(square(y - x)))
    one = m.keep(sum_(m.input((1,), _on(m), kind="positive")))
    grads = backward({loss: one}, ws)
    for w in ws:
        g = _reduced(m, m.keep(grads[w]))
        m.state.append((m.keep(w - 0.1 * g), w))


MOTIFS: tuple[Callable[[Maker], Any], ...] = (optimizer, optimizer, layers, layers, full_tensors, boundary, training)
