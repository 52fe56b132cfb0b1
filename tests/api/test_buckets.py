"""Sums of gradients laid end to end: only sums, and none that a kernel of its own does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.testing.torch_modules import draw, run_script


class Least(nn.Module):
    """Its loss has a minimum over the batch beside the sums of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(draw((4, 4), "normal", 1)), nn.Parameter(draw((4, 6), "normal", 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).amin(0).abs().amax() + (x @ self.b).square().mean() + (x @ self.a).amax(0).sum()


@pytest.mark.parametrize("plan", ["dp2", "dp3", "dp4", "dp2,zero1", "dp2,tp2"])
@pytest.mark.parametrize("optimizer", ["SGD(params, lr=1.0)", "Adagrad(params, lr=0.1, eps=0.01)"])
def test_a_minimum_is_no_sum(plan: str, optimizer: str) -> None:
    run_script(Least, lambda: {"x": draw((4, 4), "normal", 3)}, optimizer, (plan,))


class Several(nn.Module):
    """Some gradients are summed by the kernel that updates, others are not."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(4, dtype=torch.float64)), nn.Parameter(draw((6, 4), "whole", 2))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.p
        return torch.einsum("...k,nk->...n", y, self.q).sum(-1).square().mean() + y.unsqueeze(0).expand(2, -1, -1, -1).norm()


@pytest.mark.parametrize("plan", ["dp2", "dp3", "dp2,tp2"])
def test_what_a_kernel_sums_stays_there(plan: str) -> None:
    run_script(Several, lambda: {"x": draw((4, 2, 4), "whole", 3)}, "SGD(params, lr=1.0)", (plan,))
