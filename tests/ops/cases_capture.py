"""Ops that captured programs bring: rotary tables, experts without a capacity, optimizer updates, random sources, opaque ops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.harness import Input, case, index, normal, positive
from weft.core.layout import Layout, Mesh
from weft.core.node import Type, op_named
from weft.core.program import new_program
from weft.ops import custom_gradient, opaque, optimizers, order, pointwise, random, rotary
from weft.ops import experts as ex
from weft.ops import pointwise as w
from weft.ops.pointwise import uniform_at
from weft.ops.source import input_node

# -- rotary tables -------------------------------------------------------------------------------------------------------------


def rope_by_hand(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rope(x: Any, cos: Any, sin: Any) -> Any:
    return rotary.rope(x, op_named("stop_gradient")(cos), op_named("stop_gradient")(sin))


def rope_as_data(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rope_by_hand(x, cos.detach(), sin.detach())


# -- experts -------------------------------------------------------------------------------------------------------------------

E = 3


def every_expert(
    x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *gate: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens, then the picked ones weighed: nothing shared with the op."""
    y = torch.einsum("td,efd->tef", x, up)
    y = F.silu(torch.einsum("td,efd->tef", x, gate[0])) * y if gate else F.silu(y)
    y = torch.einsum("tef,edf->ted", y, down)
    share = torch.einsum("tk,tke->te", weights, F.one_hot(picks, E).to(x.dtype))
    return torch.einsum("te,ted->td", share, y)


def experts_back(ct: torch.Tensor, x: torch.Tensor, picks: torch.Tensor, *rest: torch.Tensor) -> Any:
    leaves = [t.detach().clone().requires_grad_() for t in (x, *rest)]
    return torch.autograd.grad(every_expert(leaves[0], picks, *leaves[1:]), leaves, ct)


# -- optimizers, against torch.optim on one step ---------------------------------------------------------------------------------


def torch_step(kind: Any, names: tuple[str, ...], count: int = 3, **how: Any) -> Any:
    """(p, g, *state, lr, step) -> what torch.optim makes of the parameter and its state."""

    def run(p: torch.Tensor, g: torch.Tensor, *rest: torch.Tensor) -> Any:
        *state, lr, _ = rest
        q = torch.nn.Parameter(p.detach().clone())
        q.grad = g.detach().clone()
        optimizer = kind([q], lr=lr.item(), **how)
        held = {"step": torch.tensor(float(count - 1)), **{n: s.clone() for n, s in zip(names, state, strict=True)}}
        optimizer.state[q] = held
        optimizer.step()
        out = (q.detach(), *(optimizer.state[q][n] for n in names))
        return out[0] if len(out) == 1 else out

    return run


def number(value: float, dtype: torch.dtype = torch.float64) -> Input:
    return Input((), lambda g, s: torch.tensor(value, dtype=dtype))


THIRD = (number(0.02), number(3, torch.int64))
_ADAM = {"betas": (0.9, 0.99), "eps": 1e-8, "sign": 1}


def _adam(decay: float, decoupled: bool) -> Any:
    return lambda *xs: optimizers.adam(*xs, **_ADAM, decay=decay, decoupled=decoupled)


def _adam_unfolded(*xs: Any) -> Any:
    n = _adam(0.1, True)(*xs)
    return n.op.unfold(n)


def _sgd(*xs: Any) -> Any:
    return optimizers.sgd(*xs, momentum=0.9, damping=0.1, nesterov=False, decay=0.1, sign=1)


def _sgd_plain(*xs: Any) -> Any:
    return optimizers.sgd(*xs, momentum=0.0, damping=0.0, nesterov=False, decay=0.0, sign=1)


_adam_names, _adam_how = ("exp_avg", "exp_avg_sq"), {"betas": (0.9, 0.99), "weight_decay": 0.1}
def _lion() -> str:
    """The arithmetic of Lion's update as the text that an `update` has."""
    x = [input_node(f"x{i}", Type(torch.float64, Layout.of(Mesh(), (2,) if i < 3 else ()))) for i in range(4)]
    moved = x[0] - w.sign(x[2] * 0.9 + x[1] * 0.1) * x[3]
    return new_program("update", Mesh(), x, {"y0": moved, "y1": x[2] * 0.99 + x[1] * 0.01}).text


_rest = {"smooth": False, "partial": False, "roots": False, "inner": False}
_plain_sgd = "lr and g are factors of one product each: linear in (p, g) together, which the entry does not claim"

