"""Optimizers: one op per parameter, never traced. `unfold` gives an update in simpler ops, for whoever fuses it.

The learning rate of each group and the step count are inputs of the program, so schedulers keep working; so is any other setting that has
changed once. What depends on these numbers alone is computed in float64, as torch's Python does, whatever the parameter's dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import CaptureError
from weft.core.node import Attrs, Node
from weft.ops import pointwise as w
from weft.ops.norm import to_dtype
from weft.ops.registry import Equation, Kind, Types, define

COUNT = "count"  # among the settings that are inputs: each parameter counts its own updates
Values = tuple[Any, ...]
Body = Callable[..., Values]


def _numbers(attrs: Attrs) -> int:
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

    sqrt, maximum, where = staticmethod(torch.sqrt), staticmethod(torch.maximum), staticmethod(torch.where)

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) else x

    @staticmethod
    def power(base: Any, e: torch.Tensor) -> torch.Tensor:
        return torch.pow(base, e)


class _Weft:
    """The same arithmetic, on nodes."""

    sqrt, maximum, where = staticmethod(w.sqrt), staticmethod(w.maximum), staticmethod(w.where)

    @staticmethod
    def to(x: Any, dtype: torch.dtype) -> Any:
        return to_dtype(x, dtype) if isinstance(x, Node) else x

    @staticmethod
    def power(base: Any, e: Node) -> Node:
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


def _stepped(k: Any, body: Body, xs: Any, attrs: Mapping[str, Any]) -> Values:
    """The body on wide elements and float64 numbers; results as parameter and state are kept."""
    last = _numbers(attrs)
    tensors, numbers = xs[:-last], [k.to(x, torch.float64) for x in xs[-last:]]
    wide = [k.to(x, _wide(xs[0].dtype)) for x in tensors]
    settings = {name: x for name, x in attrs.items() if name not in ("given", "sign")}
    for name, x in zip(attrs.get("given", ()), numbers, strict=False):
        _put(settings, name, x)
    wide[1] = wide[1] * float(attrs["sign"]) if attrs["sign"] != 1 else wide[1]
    out = body(k, *wide, *numbers[-2:], **settings)
    return tuple(k.to(x, like.dtype) for x, like in zip(out, (xs[0], *tensors[2:]), strict=True))


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
    """How a torch optimizer's group updates one parameter: the op, its attributes, the names of its state tensors.

    `settings` says which of the attributes are numbers that may change from step to step, by the names of inputs they would have.
    """

    op: Any
    attrs: dict[str, Any]
    state: tuple[str, ...]
    settings: dict[str, float] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether torch keeps a count of steps beside the state."""
        return self.op is not sgd

    @property
    def form(self) -> tuple[Any, ...]:
        """All of it but the numbers: with another form it is another program."""
        return self.op.name, tuple((k, v) for k, v in self.attrs.items() if k not in _changing(self.settings)), self.state

    def with_given(self, given: Collection[str]) -> dict[str, Any]:
        """The attributes where some settings are operands; their values here would be others tomorrow."""
        mine = tuple(k for k in self.settings if k in given)
        attrs = dict(self.attrs)
        for name in mine:
            _put(attrs, name, 0.0)
        return {**attrs, "given": mine} if mine else attrs


def _put(attrs: dict[str, Any], name: str, value: Any) -> None:
    """A setting by its name; one of several by the number it has among them."""
    key, _, at = name.partition("_at_")
    attrs[key] = tuple(value if i == int(at) else x for i, x in enumerate(attrs[key])) if at else value


def _changing(settings: Mapping[str, float]) -> set[str]:
    return {name.partition("_at_")[0] for name in settings}


def number(x: Any) -> float:
    """A setting, which torch also takes as a tensor, as a number."""
    if isinstance(x, torch.Tensor):
        with _disable_current_modes():
            return float(x.detach())
    return float(x)


def _rule(op: Any, group: Mapping[str, Any], state: tuple[str, ...], settings: Mapping[str, str], **fixed: Any) -> Rule:
    """`settings` maps attributes of the op to keys of the group."""
    attrs: dict[str, Any] = {}
    changing: dict[str, float] = {}
    for name, key in settings.items():
        value = group[key]
        if isinstance(value, (tuple, list)):
            attrs[name] = tuple(number(x) for x in value)
            changing |= {f"{name}_at_{i}": x for i, x in enumerate(attrs[name])}
        else:
            attrs[name] = changing[name] = number(value)
    return Rule(op, {**attrs, **fixed, "sign": -1 if group.get("maximize") else 1}, state, changing)


def _adam_rule(group: Mapping[str, Any], decoupled: bool) -> Rule:
    state = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())
    decoupled = bool(group.get("decoupled_weight_decay", decoupled) or decoupled)
    return _rule(adam, group, state, {"betas": "betas", "eps": "eps", "decay": "weight_decay"}, decoupled=decoupled)


