"""Random ops under plans: the check takes them, and every way to cut gives the numbers one process draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import interp
from weft.api import pool
from weft.frontend.capture import capture
from weft.plan.spec import Spec
from weft.rewrite.check import check

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn": lambda h: h + torch.randn(h.shape, dtype=h.dtype) * 0.1,
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli of probabilities": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "neftune": lambda h: h + torch.zeros_like(h).uniform_(-1, 1) * 0.1,
    "normal_": lambda h: h + torch.empty_like(h).normal_(),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_dropout": lambda h: F.dropout1d(h, 0.3, training=True),
    "dropout": lambda h: F.dropout(h, 0.3, training=True),
    "of a parameter's shape": lambda h: h * (1 + torch.randn(h.shape[-1:], dtype=h.dtype)),
}


class Noisy(nn.Module):
    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.noise = nn.Linear(6, 8).double(), nn.Linear(8, 4).double(), noise

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.noise(self.a(x))).square().mean()


@pytest.mark.parametrize("name", DRAWS)
def test_random_ops_pass_the_check_and_draw_alike(name: str) -> None:
    torch.manual_seed(0)
    model, x = Noisy(DRAWS[name]), torch.randn(4, 2, 6, dtype=torch.float64)
    captured = capture(model, x, lambda m, b: m(b), torch.optim.SGD(model.parameters(), lr=1.0))
    given = captured.inputs(x, seed=7)
    want = interp.run_global(captured.program, given)
    assert "seed" in given
    other = interp.run_global(captured.program, captured.inputs(x, seed=8))
    assert not torch.equal(other["loss"], want["loss"])
    for words in ("dp2", "dp2,zero3", "tp2", "dp2,tp2"):
        placed = pool.prepare(captured, Spec.parse(words))
        report = check(captured.program, placed)
        assert report.equal, f"{words}: {report}"
        for n, got in interp.run(placed, given).items():
            torch.testing.assert_close(got, want[n], msg=lambda m, n=n, words=words: f"{n} under {words}: {m}")
