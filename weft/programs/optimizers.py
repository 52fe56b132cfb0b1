"""SGD, Adam, AdamW and LAMB over a list of tensors, exact: bias correction, epsilon, decay, master weights, scaling, clipping.

Each is written as if on one device, with one all_reduce of the gradients; the schedules make it ZeRO, fused and bucketed.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft import lang as w
from weft.core.layout import Mesh, P
from weft.core.program import Program
from weft.frontend.trace import tensor, trace


@dataclass(frozen=True)
class Hyper:
    """What stays fixed over a run. The learning rate and the step number are inputs of the program."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.9
    clip: float | None = None  # bound on the global norm of the gradients
    scaled: bool = False  # gradients come multiplied by an input `scale`; a step with an overflow changes nothing


def sgd(g: Any, x: Any, m: Any, lr: Any, h: Hyper) -> tuple[Any, Any]:
    """Momentum as torch.optim.SGD has it."""
    m = h.momentum * m + (g + h.weight_decay * x)
    return x - lr * m, m


def adam(g: Any, x: Any, m: Any, v: Any, t: Any, lr: Any, h: Hyper, decoupled: bool = False) -> tuple[Any, Any, Any]:
    """torch.optim.Adam, or AdamW where the decay is decoupled from the gradient."""
    g = g if decoupled or not h.weight_decay else g + h.weight_decay * x
    x = x * (1.0 - lr * h.weight_decay) if decoupled and h.weight_decay else x
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * (g * g)
    m_hat = m / (1.0 - h.beta1**t)
    v_hat = v / (1.0 - h.beta2**t)
    return x - lr * m_hat / (w.sqrt(v_hat) + h.eps), m, v


def adamw(g: Any, x: Any, m: Any, v: Any, t: Any, lr: Any, h: Hyper) -> tuple[Any, Any, Any]:
    return adam(g, x, m, v, t, lr, h, decoupled=True)


def lamb(g: Any, x: Any, m: Any, v: Any, t: Any, lr: Any, h: Hyper) -> tuple[Any, Any, Any]:
    """Each tensor's update is scaled by its trust ratio, |x| over |update|, and by 1 where either is 0."""
    m = h.beta1 * m + (1 - h.beta1) * g
    v = h.beta2 * v + (1 - h.beta2) * (g * g)
    u = (m / (1.0 - h.beta1**t)) / (w.sqrt(v / (1.0 - h.beta2**t)) + h.eps) + h.weight_decay * x
    xn, un = w.norm(x), w.norm(u)
    usable = w.logical_and(xn > 0.0, un > 0.0)
    trust = w.where(usable, xn / w.where(usable, un, un * 0.0 + 1.0), un * 0.0 + 1.0)
    return x - lr * trust * u, m, v


def clipped(grads: Sequence[Any], bound: Any) -> list[Any]:
    """The gradients scaled so that their global norm is at most the bound, as torch.nn.utils.clip_grad_norm_ does."""
    total = w.sqrt(builtins.sum([w.all_reduce_partials(w.sum(g * g)) for g in grads[1:]], start=w.all_reduce_partials(w.sum(grads[0] * grads[0]))))
    factor = w.minimum(bound / (total + 1e-6), total * 0.0 + 1.0)
    return [g * factor for g in grads]


def all_finite(grads: Sequence[Any]) -> Any:
    """1 where every gradient is finite, else 0."""
    flags = [w.all_reduce_partials(w.amin(w.cast(w.isfinite(g), "f32"))) for g in grads]
    out = flags[0]
    for f in flags[1:]:
        out = w.minimum(out, f)
    return out


STATES = {"sgd": ("m",), "adam": ("m", "v"), "adamw": ("m", "v"), "lamb": ("m", "v")}
UPDATES = {"sgd": sgd, "adam": adam, "adamw": adamw, "lamb": lamb}


def optimizer(
    name: str,
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    *,
    axis: str = "dp",
    hyper: Hyper | None = None,
    grads: str = "f32",
    params: str = "f32",
) -> Program:
    """One step: gradients Partial along `axis` are summed and averaged, then every tensor is updated.

    Gradients in another dtype than f32 are summed in it and cast after; parameters in another dtype have an f32 master copy.
    """
    h = hyper or Hyper()
    n = mesh.size(axis)
    low = params != "f32"

    def step(g: Any, x: Any, lr: Any, t: Any, m: Any, v: Any = None, scale: Any = None) -> dict[str, Any]:
        g = [w.all_reduce(gi, axis) for gi in g]
        g = [w.cast(gi, "f32") if grads != "f32" else gi for gi in g]
        ok = all_finite(g) if h.scaled else None
        g = [gi * (1.0 / n) if scale is None else gi / (scale * float(n)) for gi in g]
        g = clipped(g, h.clip) if h.clip is not None else g
        new = [_updated(name, gi, xi, mi, vi, t, lr, h) for gi, xi, mi, vi in zip(g, x, m, v or m, strict=True)]
        if ok is not None:
            new = [
                tuple(w.where(ok > 0.0, a, b) for a, b in zip(after, before, strict=False))
                for after, before in zip(new, zip(x, m, v or m, strict=True), strict=True)
            ]
        out: dict[str, Any] = {"x": [u[0] for u in new], "m": [u[1] for u in new]}
        out |= {"v": [u[2] for u in new]} if v is not None else {}
        out["t"] = t + 1.0 if ok is None else t + ok
        return out | ({"low": [w.cast(u[0], params) for u in new]} if low else {})

    full = [tensor("f32", *s) for s in shapes]
    inputs: dict[str, Any] = {
        "g": [tensor(grads, *s, **{axis: P()}) for s in shapes],
        "x": full,
        "lr": tensor("f32"),
        "t": tensor("f32"),
        "m": full,
    }
    inputs |= {"v": full} if "v" in STATES[name] else {}
    inputs |= {"scale": tensor("f32")} if h.scaled else {}
    return trace(step, mesh, name=name, **inputs)


def _updated(name: str, g: Any, x: Any, m: Any, v: Any, t: Any, lr: Any, h: Hyper) -> tuple[Any, ...]:
    if name == "sgd":
        return sgd(g, x, m, lr, h)
    return UPDATES[name](g, x, m, v, t, lr, h)  # type: ignore[operator,no-any-return]
