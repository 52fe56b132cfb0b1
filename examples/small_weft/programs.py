"""8. Two programs: Adam, which three verbs turn into ZeRO-1, and a step of an MLP for the planner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layouts import Mesh, tensor
from .nodes import Node, Program, trace
from .ops import above, add, all_reduce, div, mm, mm_t, mul, relu, scale, sqrt, step, sub, t_mm
from .verbs import shard_state, sink, split


def adam(g: Node, x: Node, m: Node, v: Node) -> dict[str, Node]:
    """g is a term of the gradient on each rank. No bias correction, to keep the text short."""
    g = scale(all_reduce(g, "dp"), 0.5)
    m = add(scale(m, 0.9), scale(g, 0.1))
    v = add(scale(v, 0.999), scale(mul(g, g), 0.001))
    return {"x": sub(x, scale(div(m, above(sqrt(v), 1e-4)), 0.01)), "m": m, "v": v}


def zero1(p: Program) -> Program:
    return shard_state(sink(split(p, dim=0)), "m", "v")


def mlp(x: Node, y: Node, w1: Node, w2: Node) -> dict[str, Node]:
    """A step of gradient descent on |relu(x w1) w2 - y|^2 / 2, forward and backward written out."""
    a = mm(x, w1)
    h = relu(a)
    error = sub(mm(h, w2), y)
    g2 = t_mm(h, error)
    g1 = t_mm(x, mul(mm_t(error, w2), step(a)))
    return {"w1": sub(w1, scale(g1, 1e-3)), "w2": sub(w2, scale(g2, 1e-3))}


def mlp_of(m: Mesh, batch: int, width: int) -> Program:
    x = tensor(m, batch, width)
    return trace(mlp, x=x, y=x, w1=tensor(m, width, 4 * width), w2=tensor(m, 4 * width, width))


def random_inputs(p: Program) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.rand(node.type.shape) for name, node in p.inputs.items()}


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-4)
