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


def test_an_evaluation_leaves_no_answer_for_the_next_step() -> None:
    (mine, reference), signs = (model(), model()), (1, -1, -1, 1)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    of = lambda sign: {"x": sign * batch(0)["x"].abs()}  # noqa: E731
    step = parallelize(mine, branch, torch.optim.SGD(mine.parameters(), 0.1), of(1))
    for sign in signs:
        torch.testing.assert_close(step.eval(of(-sign)), branch(reference, of(-sign)), rtol=1e-9, atol=1e-11)
        optimizer.zero_grad()
        value = branch(reference, of(sign))
        value.backward()
        optimizer.step()
        torch.testing.assert_close(step(of(sign)), value, rtol=1e-9, atol=1e-11)


def distinct(m: nn.Module, b: Any) -> Tensor:
    """How many classes are predicted, and one of them as a key and in words."""
    picked = m(b["x"]).argmax(-1).tolist()
    weights = {"0": 1.0, "1": 2.0, "2": 3.0}
    return m(b["x"]).square().mean() * len(set(picked)) * {0: 1.0, 1: 2.0, 2: 3.0}[picked[0]] * weights[str(picked[1])] * weights[f"{picked[2]:d}"]


def test_integers_of_results_are_keys() -> None:
    torch.testing.assert_close(by_weft(distinct, "dp1"), by_torch(distinct), rtol=1e-9, atol=1e-11)


def test_a_program_that_was_refused_is_refused_again() -> None:
    """It is made for a state that was reached later, and asks Python what no guard sees."""

    def kind(m: nn.Module, b: Any) -> Tensor:
        if m.weight.sum() > 0.5:
            return (m(b["x"]) + 3).square().mean()
        return (m(b["x"]) + 4).abs().mean() * (2 if isinstance(m(b["x"]).sum(0).argmax().item(), int) else 1)

    m = model()
    with torch.no_grad():
        m.weight.fill_(0.05)
    data = {"x": batch(0)["x"].abs()}
    step, refused = parallelize(m, kind, torch.optim.SGD(m.parameters(), 0.02), data), 0
    for _ in range(6):
        try:
            step(data)
        except CaptureError:
            refused += 1
    assert refused >= 3 and step.steps == 6 - refused


class Deep(nn.Module):
    """Stops when it has settled, leaves early when it is sure, and sends rows to experts: as its parameters say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.ModuleList(nn.Linear(4, 3) for _ in range(3))
        self.gate, self.slots, self.at = nn.Linear(4, 3), nn.Buffer(torch.zeros(8, 4)), nn.Buffer(torch.tensor(0))

    def settled(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                new = torch.tanh(0.3 * self.layers[0](z) + x)
                if (new - z).norm() < 0.01:
                    break
                z = new
        return torch.tanh(0.3 * self.layers[0](z) + x)

    def early(self, x: Tensor) -> list[Tensor]:
        out = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).relu() + x
            out.append(head(x))
            if out[-1].softmax(-1).amax(-1).mean() > 0.55:
                break
        return out

    def routed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            rows = torch.where(chosen == i)[0]
            out = out.index_add(0, rows, layer(x[rows]) * weights[rows, None]) if len(rows) else out
        return out

    def queued(self, x: Tensor) -> Tensor:
        at = int(self.at)
        with torch.no_grad():
            self.slots[at : at + 2] = self.layers[1](x[:2])
            self.at.copy_((self.at + 2) % 8)
        return x @ self.slots.t()


def several_ways(m: Deep, b: Any) -> Tensor:
    exits, y = m.early(m.settled(b["x"])), b["y"]
    loss = sum(F.cross_entropy(o, y) for o in exits) + m.routed(b["x"]).square().mean() + m.queued(m.layers[2](b["x"])).tanh().mean()
    return loss if torch.isfinite(loss) else loss * 0


def of_values(m: Deep, b: Any) -> Tensor:
    out = m.gate(b["x"])
    values, which, counts = torch.unique(out.argmax(-1), return_inverse=True, return_counts=True)
    middle = torch.zeros(len(values), 3, dtype=out.dtype).index_add(0, which, out) / counts[:, None]
    hard = F.cross_entropy(out, b["y"], reduction="none").sort(descending=True).values
    kept = hard[: max(1, int((hard > hard.mean()).sum()))]
    return (out - middle[which]).square().sum() + kept.mean() * float(kept.detach()[0]) + out[out > 0].sum() / (out.argmax(-1) == b["y"]).sum().item() ** 0.0


def deep_by_torch(loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    m = Deep().double()
    optimizer, out = torch.optim.Adam(m.parameters(), 0.05), []
    for i in range(5):
        optimizer.zero_grad()
        value = loss(m, batch(i))
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out, {n: x.detach() for n, x in m.state_dict().items()}


def deep_by_weft(loss: Any, plan: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    m = Deep().double()
    step = parallelize(m, loss, torch.optim.Adam(m.parameters(), 0.05), batch(0), plan)
    out = [step(batch(i)).item() for i in range(5)]
    return out, {n: x.detach() for n, x in step.sync_model().state_dict().items()}


@pytest.mark.parametrize("loss", [several_ways, of_values])
def test_what_parameters_decide_is_answered_from_the_state_at_hand(loss: Any, capfd: pytest.CaptureFixture[str]) -> None:
    torch.testing.assert_close(deep_by_weft(loss, "dp1"), deep_by_torch(loss), rtol=1e-9, atol=1e-11)
    assert "a number that Python asks for is another (test_batch_numbers.py, line" in capfd.readouterr().err


@pytest.mark.parametrize("plan", ["dp2,zero3", "tp2", "pp2"])
def test_ranks_answer_from_all_of_the_state(plan: str, tmp_path: Path) -> None:
    want = deep_by_torch(several_ways)

    def job(rank: int) -> None:
        torch.testing.assert_close(deep_by_weft(several_ways, plan), want, rtol=1e-9, atol=1e-11)

    on_ranks(2, job, tmp_path)


def test_sizes_of_parts_that_repeated_blocks_count_each_for_themselves() -> None:
    """Experts that split their rows by what `tolist()` gives: torch's own reader of sizes says of any error in an answer that there is no integer."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            second = (self.experts[0](x)[:, 0] > 0).long()
            order = second.argsort(stable=True)
            parts = x[order].split(torch.bincount(second, minlength=2).tolist())
            return x + torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])[order.argsort()]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(3))).double()

    def loss(m: nn.Module, b: Any) -> Tensor:
        return m(b["x"]).square().mean()

    want, own = [], made()
    optimizer, mine = torch.optim.SGD(own.parameters(), 0.1), made()
    for i in range(3):
        optimizer.zero_grad()
        value = loss(own, batch(i))
        value.backward()
        optimizer.step()
        want.append(value.item())
    step = parallelize(mine, loss, torch.optim.SGD(mine.parameters(), 0.1), batch(0))
    assert [step(batch(i)).item() for i in range(3)] == pytest.approx(want, rel=1e-12)


def test_a_draw_that_decides_is_refused() -> None:
    m = model()
    loss = lambda m, b: m(b["x"]).sum() if F.dropout(m(b["x"])).max() > 1 else m(b["x"]).mean()  # noqa: E731
    with pytest.raises(CaptureError, match="only known when it runs"):
        parallelize(m, loss, torch.optim.SGD(m.parameters(), 0.1), batch(0))
    with pytest.raises(CaptureError, match="shape depends on data"):
        parallelize(m, lambda m, b: F.dropout(m(b["x"])).nonzero().sum() * m.bias.sum(), torch.optim.SGD(m.parameters(), 0.1), batch(0))