# -- random sources and opaque ops -----------------------------------------------------------------------------------------------


def _uniform_by_hand(seed: torch.Tensor) -> torch.Tensor:
    return uniform_at(torch.arange(6).reshape(2, 3), seed, 4).double()


def _normal_by_hand(seed: torch.Tensor) -> torch.Tensor:
    at = torch.arange(6).reshape(2, 3)
    a, b = uniform_at(2 * at, seed, 4), uniform_at(2 * at + 1, seed, 4)
    return (torch.sqrt(-2 * torch.log1p(-a)) * torch.cos(2 * torch.pi * b)).double()


def _own(x: Any) -> Any:
    """A square whose gradient was made by hand."""
    value = pointwise.mul(x, x)
    ct = input_node("ct", value.type)
    return custom_gradient.with_gradient("square", value, (x,), ct, (pointwise.mul(pointwise.mul(ct, x), 2.0),), 0)


def _opaque(x: Any, y: Any) -> Any:
    call = (("tensor", 0), ("tensor", 1))
    return opaque.opaque(x, y, target="aten.logaddexp.default", call=call, keys=(), gives=(("f64", (3, 4)),))


_LOGADDEXP = {"target": "aten.logaddexp.default", "call": (("tensor", 0), ("tensor", 1)), "keys": (), "gives": (("f64", (3, 4)),),
              "of": (0,), "to": (0, 1), "operands": 2}  # fmt: skip


