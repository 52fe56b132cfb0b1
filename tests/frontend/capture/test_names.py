"""Tensors whose keys differ only in punctuation, or in kind, stay apart: against torch, over several steps."""

from __future__ import annotations

import copy
import types
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft import parallelize

Pair = namedtuple("Pair", "a b")


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor
    scale: float = 2.0


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.more = x, {"y": y}


def both(first: Any, second: Any) -> Any:
    """A loss that reads two tensors of the batch, each another way."""
    return lambda model, batch: (model(first(batch)) - 3 * second(batch)).square().mean()


CASES = {
    "punctuation": (lambda a, b: {"user-id": a, "user_id": b}, both(lambda t: t["user-id"], lambda t: t["user_id"])),
    "dots": (lambda a, b: {"a": {"b": a}, "a.b": b}, both(lambda t: t["a"]["b"], lambda t: t["a.b"])),
    "kinds": (lambda a, b: {0: a, "0": b}, both(lambda t: t[0], lambda t: t["0"])),
    "escapes": (lambda a, b: {"a-b": a, "a_0x2d_b": b}, both(lambda t: t["a-b"], lambda t: t["a_0x2d_b"])),
    "tuple keys": (lambda a, b: {(0, 1): a, "(0, 1)": b}, both(lambda t: t[0, 1], lambda t: t["(0, 1)"])),
    "nested": (lambda a, b: [{"x": (a,)}, {"x.0": b}], both(lambda t: t[0]["x"][0], lambda t: t[1]["x.0"])),
    "named tuple": (Pair, both(lambda t: t.a, lambda t: t.b)),
    "dataclass": (Batch, both(lambda t: t.x * t.scale, lambda t: t.y)),
    "object": (Plain, both(lambda t: t.x, lambda t: t.more["y"])),
    "namespace": (lambda a, b: types.SimpleNamespace(a=a, b=b), both(lambda t: t.a, lambda t: t.b)),
}


@pytest.mark.parametrize("case", CASES)
def test_batches(case):
    make, loss = CASES[case]
    torch.manual_seed(0)
    model = nn.Linear(4, 4).double()
    batches = [make(torch.randn(6, 4).double(), torch.randn(6, 4).double()) for _ in range(3)]
    _same(model, loss, batches)


class Keyed(nn.Module):
    """Modules and buffers of a ModuleDict whose keys differ in punctuation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"user-id": nn.Linear(4, 4), "user_id": nn.Linear(4, 4), "user id": nn.BatchNorm1d(4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["user id"](self.heads["user-id"](x) - 2 * self.heads["user_id"](x).tanh())


def test_modules_and_buffers():
    torch.manual_seed(0)
    step = _same(Keyed().double(), lambda m, b: m(b).square().mean() + m(b).sin().sum(), [torch.randn(6, 4).double() for _ in range(3)])
    assert "param.heads.user_0x2d_id.weight" in step.state
    saved = step.state_dict()
    step.load_state_dict({n: x.clone() for n, x in saved.items()})
    assert all(torch.equal(x, saved[n]) for n, x in step.state_dict().items())


def _same(model: nn.Module, loss: Any, batches: list[Any]) -> Any:
    mirror = copy.deepcopy(model)
    theirs = torch.optim.SGD(mirror.parameters(), lr=0.05, momentum=0.9)
    step = parallelize(model, loss, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches[0])
    for batch in batches:
        theirs.zero_grad()
        want = loss(mirror, batch)
        want.backward()
        theirs.step()
        torch.testing.assert_close(step(batch), want, atol=1e-9, rtol=1e-9)
    trained = step.sync_model()
    for (name, got), wanted in zip(trained.state_dict().items(), mirror.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9, msg=name)
    return step