def _sgd_rule(group: Mapping[str, Any]) -> Rule:
    settings = {"momentum": "momentum", "damping": "dampening", "decay": "weight_decay"}
    return _rule(sgd, group, ("momentum_buffer",) if group["momentum"] else (), settings, nesterov=bool(group["nesterov"]))


def _adagrad_rule(group: Mapping[str, Any]) -> Rule:
    return _rule(adagrad, group, ("sum",), {"decay": "weight_decay", "lr_decay": "lr_decay", "eps": "eps"})


def _rmsprop_rule(group: Mapping[str, Any]) -> Rule:
    state = ("square_avg",) + (("momentum_buffer",) if group["momentum"] > 0 else ()) + (("grad_avg",) if group["centered"] else ())
    settings = {"alpha": "alpha", "eps": "eps", "decay": "weight_decay", "momentum": "momentum"}
    return _rule(rmsprop, group, state, settings, **({"centered": True} if group["centered"] else {}))


RULES: dict[type, Callable[[Mapping[str, Any]], Rule]] = {
    torch.optim.SGD: _sgd_rule,
    torch.optim.Adam: lambda group: _adam_rule(group, False),
    torch.optim.AdamW: lambda group: _adam_rule(group, True),
    torch.optim.Adagrad: _adagrad_rule,
    torch.optim.RMSprop: _rmsprop_rule,
}


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update of one parameter group; an optimizer weft does not know is refused."""
    base = next((t for t in type(optimizer).__mro__ if t in RULES), None)
    name = type(optimizer).__name__
    if base is None or not _steps_as(optimizer, base):
        raise CaptureError(
            f"weft does not know how {name} updates a parameter",
            needed=", ".join(f"torch.optim.{t.__name__}" for t in RULES),
            found=name if base is None else f"{name}, which overrides {', '.join(_overrides(optimizer, base))} of {base.__name__}",
            try_="add a Rule to weft.frontend.capture.optimizers.RULES",
        )
    if group.get("differentiable"):
        raise CaptureError(
            f"{name} shall be differentiated through", needed="differentiable=False", found="differentiable=True", try_="leave it out"
        )
    return RULES[base](group)


_HARMLESS = {"__module__", "__doc__", "__qualname__", "__init__", "__repr__", "__annotations__", "__firstlineno__", "__static_attributes__",
             "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__"}  # fmt: skip


def _steps_as(optimizer: torch.optim.Optimizer, base: type) -> bool:
    """Whether a subclass, or an optimizer with methods of its own, still steps as the torch optimizer it comes from."""
    return not _overrides(optimizer, base)


def _overrides(optimizer: torch.optim.Optimizer, base: type) -> list[str]:
    classes = type(optimizer).__mro__[: type(optimizer).__mro__.index(base)]
    found = [k for c in classes if c not in RULES for k in vars(c) if k not in _HARMLESS and not (k == "step" and _plain(c) is _plain(base))]
    own = [k for k, f in vars(optimizer).items() if hasattr(type(optimizer), k) and callable(f) and not _harmless(f)]
    return list(dict.fromkeys([*found, *own]))


def _plain(kind: Any) -> Any:
    """A class's step without the profiler's mark, which torch puts around it."""
    return getattr(kind.step, "__wrapped__", kind.step)


def _harmless(f: Any) -> bool:
    """A scheduler counts the calls of step and changes nothing; while a step is traced, its methods are weft's."""
    return bool(getattr(f, "_wrapped_by_lr_sched", False) or getattr(f, "of_weft", False))


def require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Python that torch would run around the optimizer's step is not run by weft's."""
    from torch.optim import optimizer as torchs

    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    everyones = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = [h for k in own for h in getattr(optimizer, k, {}).values()] + [h for k in everyones for h in getattr(torchs, k, {}).values()]
    if hooks:
        raise CaptureError(
            f"{type(optimizer).__name__} has hooks that run around its step",
            needed="an optimizer without step hooks",
            found=", ".join(getattr(h, "__qualname__", type(h).__name__) for h in hooks),
            try_="call what they do in the training loop, after step(batch)",
        )


# -- what an optimizer has already -------------------------------------------------------------------------------------


def kept_state(optimizer: torch.optim.Optimizer, p: torch.Tensor, rule: Rule) -> dict[str, torch.Tensor]:
    """The state tensors of a parameter, as a run before this one, or the optimizer itself, left them."""
    mine = optimizer.state.get(p, {})
    return {s: mine[s] for s in rule.state if isinstance(mine.get(s), torch.Tensor)}


def steps_taken(optimizer: torch.optim.Optimizer, p: torch.Tensor, rule: Rule) -> int:
    """How many updates a parameter has had; momentum of SGD, which counts none, starts where there is no buffer."""
    mine = optimizer.state.get(p, {})
    return int(number(mine["step"])) if "step" in mine else int(rule.op is sgd and bool(kept_state(optimizer, p, rule)))
