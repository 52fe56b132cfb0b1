"""A step of many layers or tensors is made in work proportional to their number; what is counted are calls within weft, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.api.ranks import on_ranks

ROOT = weft.__file__.removesuffix("__init__.py")


class Terms(nn.Module):
    """A sum of as many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList([nn.Parameter(torch.full((4,), 0.1)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x * term for term in self.terms), x)


class Loop(nn.Module):
    """One layer, as many times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = torch.tanh(self.layer(x))
        return x


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def calls(make: Callable[[int], nn.Module], count: int, plan: str, clip: float | None) -> int:
    """How many calls within weft it takes to make a step of so many parts."""
    found = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal found
        found += frame.f_code.co_filename.startswith(ROOT)

    model, batch = make(count), torch.ones(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    before = sys.gettrace()
    sys.settrace(called)
    try:
        weft.parallelize(model, lambda m, b: m(b).square().mean(), optimizer, batch, plan=plan, clip=clip)
    finally:
        sys.settrace(before)
    return found


def growth(make: Callable[[int], nn.Module], plan: str = "dp1", clip: float | None = None, few: int = 8) -> float:
    """Calls for each part beyond twice as many, over those for each part beyond as few: 1 where they are in proportion."""
    calls(make, 2, plan, clip)  # what is worked out once for all programs
    one, two, four = (calls(make, few * k, plan, clip) for k in (1, 2, 4))
    return (four - two) / (2 * (two - one))


@pytest.mark.parametrize("make", [layers, Terms, Loop])
def test_work_grows_with_the_parts(make: Any) -> None:
    assert growth(make) < 1.05


def test_work_grows_with_the_parts_in_micro_batches() -> None:
    assert growth(layers, "micro2", clip=1.0) < 1.05


def test_work_grows_with_the_parts_on_two_processes(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        torch.manual_seed(0)
        assert growth(layers, "dp2,zero1", clip=1.0, few=6) < 1.05

    on_ranks(2, job, tmp_path)
