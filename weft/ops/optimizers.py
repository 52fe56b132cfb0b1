"""Updates of optimizers: one op per parameter. `unfold` gives an update in simpler ops, for whoever fuses it.

The learning rate of each group and the step count are inputs of the program, so schedulers keep working; so is any other setting that has
changed once. What depends on these numbers alone is computed in float64, as torch's Python does, whatever the parameter's dtype is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.core.node import Attrs, Node
from weft.ops import pointwise as w
from weft.ops.norm import to_dtype
from weft.ops.registry import Equation, Kind, Types, define

Values = tuple[Any, ...]
Body = Callable[..., Values]


def _numbers(attrs: Mapping[str, Any]) -> int:
    """How many numbers stand last among the operands: settings that change, the learning rate, the step."""
    return 2 + len(attrs.get("given", ()))


def _equation(types: Types, attrs: Attrs) -> Equation:
    """Parameter, gradient and state alike; then numbers. Out: parameter and state."""
    labels, last = tuple(f"d{i}" for i in range(len(types[0].shape))), _numbers(attrs)
    return Equation((labels,) * (len(types) - last) + ((),) * last, (labels,) * (len(types) - last - 1))


def _dtypes(types: Types, attrs: Attrs) -> tuple[torch.dtype, ...]:
    return (types[0].dtype, *(t.dtype for t in types[2 : -_numbers(attrs)]))


def held(n: Node) -> tuple[Node, ...]:
    """What an update gives the next value of: the parameter and its state."""
    return (n.args[0], *n.args[2 : -_numbers(dict(n.attrs))])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a parameter's elements are computed."""
    return torch.promote_types(dtype, torch.float32)


class _Torch:
    """The arithmetic of a body, on tensors."""

    sqrt, abs, maximum, where = map(staticmethod, (torch.sqrt, torch.abs, torch.maximum, torch.where))

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    @staticmethod
    def power(base: Any, e: torch.Tensor) -> torch.Tensor:
        return torch.pow(base, e)


class _Weft:
    """The same arithmetic, on nodes."""

    sqrt, abs, maximum, where = map(staticmethod, (w.sqrt, w.abs_, w.maximum, w.where))

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return to_dtype(x, dtype) if isinstance(x, Node) else x

    @staticmethod
    def power(base: Any, e: Node) -> Any:
        return w.pow_(base, e)


def _decayed(k: Any, p: Any, g: Any, lr: Any, decay: Any, decoupled: bool) -> tuple[Any, Any]:
    """The parameter and gradient after weight decay, mixed into the gradient or taken off the parameter."""
    if isinstance(decay, float) and not decay:
        return p, g
    return (p * k.to(1.0 - lr * decay, p.dtype), g) if decoupled else (p, g + p * k.to(decay, p.dtype))


def _adam(k: Any, p: Any, g: Any, m: Any, v: Any, *rest: Any,
          betas: Any, eps: Any, decay: Any, decoupled: bool) -> Values:  # fmt: skip
    """Kingma 2015; decoupled decay is AdamW; a fifth tensor is amsgrad's largest second moment."""
    *top, lr, step = rest
    p, g = _decayed(k, p, g, lr, decay, decoupled)
    m = m + (g - m) * k.to(1.0 - betas[0], p.dtype)
    v = v * k.to(betas[1], p.dtype) + (g * g) * k.to(1.0 - betas[1], p.dtype)
    seen = [k.maximum(top[0], v)] if top else []
    root = k.sqrt((seen or [v])[0]) / k.to(k.sqrt(1.0 - k.power(betas[1], step)), p.dtype)
    p = p - k.to(lr / (1.0 - k.power(betas[0], step)), p.dtype) * (m / (root + k.to(eps, p.dtype)))
    return (p, m, v, *seen)


def _sgd(k: Any, p: Any, g: Any, *rest: Any, momentum: Any, damping: Any, nesterov: bool, decay: Any) -> Values:
    """With momentum, the first step starts the buffer at the gradient itself."""
    *buffer, lr, step = rest
    _, g = _decayed(k, p, g, lr, decay, False)
    rate, momentum = k.to(lr, p.dtype), k.to(momentum, p.dtype)
    if not buffer:
        return (p - g * rate,)
    b = k.where(step > 1.5, buffer[0] * momentum + g * k.to(1.0 - damping, p.dtype), g)
    return p - (g + b * momentum if nesterov else b) * rate, b


def _adagrad(k: Any, p: Any, g: Any, total: Any, lr: Any, step: Any, *, decay: Any, lr_decay: Any, eps: Any) -> Values:
    rate = k.to(lr / ((step - 1.0) * lr_decay + 1.0), p.dtype)
    _, g = _decayed(k, p, g, lr, decay, False)
    total = total + g * g
    return p - g * rate / (k.sqrt(total) + k.to(eps, p.dtype)), total


def _rmsprop(k: Any, p: Any, g: Any, v: Any, *rest: Any,
             alpha: Any, eps: Any, decay: Any, momentum: Any, centered: bool = False) -> Values:  # fmt: skip
    """State: the mean square; then, with momentum, its buffer; then, centered, the mean."""
    *more, lr, _ = rest
    mean, buffer = (more[-1:], more[:-1]) if centered else ([], more)
    _, g = _decayed(k, p, g, lr, decay, False)
    rate, kept, new = (k.to(x, p.dtype) for x in (lr, alpha, 1.0 - alpha))
    v = v * kept + (g * g) * new
    mean = [a + (g - a) * new for a in mean]
    move = g / (k.sqrt(v - mean[0] * mean[0] if mean else v) + k.to(eps, p.dtype))
    if not buffer:
        return (p - move * rate, v, *mean)
    b = buffer[0] * k.to(momentum, p.dtype) + move
    return (p - b * rate, v, b, *mean)


