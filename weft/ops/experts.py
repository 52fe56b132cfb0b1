"""Experts without a capacity: each token goes through the experts in its row of `picks`, and none is dropped.

Labels: t tokens, d features, k picks of a token, e experts, f hidden features of an expert. Sharded t, and each rank takes its
tokens through all experts; sharded e, and it takes all tokens through its own experts, and the result is a partial sum; sharded f
likewise. A token's work is k experts', however many there are. With a capacity (`capture(capacity=...)`) the same
modules become dispatch, matmuls over slots and combine, whose tokens are sent by all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.node import Attrs, Node
from weft.ops import pointwise as w
from weft.ops.comm import all_reduce_partials
from weft.ops.registry import Equation, Kind, Local, Types, define

TOKENS, PICKS, UP, DOWN = ("t", "d"), ("t", "k"), ("e", "f", "d"), ("e", "d", "f")
WHOLE = frozenset("dk")
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "silu": (F.silu, w.silu),
    "relu": (F.relu, w.relu),
    "gelu": (F.gelu, w.gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda x: w.gelu(x, tanh=True)),
}


def gated(act: str, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up; by `clamped:A:L:S`, of gates up to L and ups between -L and L, gate * sigmoid(A gate) * (up + S)."""
    if not act.startswith("clamped:"):
        return ACTIVATIONS[act][0](gate) * up
    slope, limit, shift = map(float, act.split(":")[1:])
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + shift)


def _equation(types: Types, attrs: Attrs) -> Equation:
    """x, picks, weights, up, down and, for gated experts, gate -> like x."""
    return Equation((TOKENS, PICKS, PICKS, UP, DOWN, UP)[: len(types)], (TOKENS,), whole=WHOLE)


def _through(stored: Tensor, x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, down: Tensor, *gate: Tensor, act: str) -> Tensor:
    """The sum over this rank's experts of what they make of the tokens that picked them."""
    out = torch.zeros_like(x)
    for i, expert in enumerate(stored.tolist()):
        token, place = torch.where(picks == expert)
        rows = x[token]
        y = rows @ up[i].T
        y = gated(act, rows @ gate[0][i].T, y) if gate else ACTIVATIONS[act][0](y)
        out = out.index_add(0, token, (y @ down[i].T) * weights[token, place, None])
    return out


def _run(*xs: Tensor, act: str, sent: str = "") -> Tensor:
    """`sent` names the axis along which tokens go to the ranks they picked alone, where they would be gathered: a way to run it, no other value."""
    return _through(torch.arange(xs[3].shape[0]), *xs, act=act)


def _back(stored: Tensor, ct: Tensor, *xs: Tensor, act: str) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        given = [x.detach().requires_grad_(i != 1) for i, x in enumerate(xs)]
        wrt = [given[0], *given[2:]]
        y = _through(stored, *given, act=act)
        grads = torch.autograd.grad(y, wrt, ct, allow_unused=True) if y.requires_grad else [None] * len(wrt)  # no expert here
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wrt, strict=True))


def _back_equation(types: Types, attrs: Attrs) -> Equation:
    ins = (TOKENS, TOKENS, PICKS, PICKS, UP, DOWN, UP)[: len(types)]
    return Equation(ins, (ins[1], *ins[3:]), whole=WHOLE)


def _back_run(ct: Tensor, *xs: Tensor, act: str, sent: str = "") -> tuple[Tensor, ...]:
    return _back(torch.arange(xs[3].shape[0]), ct, *xs, act=act)


def _work(n: Node, up: int, factor: float) -> float:
    """Matmuls of the picks that fall on the experts held, if picks fall evenly."""
    t, k = n.args[up - 2].type.layout.largest_local
    e, f, d = n.args[up].type.layout.largest_local
    return factor * t * k * (e / n.args[up].shape[0]) * f * d * (len(n.args) - up)


def _matmuls_of(n: Node, up: int) -> list[tuple[int, int, int, int]]:
    """Of picks that fall evenly: up (and gate), then down; of the backward pass the first again, and two for each."""
    t, k = n.args[up - 2].type.layout.largest_local
    e, f, d = n.args[up].type.layout.largest_local
    rows, wide = max(1, t * k // n.args[up].shape[0]), f * (len(n.args) - up - 1)
    ahead = [(rows, wide, d, e), (rows, d, f, e)]
    return ahead if up == 3 else [ahead[0], (rows, f, d, e), (f, d, rows, e), (rows, d, wide, e), (wide, d, rows, e)]


experts_backward = define(
    "experts_backward",
    kind=Kind.WHOLE,
    equation=_back_equation,
    run=_back_run,
    local=lambda ctx, ct, *xs, act, sent="": _back(ctx.positions(4, 0), ct, *xs, act=act),
    dtype=lambda types, attrs: (types[1].dtype, *(t.dtype for t in types[3:])),
    linear=(frozenset({0}),),
    flops=lambda n: _work(n, 4, 6.0),
    products=lambda n: _matmuls_of(n, 4),
)


def _vjp(n: Node, ct: Node) -> Any:
    dx, *rest = experts_backward(ct, *map(all_reduce_partials, n.args), act=n.attr("act"))
    return dx, None, *rest


def _local(ctx: Local, *xs: Tensor, act: str, sent: str = "") -> Tensor:
    return _through(ctx.positions(3, 0), *xs, act=act)


experts = define(
    "experts",
    kind=Kind.WHOLE,
    equation=_equation,
    run=_run,
    local=_local,
    by_dim=True,
    dtype=lambda types, attrs: types[0].dtype,
    linear=(frozenset({2}), frozenset({4})),
    vjp=_vjp,
    flops=lambda n: _work(n, 3, 2.0),
    products=lambda n: _matmuls_of(n, 3),
)
