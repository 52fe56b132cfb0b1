"""The updates as programs: written as on one device, then scheduled into reduce_scatter, update of slices, all_gather.

Hyper-parameters are scalar inputs, so every parameter group runs through the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft import lang as w
from weft.core.errors import InvalidTransform
from weft.core.layout import Mesh, P, S
from weft.core.program import Program
from weft.frontend.trace import TensorSpec, tensor, trace
from weft.programs import optimizers
from weft.schedule import recipes

Update = Callable[[Any, Any, dict[str, Any], dict[str, Any]], tuple[Any, dict[str, Any]]]
ELEMENTS = 64  # of the tensors a step is traced on; its kernel takes any size


@dataclass(frozen=True, eq=False)
class Rule:
    """One optimizer: how a tensor and its states change, and what torch calls the states."""

    name: str
    update: Update
    states: Mapping[str, str]  # our name: the key in torch's state dict
    scalars: tuple[str, ...]


def _moments(g: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, Any]:
    return h["beta1"] * s["m"] + (1.0 - h["beta1"]) * g, h["beta2"] * s["v"] + (1.0 - h["beta2"]) * (g * g)


def _adamw_step(x: Any, m: Any, v: Any, h: dict[str, Any]) -> Any:
    root = w.sqrt(v / (1.0 - h["beta2"] ** h["t"])) + h["eps"]
    return x * (1.0 - h["lr"] * h["weight_decay"]) - h["lr"] * (m / (1.0 - h["beta1"] ** h["t"])) / root


def adamw_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    m, v = _moments(g, s, h)
    return _adamw_step(x, m, v, h), {"m": m, "v": v}


def amsgrad_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    m, v = _moments(g, s, h)
    most = w.maximum(s["most"], v)
    return _adamw_step(x, m, most, h), {"m": m, "v": v, "most": most}


def lamb_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    hyper = optimizers.Hyper(h["beta1"], h["beta2"], h["eps"], h["weight_decay"])
    x, m, v = optimizers.lamb(g, x, s["m"], s["v"], h["t"], h["lr"], hyper)
    return x, {"m": m, "v": v}


def sgd_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return x - h["lr"] * (g + h["weight_decay"] * x), {}


def momentum_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """`fresh` is 1 - dampening, and 1 on the first step."""
    m = h["momentum"] * s["m"] + h["fresh"] * (g + h["weight_decay"] * x)
    return x - h["lr"] * m, {"m": m}


def nesterov_update(g: Any, x: Any, s: dict[str, Any], h: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    g = g + h["weight_decay"] * x
    m = h["momentum"] * s["m"] + h["fresh"] * g
    return x - h["lr"] * (g + h["momentum"] * m), {"m": m}


_ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "t")
_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
ADAMW = Rule("adamw", adamw_update, _MOMENTS, _ADAM)
AMSGRAD = Rule("adamw", amsgrad_update, {**_MOMENTS, "most": "max_exp_avg_sq"}, _ADAM)
LAMB = Rule("lamb", lamb_update, _MOMENTS, _ADAM)
SGD = Rule("sgd", sgd_update, {}, ("lr", "weight_decay"))
MOMENTUM = Rule("sgd", momentum_update, {"m": "momentum_buffer"}, ("lr", "weight_decay", "momentum", "fresh"))
NESTEROV = Rule("sgd", nesterov_update, {"m": "momentum_buffer"}, ("lr", "weight_decay", "momentum", "fresh"))


@dataclass(frozen=True)
class Numbers:
    """In which dtypes a step works. With `master`, a low-precision parameter has a float32 copy that is really updated."""

    grads: str = "f32"
    params: str = "f32"
    master: bool = False


def step_program(rule: Rule, world: int, numbers: Numbers, clip: bool) -> Program:
    """One step over a list of tensors, fused: the gradients are averaged over `world` ranks, each updates its slice."""
    try:
        full = recipes.zero1(_written(rule, world, numbers, clip), "dp", params="" if numbers.master else "x")
    except InvalidTransform:  # some state does not come from the gradients, so nothing says how it is sharded
        full = _written(rule, world, numbers, clip, sliced=True)
    return recipes.one_kernel(full)


def _written(rule: Rule, world: int, numbers: Numbers, clip: bool, sliced: bool = False) -> Program:
    """As on one device or, for an update that is elementwise, on slices from the beginning."""

    def step(g: Sequence[Any], x: Sequence[Any], **rest: Any) -> dict[str, Any]:
        h = {k: rest[k] for k in rule.scalars}
        sums = [w.reduce_scatter(gi, "dp", 0) if sliced else w.all_reduce(gi, "dp") for gi in g]
        g = [_wide(gi, numbers.grads) * (1.0 / world) for gi in sums]
        x = [w.slice(xi, "dp", 0) if sliced and not numbers.master else xi for xi in x]
        if clip:
            g = optimizers.clipped(g, rest["max_norm"])
        states = [{s: rest[s][k] for s in rule.states} for k in range(len(x))]
        new = [rule.update(gi, _wide(xi, _kept(numbers)), s, h) for gi, xi, s in zip(g, x, states, strict=True)]
        out: dict[str, Any] = {"x": [w.cast(a, numbers.params) if _kept(numbers) != "f32" else a for a, _ in new]}
        out |= {"low": [w.cast(a, numbers.params) for a, _ in new]} if numbers.master else {}
        shown = "low" if numbers.master else "x"
        out |= {shown: [w.all_gather(a, "dp") for a in out[shown]]} if sliced else {}
        return out | {s: [b[s] for _, b in new] for s in rule.states}

    return trace(step, Mesh(dp=world), name=rule.name, **_inputs(rule, world, numbers, clip, sliced))


def _inputs(rule: Rule, world: int, numbers: Numbers, clip: bool, sliced: bool) -> dict[str, Any]:
    n = ELEMENTS * world
    shard = {"dp": S(0)} if sliced else {}
    tensors = {s: [tensor("f32", n, **shard)] * 2 for s in rule.states}
    scalars: dict[str, TensorSpec] = {k: tensor("f32") for k in (*rule.scalars, *(["max_norm"] if clip else []))}
    return {
        "g": [tensor(numbers.grads, n, dp=P())] * 2,
        "x": [tensor(_kept(numbers), n, **(shard if numbers.master else {}))] * 2,
        **tensors,
        **scalars,
    }


def _kept(numbers: Numbers) -> str:
    return "f32" if numbers.master else numbers.params


def _wide(x: Any, dtype: str) -> Any:
    return w.cast(x, "f32") if dtype in ("bf16", "f16") else x
