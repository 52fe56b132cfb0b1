"""Updates run piece by piece on a processor: the same bits as at once, with no more room beside them than a piece takes."""

from __future__ import annotations

import pytest
import torch

from weft.ops import optimizers
from weft.ops.optimizers import adam, sgd


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    p, grad, m, v = (torch.randn(33, 100, generator=g).to(dtype) for _ in range(4))
    rate, step = torch.tensor(0.1, dtype=torch.float64), torch.tensor(3)
    how = {"betas": (0.9, 0.99), "eps": 1e-8, "decay": 0.1, "decoupled": True, "sign": 1}
    momentum = {"momentum": 0.9, "damping": 0.0, "nesterov": True, "decay": 0.1, "sign": 1}
    runs = [
        lambda: adam.run(p, grad, m, v.abs(), rate, step, **how),
        lambda: sgd.run(p, grad, m, rate, step, **momentum),
        lambda: (sgd.run(p, grad, rate, step, **momentum | {"momentum": 0.0, "nesterov": False}),),
        lambda: sgd.run(p.T, grad.T, m.T, rate, step, **momentum),
    ]
    whole = [run() for run in runs]
    monkeypatch.setattr(optimizers, "PIECE", 64)
    for want, run in zip(whole, runs, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(want, run(), strict=True))
