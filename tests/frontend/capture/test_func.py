"""Transforms of torch.func inside a model: torch takes its ops apart, and the pieces are heard."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.frontend.capture.checks import same_as_torch

X = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, f):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.f = nn.Linear(4, 4), nn.LayerNorm(4), f

    def forward(self, x):
        return self.f(self, self.linear(x))


def per_sample(m, h):
    def loss(p, x):
        return torch.func.functional_call(m.norm, p, (x[None],)).square().sum()

    grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(m.norm.named_parameters()), h)
    return h * grads["weight"]


@pytest.mark.parametrize("f", [
    lambda m, h: torch.vmap(lambda r: F.softmax(r, -1) * r.sum())(h),
    lambda m, h: torch.vmap(m.norm)(h),
    lambda m, h: torch.func.functional_call(m.norm, {"weight": m.norm.weight * 2}, (h,)),
    lambda m, h: h + torch.func.grad(lambda z: torch.tanh(z).square().sum())(h),
    lambda m, h: torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1],
    lambda m, h: torch.func.vjp(torch.tanh, h)[1](torch.ones_like(h))[0],
    lambda m, h: torch.vmap(torch.func.jacrev(lambda r: torch.sin(r) * r.sum()))(h).sum(-1),
    per_sample,
    lambda m, h: torch.vmap(torch.vmap(lambda a: a.sin() * 2))(h),
], ids=["vmap", "vmap of a module", "functional_call", "grad", "jvp", "vjp", "jacrev", "per sample", "two vmaps"])  # fmt: skip
def test_transforms(f):
    same_as_torch(Net(f).double(), lambda m, b: m(*b).square().mean(), (X,), 1e-12)
