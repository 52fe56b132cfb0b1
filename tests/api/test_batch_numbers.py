"""Numbers that the batch alone decides, and Python asks for: branches and shapes that follow the data, against torch step by step."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.core.errors import CaptureError, RuntimeFault


def branch(m: nn.Module, b: Any) -> Tensor:
    return m(b["x"]).square().mean() if b["x"].sum() > 0 else m(b["x"]).abs().sum()


def selected(m: nn.Module, b: Any) -> Tensor:
    keep = b["y"] > 0
    return F.cross_entropy(m(b["x"])[keep], b["y"][keep]) + m(b["x"]).masked_select(keep[:, None]).sum()


def places(m: nn.Module, b: Any) -> Tensor:
    rows = (b["y"] == 1).nonzero().squeeze(1)
    return m(b["x"]).index_select(0, rows).sum() + m(b["x"].repeat_interleave(b["y"], 0)).tanh().sum()


def counted(m: nn.Module, b: Any) -> Tensor:
    return m(b["x"][:, : int(b["y"].max()) + 1].mean(1, keepdim=True).expand(-1, 4)).square().sum() / b["y"].sum().item()


def taken_out(m: nn.Module, b: Any) -> Tensor:
    """Numbers of what the model computes: they have no gradient."""
    value = m(b["x"]).square().mean()
    scale = max(value.item(), 0.5) + math.sqrt(m.weight.norm().item()) ** 2
    return value / scale + m(b["x"]).clamp(max=min(scale, 1.0)).sum() * (-value.item() + 2)


def batch(i: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(i)
    return {"x": torch.randn(6, 4, dtype=torch.float64, generator=draw), "y": torch.randint(0, 3, (6,), generator=draw)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def by_torch(loss: Any) -> tuple[list[float], Tensor]:
    m = model()
    optimizer, out = torch.optim.SGD(m.parameters(), 0.1), []
    for i in range(5):
        optimizer.zero_grad()
        value = loss(m, batch(i))
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out, m.weight.detach()


def by_weft(loss: Any, plan: str) -> tuple[list[float], Tensor]:
    m = model()
    step = parallelize(m, loss, torch.optim.SGD(m.parameters(), 0.1), batch(0), plan)
    out = [step(batch(i)).item() for i in range(5)]
    return out, copy.deepcopy(step.sync_model().weight.detach())


@pytest.mark.parametrize("loss", [branch, selected, places, counted, taken_out])
def test_one_process_equals_torch(loss: Any) -> None:
    torch.testing.assert_close(by_weft(loss, "dp1"), by_torch(loss), rtol=1e-9, atol=1e-11)


def test_ranks_equal_torch_where_the_batch_is_whole(tmp_path: Path) -> None:
    want = by_torch(selected)

    def job(rank: int) -> None:
        torch.testing.assert_close(by_weft(selected, "dp2"), want, rtol=1e-9, atol=1e-11)
        m = model()
        step = parallelize(m, branch, torch.optim.SGD(m.parameters(), 0.1), batch(0), "dp2")
        with pytest.raises(RuntimeFault, match=r"a number that the full batch decides(.|\n)*x \[6, 4\](.|\n)*\[3, 4\], a part of it"):
            step({k: x[rank * 3 : rank * 3 + 3] for k, x in batch(1).items()})

    on_ranks(2, job, tmp_path)


def test_what_parameters_decide_is_refused() -> None:
    m = model()
    with pytest.raises(CaptureError, match="only known when it runs"):
        parallelize(m, lambda m, b: m(b["x"]).sum() if m(b["x"]).max().item() > 0 else m(b["x"]).mean(), torch.optim.SGD(m.parameters(), 0.1), batch(0))
    with pytest.raises(CaptureError, match="shape depends on data"):
        parallelize(m, lambda m, b: m(b["x"])[m(b["x"]) > 0].sum(), torch.optim.SGD(m.parameters(), 0.1), batch(0))
