"""Optimizers: one op per parameter, never traced. `unfold` gives an update in simpler ops, for whoever fuses it.

The learning rate of each group and the step count are inputs of the program, so schedulers keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.core.errors import CaptureError
from weft.core.node import Attrs, Node
from weft.ops import pointwise as w
from weft.ops.norm import to_dtype
from weft.ops.registry import Equation, Kind, Types, define

Values = tuple[Any, ...]
Body = Callable[..., Values]


def _equation(types: Types, attrs: Attrs) -> Equation:
    """Parameter, gradient and state alike; then the learning rate and the step, numbers. Out: parameter and state."""
    labels = tuple(f"d{i}" for i in range(len(types[0].shape)))
    return Equation((labels,) * (len(types) - 2) + ((), ()), (labels,) * (len(types) - 3))


def _dtypes(types: Types, attrs: Attrs) -> tuple[torch.dtype, ...]:
    return (types[0].dtype, *(t.dtype for t in types[2:-2]))


class _Torch:
    """The arithmetic of a body, on tensors."""

    sqrt, maximum, where = staticmethod(torch.sqrt), staticmethod(torch.maximum), staticmethod(torch.where)

    @staticmethod
    def to(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return x.to(like.dtype)

    @staticmethod
    def power(base: float, e: torch.Tensor) -> torch.Tensor:
        return torch.pow(base, e)


class _Weft:
    """The same arithmetic, on nodes."""

    sqrt, maximum, where = staticmethod(w.sqrt), staticmethod(w.maximum), staticmethod(w.where)

    @staticmethod
    def to(x: Node, like: Node) -> Node:
        return to_dtype(x, like.dtype)

    @staticmethod
    def power(base: float, e: Node) -> Node:
        return w.pow_(base, e)


def _decayed(p: Any, g: Any, lr: Any, decay: float, decoupled: bool) -> tuple[Any, Any]:
    """The parameter and gradient after weight decay, mixed into the gradient or taken off the parameter."""
    if decay and decoupled:
        return p * (1.0 - lr * decay), g
    return (p, g + p * decay) if decay else (p, g)


def _adam(k: Any, p: Any, g: Any, m: Any, v: Any, *rest: Any,
          betas: Any, eps: float, decay: float, decoupled: bool, sign: int) -> Values:  # fmt: skip
    """Kingma 2015; decoupled decay is AdamW; a fifth tensor is amsgrad's largest second moment."""
    *top, lr, step = rest
    lr, step = k.to(lr, m), k.to(step, m)
    p32, g = _decayed(k.to(p, m), k.to(g, m) * float(sign), lr, decay, decoupled)
    m = m + (g - m) * (1.0 - betas[0])
    v = v * betas[1] + (g * g) * (1.0 - betas[1])
    seen = [k.maximum(top[0], v)] if top else []
    root = k.sqrt((seen or [v])[0]) / k.sqrt(1.0 - k.power(betas[1], step))
    p32 = p32 - (lr / (1.0 - k.power(betas[0], step))) * (m / (root + eps))
    return (k.to(p32, p), m, v, *seen)


def _sgd(k: Any, p: Any, g: Any, *rest: Any,
         momentum: float, damping: float, nesterov: bool, decay: float, sign: int) -> Values:  # fmt: skip
    """With momentum, the first step starts the buffer at the gradient itself."""
    *buffer, lr, step = rest
    lr = k.to(lr, p)
    _, g = _decayed(p, k.to(g, p) * float(sign), lr, decay, False)
    if not buffer:
        return (p - g * lr,)
    first = k.to(step, p) > 1.5
    b = k.where(first, buffer[0] * momentum + g * (1.0 - damping), g)
    return p - (g + b * momentum if nesterov else b) * lr, b


def _adagrad(k: Any, p: Any, g: Any, total: Any, lr: Any, step: Any, *,
             decay: float, lr_decay: float, eps: float, sign: int) -> Values:  # fmt: skip
    lr = k.to(lr, p) / ((k.to(step, p) - 1.0) * lr_decay + 1.0)
    _, g = _decayed(p, k.to(g, p) * float(sign), lr, decay, False)
    total = total + g * g
    return p - g * lr / (k.sqrt(total) + eps), total


def _rmsprop(k: Any, p: Any, g: Any, v: Any, *rest: Any,
             alpha: float, eps: float, decay: float, momentum: float, sign: int) -> Values:  # fmt: skip
    *buffer, lr, _ = rest
    lr = k.to(lr, p)
    _, g = _decayed(p, k.to(g, p) * float(sign), lr, decay, False)
    v = v * alpha + (g * g) * (1.0 - alpha)
    move = g / (k.sqrt(v) + eps)
    if not buffer:
        return p - move * lr, v
    b = buffer[0] * momentum + move
    return p - b * lr, v, b


