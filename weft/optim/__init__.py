"""Drop-in optimizers for a DDP-style loop: the gradient sum, the update and the hand-out of parameters are one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.optim import rules
from weft.optim.base import FusedOptimizer
from weft.optim.rules import Rule


class AdamW(FusedOptimizer):
    """torch.optim.AdamW over all ranks. `max_norm` bounds the global norm of the averaged gradients."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}, **more)

    def rule(self, group: dict[str, Any]) -> Rule:
        return rules.AMSGRAD if group["amsgrad"] else rules.ADAMW

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return _adam_scalars(group, step)


class Lamb(FusedOptimizer):
    """LAMB: AdamW's direction, scaled for each tensor by the norm of the tensor over the norm of the direction."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 1e-2, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **more)

    def rule(self, group: dict[str, Any]) -> Rule:
        return rules.LAMB

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        return _adam_scalars(group, step)


class SGD(FusedOptimizer):
    """torch.optim.SGD over all ranks."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, **more)

    def rule(self, group: dict[str, Any]) -> Rule:
        if not group["momentum"]:
            return rules.SGD
        return rules.NESTEROV if group["nesterov"] else rules.MOMENTUM

    def scalars(self, group: dict[str, Any], step: int) -> dict[str, float]:
        fresh = 1.0 if step == 1 else 1.0 - group["dampening"]
        return {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "momentum": group["momentum"], "fresh": fresh}


def _adam_scalars(group: dict[str, Any], step: int) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    hyper = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
    return {"lr": float(group["lr"]), "t": float(step), **hyper}


__all__ = ["SGD", "AdamW", "FusedOptimizer", "Lamb"]