def _adamax(k: Any, p: Any, g: Any, m: Any, top: Any, lr: Any, step: Any, *, betas: Any, eps: Any, decay: Any) -> Values:
    """Adam by the largest gradient of late instead of the mean square."""
    _, g = _decayed(k, p, g, lr, decay, False)
    m = m + (g - m) * k.to(1.0 - betas[0], p.dtype)
    top = k.maximum(top * k.to(betas[1], p.dtype), k.abs(g) + k.to(eps, p.dtype))
    return p - k.to(lr / (1.0 - k.power(betas[0], step)), p.dtype) * (m / top), m, top


def _radam(k: Any, p: Any, g: Any, m: Any, v: Any, lr: Any, step: Any, *, betas: Any, eps: Any, decay: Any, decoupled: bool) -> Values:
    """Liu 2020: momentum alone while the second moment has seen too few steps, then Adam by a factor for its variance."""
    p, g = _decayed(k, p, g, lr, decay, decoupled)
    m = m + (g - m) * k.to(1.0 - betas[0], p.dtype)
    v = v * k.to(betas[1], p.dtype) + (g * g) * k.to(1.0 - betas[1], p.dtype)
    kept = k.power(betas[1], step)
    most = 2.0 / (1.0 - betas[1]) - 1.0
    length = most - step * 2.0 * kept / (1.0 - kept)
    factor = k.sqrt((length - 4.0) * (length - 2.0) * most / (length * ((most - 4.0) * (most - 2.0)))) * k.sqrt(1.0 - kept)
    move = k.where(length > 5.0, m * (k.to(factor, p.dtype) / (k.sqrt(v) + k.to(eps, p.dtype))), m)
    return p - move * k.to(lr / (1.0 - k.power(betas[0], step)), p.dtype), m, v


def _adadelta(k: Any, p: Any, g: Any, v: Any, moved: Any, lr: Any, _: Any, *, rho: Any, eps: Any, decay: Any) -> Values:
    _, g = _decayed(k, p, g, lr, decay, False)
    kept, new, eps = (k.to(x, p.dtype) for x in (rho, 1.0 - rho, eps))
    v = v * kept + (g * g) * new
    move = k.sqrt(moved + eps) / k.sqrt(v + eps) * g
    return p - move * k.to(lr, p.dtype), v, moved * kept + (move * move) * new


def _stepped(k: Any, body: Body, xs: Any, attrs: Mapping[str, Any]) -> Values:
    """The body on wide elements and float64 numbers; results as parameter and state are kept."""
    last = _numbers(attrs)
    tensors, numbers = xs[:-last], [k.to(x, torch.float64) for x in xs[-last:]]
    wide = [k.to(x, _wide(xs[0].dtype)) for x in tensors]
    settings = {name: x for name, x in attrs.items() if name not in ("given", "sign")}
    for name, x in zip(attrs.get("given", ()), numbers, strict=False):
        put_setting(settings, name, x)
    wide[1] = wide[1] * float(attrs["sign"]) if attrs["sign"] != 1 else wide[1]
    out = body(k, *wide, *numbers[-2:], **settings)
    return tuple(k.to(x, like.dtype) for x, like in zip(out, (xs[0], *tensors[2:]), strict=True))


def put_setting(attrs: dict[str, Any], name: str, value: Any) -> None:
    """A setting by its name; one of several by the number it has among them."""
    key, _, at = name.partition("_at_")
    attrs[key] = tuple(value if i == int(at) else x for i, x in enumerate(attrs[key])) if at else value


def _update(name: str, body: Body, **choices: Any) -> Any:
    """`choices` are values of its settings that rules about it are tried with."""

    def run(*xs: torch.Tensor, **attrs: Any) -> Any:
        out = _stepped(_Torch, body, xs, attrs)
        return out[0] if len(out) == 1 else out

    return define(
        name,
        kind=Kind.POINTWISE,
        equation=_equation,
        dtype=_dtypes,
        run=run,
        unfold=lambda n: _stepped(_Weft, body, n.args, dict(n.attrs)),
        flops=lambda n: 12.0 * math.prod(n.types[0].layout.largest_local),
        choices={"sign": (1,), **choices},
    )


adam = _update("adam", _adam, betas=((0.9, 0.99),), eps=(1e-8,), decay=(0.1,), decoupled=(True, False))
sgd = _update("sgd", _sgd, momentum=(0.9,), damping=(0.0,), nesterov=(False, True), decay=(0.1,))
adagrad = _update("adagrad", _adagrad, decay=(0.1,), lr_decay=(0.1,), eps=(1e-10,))
rmsprop = _update("rmsprop", _rmsprop, alpha=(0.9,), eps=(1e-8,), decay=(0.1,), momentum=(0.9,))
adamax = _update("adamax", _adamax, betas=((0.9, 0.99),), eps=(1e-8,), decay=(0.1,))
radam = _update("radam", _radam, betas=((0.9, 0.99),), eps=(1e-8,), decay=(0.1,), decoupled=(True, False))
adadelta = _update("adadelta", _adadelta, rho=(0.9,), eps=(1e-6,), decay=(0.1,))
