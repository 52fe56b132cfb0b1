"""precision="fp8" against torch itself with the same products of 8-bit floats, under plans, and within the stated rounding."""

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
from weft.frontend.capture import capture
from weft.frontend.trace import tensor, trace
from weft.interp import run_global
from weft.ops.low import ROUNDING, scaled_matmul
from weft.passes import Draft
from weft.plan.spec import Spec


def small(x: Tensor, dim: int | tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim, keepdim=True).clamp_min(1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype), scale


def product(a: Tensor, b: Tensor) -> Tensor:
    (x, by_row), (y, by_column) = small(a, 1), small(b, 0)
    return (x @ y) * by_row * by_column


class InEight(torch.autograd.Function):
    product = staticmethod(product)

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return cls.product(x.flatten(0, -2), w.t()).unflatten(0, x.shape[:-1])

    @classmethod
    def backward(cls, ctx: Any, ct: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        rows = ct.flatten(0, -2)
        return cls.product(rows, w).view_as(x), cls.product(rows.t(), x.flatten(0, -2))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return InEight.apply(x, self.weight) + self.bias


class Net(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up, self.down = nn.Embedding(64, 32), linear(32, 64), linear(64, 32)
        self.head = nn.Linear(32, 64)  # products beside the loss keep their dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return self.head(h + self.down(F.gelu(self.up(h))))


def batch(seed: int) -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def torch_losses(linear: type[nn.Linear], parts: int = 1) -> list[float]:
    model = Net(linear)
    opt, out = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i in range(3):
        opt.zero_grad()
        values = [loss(model, x) / parts for x in batch(i).chunk(parts)]
        for value in values:
            value.backward()
        opt.step()
        out.append(sum(v.item() for v in values))
    return out


def weft_losses(plan: str, dtype: torch.dtype = torch.float64, precision: str = "fp8") -> list[float]:
    model = Net(dtype=dtype)
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch(0), plan=plan, precision=precision)
    return [step(batch(i)).item() for i in range(3)]


def test_losses_are_those_of_torch_with_8_bit_products(tmp_path: Path) -> None:
    """Of a micro-batch the gradient's rows are scaled by that micro-batch alone, in torch as here."""
    want = {parts: torch_losses(Linear, parts) for parts in (1, 2)}
    assert want[1] != torch_losses(nn.Linear)
    torch.testing.assert_close(weft_losses("dp1"), want[1], rtol=1e-8, atol=0)

    def job(rank: int) -> None:
        for plan, parts in (("dp2", 1), ("tp2", 1), ("dp2,zero3", 1), ("pp2,micro2", 2)):
            torch.testing.assert_close(weft_losses(plan), want[parts], rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


class OfTensors(InEight):
    """A scale for each tensor."""

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        (x, of_a), (y, of_b) = small(a, (0, 1)), small(b, (0, 1))
        return (x @ y) * of_a * of_b


class ByTensor(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return OfTensors.apply(x, self.weight) + self.bias


def test_tensors_may_have_one_scale_each(tmp_path: Path) -> None:
    """Which all ranks find together."""
    want = torch_losses(ByTensor)
    assert want != torch_losses(Linear)
    torch.testing.assert_close(weft_losses("dp1", precision="fp8-tensor"), want, rtol=1e-8, atol=0)

    def job(rank: int) -> None:
        for plan in ("dp2", "tp2", "dp2,zero3"):
            torch.testing.assert_close(weft_losses(plan, precision="fp8-tensor"), want, rtol=1e-8, atol=0, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_losses_stay_near_those_without() -> None:
    torch.testing.assert_close(weft_losses("dp1", torch.float32), torch_losses(nn.Linear), rtol=1e-2, atol=0)


@pytest.mark.parametrize("by_row", [True, False])
def test_products_are_within_the_stated_rounding(by_row: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*s, generator=gen, dtype=torch.float64) * torch.logspace(-3, 3, s[0])[:, None] for s in ((5, 16), (7, 16)))
    x[2], y[3, 1:] = 0, 0
    p = trace(lambda x, y: scaled_matmul("ik,nk->in", x, y, torch.float64, by_row=by_row), Mesh(dp=1), x=tensor("f64", 5, 16), y=tensor("f64", 7, 16))
    off = (next(iter(run_global(p, {"x": x, "y": y}).values())) - x @ y.t()).abs()
    largest_x, largest_y = (v.abs().amax(1) if by_row else v.abs().amax().expand(len(v)) for v in (x, y))
    tiny = 3 * 16 * largest_x[:, None] * largest_y / 458752
    assert bool((off <= ROUNDING * (x.abs() @ y.abs().t()) + tiny).all())
    assert off.max() > 0


def test_gathered_weights_travel_in_8_bits() -> None:
    model = Net()
    captured = capture(model, batch(0), loss, torch.optim.AdamW(model.parameters(), lr=1e-2))
    program = passes.run(Draft(captured, Spec.parse("dp2,zero3"), low="fp8")).program
    assert program is not None
    gathered = [n.args[0].dtype for n in program.nodes if n.op.name == "all_gather" and n.ndim == 2 and n.shape[1] > 1]
    assert gathered.count(torch.float8_e4m3fn) == len(gathered) - 2  # all but the table, which is looked up, and the head's, beside the loss


def test_other_words_are_refused() -> None:
    model = Net()
    with pytest.raises(PlanError, match="no precision 'fp4'") as caught:
        parallelize(model, loss, torch.optim.AdamW(model.parameters()), batch(0), precision="fp4")
    assert '"fp8"' in str(caught.value)
