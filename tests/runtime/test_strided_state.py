"""State that does not lie in one piece of memory is updated as torch updates it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from weft.runtime import library_kernels


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_adam_of_tensors_that_lie_in_another_order(decoupled: bool, own: bool) -> None:
    torch.manual_seed(0)
    p, g, m, v = (torch.rand(3, 4).t() for _ in range(4))
    g, m = g.contiguous(), m.contiguous()
    how = {"betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, "decoupled": decoupled}
    lr, step = torch.tensor(0.1), torch.tensor(3)
    want = library_kernels.adam(*(x.contiguous() for x in (p, g, m, v)), lr, step, own=False, **how)
    for got, right in zip(library_kernels.adam(p.clone(), g, m.clone(), v.clone(), lr, step, own=own, **how), want, strict=True):
        torch.testing.assert_close(got, right)
    library_kernels.adam_([p], [g], [m], [v], lr, step, **how)
    for got, right in zip((p, m, v), want, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_model_whose_parameters_lie_in_another_order(name: str) -> None:
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).to(memory_format=torch.channels_last)
        model[3].weight = nn.Parameter(torch.randn(16, 2).t())
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1)

    x = torch.randn(2, 3, 4, 4)
    ours, theirs = built(), built()
    step = weft.parallelize(ours[0], lambda m, b: m(b).square().mean(), ours[1], x)
    for _ in range(3):
        loss = theirs[0](x).square().mean()
        theirs[1].zero_grad()
        loss.backward()
        theirs[1].step()
        torch.testing.assert_close(step(x), loss.detach(), rtol=1e-4, atol=1e-5)
