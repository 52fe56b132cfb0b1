"""A step that cannot fit is refused before it is compiled, with what would fit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from weft.api import memory_limit
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)])


def made(samples: int, plan: str = "dp1") -> None:
    net = model()
    parallelize(
        net,
        lambda m, b: m(b).square().mean(),
        torch.optim.AdamW(net.parameters()),
        torch.randn(samples, 64),
        plan,
        check=False,
    )


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A device with so many bytes free, and nothing resident."""
    told = {"free": 0.0}
    monkeypatch.setattr(memory_limit, "is_accelerator", lambda device: True)
    monkeypatch.setattr(memory_limit, "free", lambda device: told["free"])
    monkeypatch.setattr("weft.cost.memory.RESIDENT", 0.0)
    return told


def refused(samples: int) -> PlanError:
    with pytest.raises(PlanError, match="does not fit into the memory of a device") as caught:
        made(samples)
    return caught.value


def test_what_fits_is_made_and_what_does_not_is_refused_with_what_does(budget: dict[str, float]) -> None:
    budget["free"] = 8e6
    made(256)
    error = refused(8192)
    assert "free" in str(error.found) and "parameters and state" in str(error.needed)
    tried = "\n".join(error.repairs)
    (most,) = map(int, re.findall(r"a batch of (\d+) samples instead of 8192", tried))
    made(most)
    refused(int(1.1 * most))
    (plan,) = re.findall(r'plan="([^"]+)", in micro', tried)
    assert plan.startswith("micro")
    made(8192, plan)


def test_recompute_is_offered_where_it_is_enough(budget: dict[str, float]) -> None:
    budget["free"] = 1e12
    made(4096)
    whole = 4096 * 64 * 4
    budget["free"] = 12.0 * whole
    error = refused(4096)
    (plan, *_) = re.findall(r'plan="([^"]+)"$', "\n".join(error.repairs), re.M)
    assert "recompute" in plan
    made(4096, plan)


def test_nothing_is_asked_of_a_host() -> None:
    made(64)