def _update(name: str, body: Body, **choices: Any) -> Any:
    """`choices` are values of its settings that rules about it are tried with."""

    def run(*xs: torch.Tensor, **attrs: Any) -> Any:
        out = body(_Torch, *xs, **attrs)
        return out[0] if len(out) == 1 else out

    return define(
        name,
        kind=Kind.POINTWISE,
        equation=_equation,
        dtype=_dtypes,
        run=run,
        unfold=lambda n: body(_Weft, *n.args, **dict(n.attrs)),
        flops=lambda n: 12.0 * sum(_elements(t) for t in n.types[:1]),
        choices={"sign": (1,), **choices},
    )


def _elements(type_: Any) -> float:
    out = 1.0
    for size in type_.layout.largest_local:
        out *= size
    return out


adam = _update("adam", _adam, betas=((0.9, 0.99),), eps=(1e-8,), decay=(0.1,), decoupled=(True, False))
sgd = _update("sgd", _sgd, momentum=(0.9,), damping=(0.0,), nesterov=(False, True), decay=(0.1,))
adagrad = _update("adagrad", _adagrad, decay=(0.1,), lr_decay=(0.1,), eps=(1e-10,))
rmsprop = _update("rmsprop", _rmsprop, alpha=(0.9,), eps=(1e-8,), decay=(0.1,), momentum=(0.9,))


@dataclass(frozen=True)
class Rule:
    """How a torch optimizer's group updates one parameter: the op, its attributes, the names of its state tensors."""

    op: Any
    attrs: dict[str, Any]
    state: tuple[str, ...]


def _sign(group: Mapping[str, Any]) -> int:
    return -1 if group.get("maximize") else 1


def _adam_rule(group: Mapping[str, Any], decoupled: bool) -> Rule:
    state = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    decoupled = group.get("decoupled_weight_decay", decoupled) or decoupled
    betas = tuple(float(b) for b in group["betas"])
    attrs = {"betas": betas, "eps": group["eps"], "decay": float(group["weight_decay"]), "decoupled": decoupled}
    return Rule(adam, {**attrs, "sign": _sign(group)}, state)


def _sgd_rule(group: Mapping[str, Any]) -> Rule:
    attrs = {"momentum": float(group["momentum"]), "damping": float(group["dampening"]), "nesterov": group["nesterov"],
             "decay": float(group["weight_decay"]), "sign": _sign(group)}  # fmt: skip
    return Rule(sgd, attrs, ("momentum_buffer",) if group["momentum"] else ())


def _adagrad_rule(group: Mapping[str, Any]) -> Rule:
    attrs = {"decay": float(group["weight_decay"]), "lr_decay": float(group["lr_decay"]), "eps": group["eps"], "sign": _sign(group)}
    return Rule(adagrad, attrs, ("sum",))


def _rmsprop_rule(group: Mapping[str, Any]) -> Rule | None:
    if group["centered"]:
        return None
    attrs = {"alpha": group["alpha"], "eps": group["eps"], "decay": float(group["weight_decay"]),
             "momentum": float(group["momentum"]), "sign": _sign(group)}  # fmt: skip
    return Rule(rmsprop, attrs, ("square_avg",) + (("momentum_buffer",) if group["momentum"] else ()))


RULES: dict[type, Callable[[Mapping[str, Any]], Rule | None]] = {
    torch.optim.SGD: _sgd_rule,
    torch.optim.Adam: lambda group: _adam_rule(group, False),
    torch.optim.AdamW: lambda group: _adam_rule(group, True),
    torch.optim.Adagrad: _adagrad_rule,
    torch.optim.RMSprop: _rmsprop_rule,
}


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update of one parameter group; an optimizer weft does not know is refused."""
    make = next((RULES[t] for t in type(optimizer).__mro__ if t in RULES), None)
    rule = make(group) if make is not None and _steps_as(optimizer) else None
    if rule is None:
        raise CaptureError(
            f"weft does not know how {type(optimizer).__name__} updates a parameter",
            needed=", ".join(f"torch.optim.{t.__name__}" for t in RULES),
            found=type(optimizer).__name__,
            try_="add a Rule to weft.frontend.capture.optimizers.RULES",
        )
    return rule


def _steps_as(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a subclass still steps as the torch optimizer it comes from."""
    base = next(t for t in type(optimizer).__mro__ if t in RULES)
    return getattr(type(optimizer).step, "__wrapped__", type(optimizer).step) is getattr(base.step, "__wrapped__", base.step)
