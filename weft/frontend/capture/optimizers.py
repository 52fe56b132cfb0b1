"""Which update each torch optimizer makes, with which settings and state; one that weft does not know is refused.

Optimizers are never traced. The learning rate of each group and the step count are inputs of the program, so schedulers keep working; so is any
other setting that has changed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import CaptureError
from weft.ops.optimizers import adadelta, adagrad, adam, adamax, put_setting, radam, rmsprop, sgd

COUNT = "count"  # among the settings that are inputs: each parameter counts its own updates


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
            put_setting(attrs, name, 0.0)
        return {**attrs, "given": mine} if mine else attrs


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


def _adamax_rule(group: Mapping[str, Any]) -> Rule:
    return _rule(adamax, group, ("exp_avg", "exp_inf"), {"betas": "betas", "eps": "eps", "decay": "weight_decay"})


def _radam_rule(group: Mapping[str, Any]) -> Rule:
    settings = {"betas": "betas", "eps": "eps", "decay": "weight_decay"}
    return _rule(radam, group, ("exp_avg", "exp_avg_sq"), settings, decoupled=bool(group["decoupled_weight_decay"]))


def _adadelta_rule(group: Mapping[str, Any]) -> Rule:
    return _rule(adadelta, group, ("square_avg", "acc_delta"), {"rho": "rho", "eps": "eps", "decay": "weight_decay"})


RULES: dict[type, Callable[[Mapping[str, Any]], Rule]] = {
    torch.optim.SGD: _sgd_rule,
    torch.optim.Adam: lambda group: _adam_rule(group, False),
    torch.optim.AdamW: lambda group: _adam_rule(group, True),
    torch.optim.Adagrad: _adagrad_rule,
    torch.optim.RMSprop: _rmsprop_rule,
    torch.optim.Adamax: _adamax_rule,
    torch.optim.RAdam: _radam_rule,
    torch.optim.Adadelta: _adadelta_rule,
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
    """How many updates a parameter had before the step; momentum of SGD, which counts none, starts where there is no buffer."""
    mine = optimizer.state.get(p, {})
    if "step" not in mine:
        return int(rule.op is sgd and bool(kept_state(optimizer, p, rule)))
    return counted_before(optimizer, p)


def counted_before(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    """What the optimizer counts of a parameter's updates, but for those that a step made itself."""
    return int(number(optimizer.state[p]["step"])) - _of_step.get(optimizer, {}).get(id(p), 0)


def note_updates(optimizer: torch.optim.Optimizer, updates: Mapping[torch.Tensor, int]) -> None:
    """How many of the updates that the optimizer counts a step made itself and wrote there: programs of that step count them already."""
    _of_step.setdefault(optimizer, {}).update({id(p): n for p, n in updates.items()})


def forget_updates(optimizer: torch.optim.Optimizer) -> None:
    """What another step left in the optimizer is what a new one begins with."""
    _of_step.pop(optimizer, None)


_of_step: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()
