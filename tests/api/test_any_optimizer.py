"""Optimizers of torch's and of a user's own on real processes: what each element, row or matrix needs is read off their step()."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tests.ranks import run_ranks
from weft import parallelize

PLANS = ("dp2", "dp2,zero1", "dp2,zero3", "tp2")


class Lion(Optimizer):
    """Of each element alone; writes through `.data`."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, (b1, b2) = self.state[p], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)


class PerRow(Optimizer):
    """State of each row; counts in Python, and begins with a gradient."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, mean = self.state[p], p.grad.square().flatten(1).mean(1) if p.ndim > 1 else p.grad.square()
                if "seen" not in state:
                    state["seen"], state["count"] = mean.clone(), 0
                state["count"] += 1
                state["seen"].mul_(0.9).add_(mean)
                rate = group["lr"] * (0.1 if state["count"] < 3 else math.sqrt(state["count"]))
                p.sub_(p.grad / (state["seen"].sqrt() + 1e-8).view(-1, *[1] * (p.ndim - 1)) * rate)


class Orthogonal(Optimizer):
    """Of each matrix, as Muon, in the parameter's own precision."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                x = state["buffer"].lerp_(p.grad, 1 - group["momentum"])
                if p.ndim == 2:
                    x = x / (x.norm() + 1e-7)
                    for _ in range(2):
                        x = 1.5 * x - 0.5 * x @ x.t() @ x
                p.add_(x, alpha=-group["lr"])


class Normed(Optimizer):
    """By the norm of all gradients, with numbers that a group keeps."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            total = torch.stack([p.grad.norm() for p in group["params"]]).norm().item()
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / max(total, 0.5) / group["step"] ** 0.5)


def several(params: Any) -> Optimizer:
    params = list(params)
    flat = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "amsgrad": True}
    return torch.optim.AdamW([{"params": [p for p in params if p.ndim > 1]}, flat], lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.1)


class Counting(Optimizer):
    """Counts in an attribute of its own, reads others, and makes its steps by a flag and by the count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.seen, self.boost, self.signs = 0, 1.0, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.seen += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    x = p.grad.sign() if self.signs and self.seen % 2 else p.grad
                    p.add_(x, alpha=-group["lr"] * self.boost / math.sqrt(self.seen))


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "lion": Lion, "per row": PerRow, "orthogonal": Orthogonal, "normed": Normed, "groups": several, "counting": Counting,
    "nadam": lambda p: torch.optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True), "asgd": lambda p: torch.optim.ASGD(p, t0=1),
    "adafactor": lambda p: torch.optim.Adafactor(p, weight_decay=0.1), "radam": lambda p: torch.optim.RAdam(p, betas=(0.8, 0.7)),
    "rprop": torch.optim.Rprop, "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
}  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model(x).sum() / 7


BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]


def slower(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.7


def left(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    own = [*(g.get("step") for g in optimizer.param_groups), getattr(optimizer, "seen", None)]
    return [*(p.detach() for p in model.parameters()), *tree_leaves(optimizer.state_dict()["state"]), *own]


@pytest.mark.parametrize("plan", PLANS)
def test_as_torch_steps(plan: str, tmp_path: Path) -> None:
    makers = dict(list(MAKERS.items())[: None if plan == "dp2,zero3" else 7])

    def job(rank: int) -> None:
        found = {}
        for name, make in makers.items():
            model = net()
            optimizer = make(model.parameters())
            step = parallelize(model, loss, optimizer, BATCHES[0], plan, check=False)
            for x in BATCHES:
                step(x)
                slower(optimizer)
            step.sync_model()
            step.sync_optimizer()
            found[name] = left(model, optimizer)
            if name == "orthogonal" and "zero" in plan:
                kinds = {n.op.name for n in step.program.nodes}
                assert {"reduce", "broadcast"} <= kinds, "a whole matrix is updated by its owner"
        torch.save(found, tmp_path / f"found{rank}")

    run_ranks(2, job, tmp_path)
    found = torch.load(tmp_path / "found1", weights_only=False)
    for name, make in makers.items():
        model = net()
        optimizer = make(model.parameters())
        for x in BATCHES:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
            slower(optimizer)
        for a, b in zip(found[name], left(model, optimizer), strict=True):
            assert type(a) is type(b), name
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("make", [Counting, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_settings_that_change_while_training(make: Callable[[Any], Optimizer]) -> None:
    """A flag, and a number that the optimizer has in an attribute: one back and forth, the other onwards."""

    def change(optimizer: Optimizer, i: int) -> None:
        if isinstance(optimizer, Counting):
            optimizer.signs, optimizer.boost = i % 2 == 1, 1.0 + i
        else:
            optimizer.param_groups[0]["nesterov"] = i % 2 == 1

    found = []
    for parallel in (True, False):
        model = net()
        optimizer = make(model.parameters())
        step = parallelize(model, loss, optimizer, BATCHES[0], "dp1") if parallel else None
        assert getattr(optimizer, "seen", 0) == 0, "the comparison with torch leaves the optimizer as it was"
        for i, x in enumerate(BATCHES):
            change(optimizer, i)
            if step is not None:
                step(x)
                continue
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
        if step is not None:
            assert step.forms.given <= {"boost"}, "what the optimizer counts itself is no setting"
            step.sync_model()
            step.sync_optimizer()
        found.append(left(model, optimizer))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_frozen_parameters_cost_nothing(tmp_path: Path) -> None:
    """An adapter beside a frozen layer: no gradient, no state and no sum of what does not learn."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = nn.Linear(6, 10), nn.Linear(6, 2, bias=False), nn.Linear(2, 10, bias=False)
            self.base.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    start = Adapted().double()

    def job(rank: int) -> float:
        for plan in ("dp2", "dp2,zero3", "tp2"):
            model = copy.deepcopy(start)
            step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=0.1), BATCHES[0], plan, check=False)
            assert set(step.captured.gradients) == set(step.captured.states.values()) == {"param.down.weight", "param.up.weight"}
            summed = {t.shape for n in step.program.nodes if n.op.name in ("all_reduce", "reduce_scatter") for t in n.types}
            assert (10, 6) not in summed and (10,) not in summed, plan
            for x in BATCHES:
                value = step(x)
        return value.item()

    said = run_ranks(2, job, tmp_path)
    optimizer = torch.optim.AdamW(start.parameters(), lr=0.1)
    for x in BATCHES:
        optimizer.zero_grad()
        value = loss(start, x)
        value.backward()
        optimizer.step()
    assert all(abs(float(text) - value.item()) < 1e-9 for text in said.values())