def _pulled_twice(back: torch.Tensor, other: torch.Tensor, ct: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
    leaves = [v.detach().requires_grad_() for v in (x, y, ct)]
    first = torch.autograd.grad(torch.logaddexp(*leaves[:2]), leaves[:2], leaves[2], create_graph=True)
    return torch.autograd.grad(first, leaves, (back, other))


def _each(target: str, *numbers: Any) -> Any:
    """A torch op on each element, its operands first, then numbers."""

    def make(*xs: Any) -> Any:
        call = (*(("tensor", i) for i in range(len(xs))), *numbers)
        return opaque.each(*xs, target=target, call=call, keys=(), gives="f64")

    return make


def _pulled(make: Any) -> Any:
    """(ct, operands) -> what the op's vjp makes of them."""
    return lambda ct, *xs: found if len(found := (n := make(*xs)).op.vjp(n, ct)) > 1 else found[0]


def _torch_pulled(f: Any) -> Any:
    def run(ct: torch.Tensor, *xs: torch.Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in xs]
        found = torch.autograd.grad(f(*leaves), leaves, ct, create_graph=any(x.requires_grad for x in (ct, *xs)))
        return found if len(found) > 1 else found[0]

    return run


_NEVER_CUT = "weft does not know the op, so it is never sharded"

CASES = [
    case("rope", rope, rope_as_data, normal(2, 3, 4), normal(3, 4), normal(3, 4), inner=False, partial=False),
    case("rope pending", rope, rope_as_data, normal(3, 4), normal(1, 4), normal(1, 4), inner=False, refused="tables are data"),
    case(
        "rope inverse",
        lambda x, c, s: rotary.rope(x, c, s, inverse=True),
        lambda x, c, s: x * c - rope_by_hand(x * s, torch.zeros_like(c), torch.ones_like(c)),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        smooth=False,
        inner=False,
        partial=False,
    ),
    case(
        "experts",
        lambda *xs: ex.experts(*xs, act="silu"),
        every_expert,
        normal(4, 3),
        index(E, 4, 2),
        normal(4, 2),
        normal(E, 2, 3),
        normal(E, 3, 2),
        local=True,
        inner=False,
        roots=False,
    ),
    case(
        "experts gated",
        lambda *xs: ex.experts(*xs, act="silu"),
        every_expert,
        normal(4, 3),
        index(E, 4, 2),
        normal(4, 2),
        normal(E, 2, 3),
        normal(E, 3, 2),
        normal(E, 2, 3),
        local=True,
        inner=False,
        roots=False,
        partial=False,
    ),
    case(
        "experts backward",
        lambda *xs: ex.experts_backward(*xs, act="silu"),
        experts_back,
        normal(4, 3),
        normal(4, 3),
        index(E, 4, 2),
        normal(4, 2),
        normal(E, 2, 3),
        normal(E, 3, 2),
        local=True,
        inner=False,
        roots=False,
        partial=False,
        smooth=False,
    ),
    case(
        "adamw",
        _adam(0.1, True),
        torch_step(torch.optim.AdamW, _adam_names, **_adam_how),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        positive(3, 4),
        *THIRD,
        **_rest,
    ),
    case(
        "adam",
        _adam(0.1, False),
        torch_step(torch.optim.Adam, _adam_names, **_adam_how),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        positive(3, 4),
        *THIRD,
        **_rest,
    ),
    case(
        "adamw unfolded",
        _adam_unfolded,
        torch_step(torch.optim.AdamW, _adam_names, **_adam_how),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        positive(3, 4),
        *THIRD,
        **_rest,
    ),
    case(
        "sgd with momentum",
        _sgd,
        torch_step(torch.optim.SGD, ("momentum_buffer",), momentum=0.9, dampening=0.1, weight_decay=0.1),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        *THIRD,
        **_rest,
    ),
    case("sgd", _sgd_plain, torch_step(torch.optim.SGD, ()), normal(5), normal(5), *THIRD, **_rest),
    case(
        "adagrad",
        lambda *xs: optimizers.adagrad(*xs, decay=0.1, lr_decay=0.3, eps=1e-10, sign=1),
        torch_step(torch.optim.Adagrad, ("sum",), weight_decay=0.1, lr_decay=0.3),
        normal(3, 4),
        normal(3, 4),
        positive(3, 4),
        *THIRD,
        **_rest,
    ),
    case(
        "rmsprop",
        lambda *xs: optimizers.rmsprop(*xs, alpha=0.9, eps=1e-8, decay=0.1, momentum=0.8, sign=1),
        torch_step(torch.optim.RMSprop, ("square_avg", "momentum_buffer"), alpha=0.9, weight_decay=0.1, momentum=0.8),
        normal(3, 4),
        normal(3, 4),
        positive(3, 4),
        normal(3, 4),
        *THIRD,
        **_rest,
    ),
    case(
        "update",
        lambda *xs: optimizers.update(*xs, body=_lion(), numbers=1),
        lambda p, g, m, lr: (p - lr * (0.9 * m + 0.1 * g).sign(), 0.99 * m + 0.01 * g),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        THIRD[0],
        **_rest,
    ),
    case(
        "uniform",
        lambda s: random.uniform(s, shape=(2, 3), dtype="f64", site=4),
        _uniform_by_hand,
        index(99),
        smooth=False,
        partial=False,
        roots=False,
    ),
    case(
        "normal",
        lambda s: random.normal(s, shape=(2, 3), dtype="f64", site=4),
        _normal_by_hand,
        index(99),
        smooth=False,
        partial=False,
        roots=False,
    ),
    case("bincount", lambda x: order.bincount(x, size=4), lambda x: torch.bincount(x, minlength=4), index(4, 7), smooth=False, partial=False),
    case("each", _each("aten.logaddexp.default"), torch.logaddexp, normal(3, 4), normal(4)),
    case("each by a backward op", _each("aten.softplus.default", 2.0), lambda x: F.softplus(x, 2.0), normal(5, 4)),
    case(
        "each slope",
        _pulled(_each("aten.logaddexp.default")),
        _torch_pulled(torch.logaddexp),
        normal(3, 4), normal(3, 4), normal(3, 4),
        smooth=False, inner=False,
    ),
    case(
        "each backward",
        _pulled(_each("aten.softplus.default", 2.0)),
        _torch_pulled(lambda x: F.softplus(x, 2.0)),
        normal(5, 4), normal(5, 4),
        smooth=False,
    ),
    case("own gradient", _own, torch.square, normal(5, 4)),
    case("opaque", _opaque, torch.logaddexp, normal(3, 4), normal(3, 4), refused=_NEVER_CUT),
    case(
        "opaque gradient",
        lambda ct, x, y: (n := _opaque(x, y)).op.vjp(n, ct),
        lambda ct, x, y: torch.autograd.grad(
            torch.logaddexp(a := x.detach().clone().requires_grad_(), b := y.detach().clone().requires_grad_()), (a, b), ct
        ),
        normal(3, 4),
        normal(3, 4),
        normal(3, 4),
        smooth=False,
        inner=False,
        refused=_NEVER_CUT,
    ),
    case(
        "the gradient of an opaque gradient",
        lambda back, other, ct, x, y: (n := opaque.opaque_grad(x, y, ct, **_LOGADDEXP)).op.vjp(n, back, other),
        _pulled_twice,
        normal(3, 4), normal(3, 4), normal(3, 4), normal(3, 4), normal(3, 4),
        refused=_NEVER_CUT,
        smooth=False,
        inner=False,
    ),
]
