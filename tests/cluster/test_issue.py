"""What the host needs to issue ops, from chains timed by a clock that knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.cluster import issue, measure

TRUE = {
    "host.view": 2.0, "host.node": 1.5, "host.op": 3.0, "host.op.back": 0.5, "host.product": 6.0, "host.product.back": 4.0, "host.norm": 7.0,
    "host.norm.back": 3.5, "host.convolution": 12.0, "host.convolution.back": 9.0, "host.batch_norm": 14.0, "host.batch_norm.back": 2.5,
    "host.attention": 10.0, "host.attention.back": 13.0, "host.update": 4.0, "host.step": 50.0,
}  # fmt: skip


def test_constants_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock(call: Callable[[], Any], device: str, budget: float = 0.0) -> float:
        return 1e-6 * issue.total(issue._counted(call), TRUE.get)

    monkeypatch.setattr(measure, "seconds", clock)
    found = issue.costs("cpu")
    assert found.pop("host.mixed") == pytest.approx(1.0)
    assert {key: value * 1e6 for key, value in found.items()} == pytest.approx(TRUE)


def test_what_a_step_dispatches() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    with issue.Counting() as seen:
        net(torch.zeros(2, 4)).sum().backward()
        optimizer.step()
    assert {k: seen.counts[k] for k in ("host.product", "host.product.back", "host.update", "host.step")} == {
        "host.product": 2, "host.product.back": 3, "host.update": 4, "host.step": 1,
    }  # fmt: skip
    assert seen.counts["host.node"] >= 8  # a sum, a relu, two products, two turned weights, four gradients kept
