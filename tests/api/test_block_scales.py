"""precision="fp8-block": a scale for every 128 elements, 128 x 128 of a weight, against torch with the same matmuls; the bound; the price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft import Mesh, passes
from weft.api.parallelize import parallelize
from weft.core.errors import PlanError
from weft.cost.work import Gemm, records
from weft.frontend.capture import capture
from weft.frontend.trace import tensor, trace
from weft.interp import run_global
from weft.ops.low import ROUNDING, block_matmul
from weft.passes import Draft
from weft.plan.spec import Spec


def small(x: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix rounded to 8 bits, with a scale for every block."""
    parts = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    scale = parts.abs().amax((1, 3), keepdim=True).clamp_min(1e-30) / 448
    return ((parts / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).reshape(x.shape)


class InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (small(x.flatten(0, -2), 1, 128) @ small(w, 128, 128).t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        rows = ct.flatten(0, -2)
        return (small(rows, 1, 128) @ small(w, 128, 128)).view_as(x), small(rows.t(), 1, 128) @ small(x.flatten(0, -2), 128, 1)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return InBlocks.apply(x, self.weight) + self.bias


class Net(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(64, 128), linear(128, 256), linear(256, 128)
        self.head = nn.Linear(128, 64)  # products beside the loss keep their dtype
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return self.head(h + self.down(F.gelu(self.up(h))))


def batch(seed: int) -> Tensor:
    return torch.randint(0, 64, (2, 128), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def torch_losses(linear: type[nn.Linear]) -> list[float]:
    model = Net(linear)
    opt, out = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i in range(3):
        opt.zero_grad()
        value = loss(model, batch(i))
        value.backward()
        opt.step()
        out.append(value.item())
    return out


def weft_losses(plan: str) -> list[float]:
    model = Net()
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(0), plan=plan, precision="fp8-block")
    return [step(batch(i)).item() for i in range(3)]


def test_losses_are_those_of_torch_with_the_same_blocks(tmp_path: Path) -> None:
    want = torch_losses(Linear)
    assert want != torch_losses(nn.Linear)
    torch.testing.assert_close(weft_losses("dp1"), want, rtol=1e-8, atol=0)

    def job(rank: int) -> None:
        for plan in ("dp2", "tp2", "dp2,zero3"):
            torch.testing.assert_close(weft_losses(plan), want, rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


@pytest.mark.parametrize("weights", [(False, True), (False, False)])
def test_products_are_within_the_stated_rounding(weights: tuple[bool, bool]) -> None:
    """Of a block, not of a row, the largest says what is lost of the smallest."""
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 256, generator=gen, dtype=torch.float64) for n in (5, 128))
    x[:, 128:] *= 1e6
    y[:, 128:] *= 1e-6
    p = trace(lambda x, y: block_matmul("ik,nk->in", x, y, torch.float64, weights), Mesh(dp=1), x=tensor("f64", 5, 256), y=tensor("f64", 128, 256))
    off = (next(iter(run_global(p, {"x": x, "y": y}).values())) - x @ y.t()).abs()
    blocks = [(a.abs().amax(1)[:, None], b.abs().amax() if weights[1] else b.abs().amax(1)) for a, b in zip(x.split(128, 1), y.split(128, 1), strict=True)]
    tiny = sum(3 * 128 * a * b / 458752 for a, b in blocks)
    assert bool((off <= ROUNDING * (x.abs() @ y.abs().t()) + tiny).all())
    assert off.max() > 0


def test_its_matmuls_are_priced_as_8_bit_ones() -> None:
    """As many flops as without, whatever scales stand beside them."""
    model = Net()
    captured = capture(model, batch(0), loss, torch.optim.AdamW(model.parameters(), lr=1e-2))
    made = {low: passes.run(Draft(captured, Spec.parse("dp1"), low=low)).program for low in ("", "fp8", "fp8-block")}
    gemms = {low: [op for op in records(p) if isinstance(op, Gemm)] for low, p in made.items() if p is not None}
    want = sum(op.flops for op in gemms[""])
    for low in ("fp8", "fp8-block"):
        assert sum(op.flops for op in gemms[low]) == want
        assert sum(op.dtype == "fp8" for op in gemms[low]) == 6


def test_other_words_are_refused() -> None:
    model = Net()
    with pytest.raises(PlanError, match="no precision 'fp8-tile'") as caught:
        parallelize(model, loss, torch.optim.AdamW(model.parameters()), batch(0), precision="fp8-tile")
    assert '"fp8-block"' in str(caught.value)
