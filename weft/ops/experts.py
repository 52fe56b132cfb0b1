"""Experts without a capacity: each token goes through the experts in its row of `picks`, and none is dropped.

Labels: t tokens, d features, k picks of a token, e experts, f hidden features of an expert. Sharded t, and each rank takes its
tokens through all experts; sharded e, and it takes all tokens through its own experts, and the result is a partial sum; sharded f
likewise. A token's work is k experts', however many there are. With a capacity (`capture(capacity=...)`) the same
modules become dispatch, matmuls over slots and combine, whose tokens are sent by all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.node import Attrs, Node
from weft.core.program import Program
from weft.ops import pointwise as w
from weft.ops.comm import all_gather, all_reduce_partials, reduce_scatter
from weft.ops.registry import Equation, Kind, Local, Types, define
from weft.ops.shape import item, narrow_op, reshape_op

TOKENS, PICKS, UP, DOWN = ("t", "d"), ("t", "k"), ("e", "f", "d"), ("e", "d", "f")
UNSHARDED = frozenset("dk")
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
    return Equation((TOKENS, PICKS, PICKS, UP, DOWN, UP)[: len(types)], (TOKENS,), unsharded=UNSHARDED)


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


def _run(*xs: Tensor, act: str, sent: str = "", imbalance: float = 1.0) -> Tensor:
    """`sent` names the axis along which tokens go to the ranks they picked alone, where they would be gathered: a way to run it, no other value.
    `imbalance` is assumed of the picks, for prices: those of the busiest rank over those of an average one."""
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
    return Equation(ins, (ins[1], *ins[3:]), unsharded=UNSHARDED)


def _back_run(ct: Tensor, *xs: Tensor, act: str, sent: str = "", imbalance: float = 1.0) -> tuple[Tensor, ...]:
    return _back(torch.arange(xs[3].shape[0]), ct, *xs, act=act)


def _work(n: Node, up: int, factor: float) -> float:
    """Matmuls of the picks that fall on the experts held, if picks fall evenly."""
    t, k = n.args[up - 2].type.layout.largest_local
    e, f, d = n.args[up].type.layout.largest_local
    return factor * t * k * (e / n.args[up].shape[0]) * f * d * (len(n.args) - up)


def _matmuls_of(n: Node, up: int) -> list[tuple[int, int, int, int]]:
    """Of the busiest rank: up (and gate), then down; of the backward pass the first again, and two for each. No rank gets more picks than each
    token has experts here."""
    t, k = n.args[up - 2].type.layout.largest_local
    e, f, d = n.args[up].type.layout.largest_local
    count = n.args[up].shape[0]
    busiest = min(n.attr("imbalance") or 1.0, count / e * min(k, e) / k)
    rows, wide = max(1, int(t * k * busiest / count)), f * (len(n.args) - up - 1)
    ahead = [(rows, wide, d, e), (rows, d, f, e)]
    return ahead if up == 3 else [ahead[0], (rows, f, d, e), (f, d, rows, e), (rows, d, wide, e), (wide, d, rows, e)]


experts_backward = define(
    "experts_backward",
    kind=Kind.COMPOSITE,
    equation=_back_equation,
    run=_back_run,
    local=lambda ctx, ct, *xs, act, sent="", imbalance=1.0: _back(ctx.positions(4, 0), ct, *xs, act=act),
    dtype=lambda types, attrs: (types[1].dtype, *(t.dtype for t in types[3:])),
    linear=(frozenset({0}),),
    flops=lambda n: _work(n, 4, 6.0),
    matmuls=lambda n: _matmuls_of(n, 4),
)


def _vjp(n: Node, ct: Node) -> Any:
    dx, *rest = experts_backward(ct, *map(all_reduce_partials, n.args), act=n.attr("act"))
    return dx, None, *rest


def _local(ctx: Local, *xs: Tensor, act: str, sent: str = "", imbalance: float = 1.0) -> Tensor:
    return _through(ctx.positions(3, 0), *xs, act=act)


experts = define(
    "experts",
    kind=Kind.COMPOSITE,
    equation=_equation,
    run=_run,
    local=_local,
    by_dim=True,
    dtype=lambda types, attrs: types[0].dtype,
    linear=(frozenset({2}), frozenset({4})),
    vjp=_vjp,
    flops=lambda n: _work(n, 3, 2.0),
    matmuls=lambda n: _matmuls_of(n, 3),
)


# -- tokens sent to the ranks they picked, where they would be gathered ----------------------------------------------------------------


def picks_of(n: Node) -> int:
    """How many experts each token goes to."""
    return n.args[2 if n.op is experts_backward else 1].shape[-1]


@dataclass(frozen=True)
class Sending:
    """An op of experts that may send its tokens along an axis: the gathers of their rows, what leads from its result to each rank's slice of the sum, and
    the columns of the result that this takes."""

    gathers: tuple[Node, ...]
    made: tuple[Node, ...]

    @property
    def columns(self) -> tuple[int, int] | None:
        return next(((n.attr("start"), n.attr("stop")) for n in self.made if n.op is narrow_op), None)


def sending(p: Program, n: Node, axis: str) -> Sending | None:
    """What an op does itself where tokens are sent; None where its rows are not gathered along the axis, or the sum is not left in slices."""
    if n.op not in (experts, experts_backward):
        return None
    rows = n.args[: 2 if n.op is experts_backward else 1]
    gathered = all(a.op is all_gather and a.attr("axis") == axis and len(a.args) == 1 for a in rows)
    made = _to_slices(p, n, axis) if gathered else None
    return Sending(rows, made) if made is not None else None


def _to_slices(p: Program, n: Node, axis: str) -> tuple[Node, ...] | None:
    """What leads from the result of experts, or the first of several, to its sum over the ranks, each a slice; between them reshapes, and columns
    picked once, as where a bias is the weight of one more."""
    found: list[Node] = []
    users = [u for u in p.users[n] if u.op.is_item and u.attr("index") == 0] if len(n.types) > 1 else list(p.users[n])
    while len(users) == 1:
        found.append(users[0])
        if users[0].op is reduce_scatter and users[0].attr("axis") == axis and users[0].attr("dim") == 0:
            return tuple(found)
        rows = users[0].args[0].types[0].shape
        picks = users[0].op is narrow_op and users[0].attr("dim") == len(rows) - 1 and users[0].attr("step") == 1 and rows[-1] == n.types[0].shape[-1]
        once = picks and all(m.op is not narrow_op for m in found[:-1])
        if not (once or users[0].op in (reshape_op, item)) or p.outputs_of(users[0]):
            return None
        users = list(p.users[users[0]])
    return None


def sent(p: Program) -> Iterator[tuple[Node, Sending]]:
    """The ops of experts that are marked to send their tokens, and can."""
    for n in p.nodes:
        axis = n.attr("sent") if n.op in (experts, experts_backward) else ""
        found = sending(p, n, axis) if axis else None
        if found is not None:
            yield n, found


def left_out(p: Program) -> frozenset[Node]:
    """Gathers and sums in slices that are not run, since the ops of experts around them send their tokens."""
    made = dict(sent(p))
    gathers = {a for s in made.values() for a in s.gathers}
    alone = {a for a in gathers if not p.outputs_of(a) and all(u in made and a in made[u].gathers for u in p.users[a])}
    return frozenset(alone | {s.made[-1] for s in made.values()})
