"""Cases of optimizers: torch's own with their options, groups, schedulers, hyperparameters changed by hand, state that was loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from bench._wild.tools import Table, cross_entropy, mlp, vectors

CASES = Table()
Optimizer = torch.optim.Optimizer


def with_options(name: str, kind: type[Optimizer], **options: Any) -> None:
    CASES.add(f"optimizer_{name}", lambda: (mlp(), cross_entropy, vectors(), lambda m: kind(m.parameters(), **options)))


with_options("sgd", torch.optim.SGD, lr=0.1)
with_options("sgd_momentum", torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)
with_options("sgd_nesterov", torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
with_options("sgd_maximize", torch.optim.SGD, lr=0.01, maximize=True)
with_options("adam", torch.optim.Adam, lr=1e-2, betas=(0.8, 0.95), eps=1e-6)
with_options("adam_decay", torch.optim.Adam, lr=1e-2, weight_decay=0.1)
with_options("adam_amsgrad", torch.optim.Adam, lr=1e-2, amsgrad=True)
with_options("adam_maximize", torch.optim.Adam, lr=1e-2, maximize=True)
with_options("adam_tensor_lr", torch.optim.Adam, lr=torch.tensor(1e-2, dtype=torch.float64), capturable=False, foreach=False)
with_options("adamw", torch.optim.AdamW, lr=1e-2, weight_decay=0.3, foreach=False)
with_options("adamw_amsgrad", torch.optim.AdamW, lr=1e-2, amsgrad=True)
with_options("adagrad", torch.optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.01)
with_options("adagrad_started", torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
with_options("rmsprop", torch.optim.RMSprop, lr=1e-2, alpha=0.9)
with_options("rmsprop_momentum", torch.optim.RMSprop, lr=1e-2, momentum=0.9, weight_decay=0.01)
with_options("rmsprop_centered", torch.optim.RMSprop, lr=1e-2, centered=True)
with_options("adamax", torch.optim.Adamax, lr=1e-2)
with_options("nadam", torch.optim.NAdam, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)
with_options("radam", torch.optim.RAdam, lr=1e-2)
with_options("adadelta", torch.optim.Adadelta, lr=1.0, rho=0.8)
with_options("rprop", torch.optim.Rprop, lr=1e-2)
with_options("asgd", torch.optim.ASGD, lr=1e-2)
with_options("adafactor", torch.optim.Adafactor, lr=1e-2)


@CASES.case
def optimizer_muon() -> tuple[Any, ...]:
    model = mlp().requires_grad_(False)
    model[0].weight.requires_grad_(True)
    return model, cross_entropy, vectors(), lambda m: torch.optim.Muon([m[0].weight], lr=1e-2)


@CASES.case
def optimizer_groups() -> tuple[Any, ...]:
    def make(model: nn.Module) -> Optimizer:
        flat = [p for p in model.parameters() if p.dim() < 2]
        full = [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.AdamW(
            [{"params": flat, "weight_decay": 0.0}, {"params": full, "lr": 1e-2, "betas": (0.7, 0.9)}], lr=1e-3, weight_decay=0.1
        )

    return mlp(), cross_entropy, vectors(), make


@CASES.case
def optimizer_as_written_by_a_user() -> tuple[Any, ...]:
    class Signed(Optimizer):
        """Steps of one size in the direction of a momentum."""

        def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
            super().__init__(params, {"lr": lr, "beta": beta})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_(m.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"]).sign(), alpha=-group["lr"])

    return mlp(), cross_entropy, vectors(), Signed


@CASES.case
def optimizer_subclassed() -> tuple[Any, ...]:
    """A known optimizer whose step does more than it did."""

    class Decays(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)

    return mlp(), cross_entropy, vectors(), lambda m: Decays(m.parameters(), lr=0.1)


@CASES.case
def optimizer_with_a_hook() -> tuple[Any, ...]:
    def make(model: nn.Module) -> Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda one, args, kwargs: nn.utils.clip_grad_value_(model.parameters(), 1e-3))
        return optimizer

    return mlp(), cross_entropy, vectors(), make


def loaded(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    """An optimizer that has trained a twin of the model for two steps, and is loaded here."""

    def make(model: nn.Module) -> Optimizer:
        dtype = next(model.parameters()).dtype
        twin = mlp().to(dtype)
        before = kind(twin.parameters(), **options)
        for batch in vectors()[:2]:
            before.zero_grad()
            cross_entropy(twin, {"x": batch["x"].to(dtype), "y": batch["y"]}).backward()
            before.step()
        optimizer = kind(model.parameters(), **options)
        optimizer.load_state_dict(before.state_dict())
        return optimizer

    return make


CASES.add("optimizer_loaded_adamw", lambda: (mlp(), cross_entropy, vectors(), loaded(torch.optim.AdamW, lr=1e-2)))
CASES.add("optimizer_loaded_sgd", lambda: (mlp(), cross_entropy, vectors(), loaded(torch.optim.SGD, lr=0.1, momentum=0.9)))


def scheduled(name: str, schedule: Callable[[Optimizer], Any], kind: Any = torch.optim.AdamW, **options: Any) -> None:
    def make(model: nn.Module) -> Any:
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        return optimizer, schedule(optimizer)

    CASES.add(f"scheduler_{name}", lambda: (mlp(), cross_entropy, vectors(), make))


scheduled("lambda", lambda one: schedulers.LambdaLR(one, lambda i: (i + 1) / 5))
scheduled("step", lambda one: schedulers.StepLR(one, 2, gamma=0.3), torch.optim.SGD, momentum=0.9)
scheduled("cosine", lambda one: schedulers.CosineAnnealingLR(one, 5))
scheduled("warm_restarts", lambda one: schedulers.CosineAnnealingWarmRestarts(one, 2))
scheduled("one_cycle", lambda one: schedulers.OneCycleLR(one, 0.05, total_steps=6))
scheduled("cyclic", lambda one: schedulers.CyclicLR(one, 1e-3, 1e-1, step_size_up=2), torch.optim.SGD, momentum=0.9)
scheduled("exponential", lambda one: schedulers.ExponentialLR(one, 0.5), torch.optim.Adagrad)
scheduled(
    "sequential", lambda one: schedulers.SequentialLR(one, [schedulers.ConstantLR(one, 0.1, 2), schedulers.ExponentialLR(one, 0.5)], [2])
)


@CASES.case
def scheduler_of_decay() -> tuple[Any, ...]:
    """Weight decay and betas set by hand while training."""

    def after(i: int, optimizer: Optimizer, model: nn.Module) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"], group["betas"] = 0.1 * i, (0.9 - 0.1 * i, 0.99)

    return mlp(), cross_entropy, vectors(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), after


@CASES.case
def scheduler_of_momentum() -> tuple[Any, ...]:
    def after(i: int, optimizer: Optimizer, model: nn.Module) -> None:
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * i

    return mlp(), cross_entropy, vectors(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5), after


@CASES.case
def scheduler_unfreezes() -> tuple[Any, ...]:
    """A part that is trained from the third step on."""
    model = mlp()
    model[0].requires_grad_(False)

    def after(i: int, optimizer: Optimizer, model: nn.Module) -> None:
        model[0].requires_grad_(i >= 1)

    return model, cross_entropy, vectors(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), after


@CASES.case
def scheduler_adds_a_group() -> tuple[Any, ...]:
    def after(i: int, optimizer: Optimizer, model: nn.Module) -> None:
        if i == 1:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    return mlp(), cross_entropy, vectors(), lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1), after
