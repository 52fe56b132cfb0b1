"""Makers of communication, and of backward ops, which come from gradients."""

from __future__ import annotations

from typing import Any

from weft.autodiff import backward, dual_layout
from weft.core.errors import NotDifferentiable
from weft.core.layout import P, R
from weft.core.node import Node, op_named
from weft.ops import comm
from weft.testing import block_makers as _  # noqa: F401 - fills the table
from weft.testing.maker import Maker, Stuck
from weft.testing.op_makers import MAKERS, Grow, makes

__all__ = ["MAKERS", "Grow"]

# -- communication -------------------------------------------------------------------------------------------------------------------


def _with_place(m: Maker, kind: Any, least: int = 0) -> tuple[Node, str]:
    """A node one of whose axes holds it so."""
    axis = m.rng.choice(m.mesh.axes)
    found = m.pick(lambda n: isinstance(n.type.on(axis), kind) and n.ndim >= least)
    return found or m.input(m.shape(least), {axis: P() if kind is P else R}), axis


@makes("all_reduce")
def _all_reduce(m: Maker) -> Any:
    x, axis = _with_place(m, P)
    return m.make(lambda: comm.all_reduce(x, axis=axis))


@makes("reduce_scatter")
def _reduce_scatter(m: Maker) -> Any:
    x, axis = _with_place(m, P, 1)
    return m.make(lambda: comm.reduce_scatter(x, axis=axis, dim=m.dim(x)))


@makes("reduce", "broadcast", "send")
def _rooted(m: Maker) -> Any:
    x, axis = _with_place(m, P)
    roots = m.mesh.sizes[axis]
    at = m.make(lambda: comm.reduce_(x, axis=axis, root=m.rng.randrange(roots)))
    if m.rng.random() < 0.5:
        at = m.make(lambda: comm.send(at, axis=axis, to=m.rng.randrange(roots)))
    return m.make(lambda: comm.broadcast(at, axis=axis)) if m.rng.random() < 0.7 else at


@makes("slice", "all_gather", "all_to_all")
def _shard_and_gather(m: Maker) -> Any:
    x, axis = _with_place(m, type(R), 1)
    part = m.make(lambda: comm.slice_(x, axis=axis, dim=m.dim(x)))
    if m.rng.random() < 0.4 and x.ndim > 1:
        part = m.move(part, axis)
    if m.rng.random() < 0.5 and part.dtype.is_floating_point:
        part = m.emit(op_named(m.rng.choice(("neg", "exp", "tanh"))), part)
    return m.move(part, axis, towards_replicated=m.rng.random() < 0.7)


@makes("keep")
def _keep(m: Maker) -> Any:
    x, axis = _with_place(m, type(R))
    return m.make(lambda: comm.keep(x, axis=axis, root=m.rng.randrange(m.mesh.sizes[axis])))


# -- backward ops come from gradients ------------------------------------------------------------------------------------------------


def _gradient(m: Maker, y: Node) -> Any:
    """Cotangents of the inputs a node is computed from, taken into the pool."""
    wrt = [a for a in m.inputs if a.dtype.is_floating_point]
    layout = dual_layout(y.type)
    ct = m.input(y.shape, layout.placements)
    try:
        return [m.keep(g, steady=False) for g in backward({y: ct}, wrt).values()]
    except NotDifferentiable as e:  # second order
        raise Stuck from e


def _backward_of(forward: str) -> Grow:
    def grow(m: Maker) -> Any:
        made = MAKERS[forward](m)
        nodes = [n for n in (made if isinstance(made, (list, tuple)) else [made]) if len(n.types) == 1 and n.dtype.is_floating_point]
        if not nodes:
            raise Stuck
        return _gradient(m, nodes[0])

    return grow


FORWARD = {
    "gelu": ("gelu_backward",),
    "silu": ("silu_backward",),
    "relu": ("relu_backward",),
    "softmax": ("softmax_backward", "log_softmax_backward"),
    "layer_norm": ("layer_norm_backward", "rms_norm_backward"),
    "cross_entropy": ("cross_entropy_backward",),
    "combine": ("slot_dots",),
    "attention": ("attention_backward", "attention_lse_backward", "attention_mask_backward"),
    "conv2d": ("conv2d_input_grad", "conv2d_weight_grad"),
    "avg_pool2d": ("avg_pool2d_backward",),
    "adaptive_avg_pool2d": ("adaptive_avg_pool2d_backward",),
    "max_pool2d": ("max_pool2d_backward",),
}
MAKERS |= {back: _backward_of(forward) for forward, backs in FORWARD.items() for back in backs}
