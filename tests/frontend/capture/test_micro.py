"""Micro-batches derived from the full batch's step: torch on the whole batch is the judge; what is no sum over samples is refused."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import interp
from weft.api.micro_steps import micro_steps
from weft.core.errors import PlanError
from weft.frontend.capture import capture
from weft.frontend.capture.micro import batch_dims_of, in_micro_batches, micro_batch, unrolled

SAMPLES, PARTS = 8, 4
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(labels: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Samples, targets, classes, and for each sample some labels: the second quarter has none."""
    classes = torch.tensor([0, 3, 1, 1, 2, 0, 3, 1])
    some = torch.tensor([[1, -100, 2], [3, 0, -100], *[[-100] * 3] * 2, [2, 2, 2], [-100, 1, -100], [0, 3, 1], [-100, -100, 2]])
    return {"x": drawn(1, SAMPLES, 6), "y": drawn(2, SAMPLES, 4), "classes": classes, "labels": some}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.a(h) + self.b(h)


class Token(nn.Module):
    """A learned row before each sample's own, and a learned table with a row for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.table, self.out = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(SAMPLES, 6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.token.expand(len(x), -1, -1), (x + self.table)[:, None]], 1)
        return self.out(torch.softmax(rows @ rows.transpose(1, 2), -1) @ rows).mean(1)


class Counts(nn.Module):
    """Buffers of the three kinds: no parameter, a sum over samples, parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        for name, size in (("calls", 1), ("seen", 4), ("size", 1)):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        self.calls += 1
        self.seen.mul_(0.9).add_(0.1 * y.detach().sum(0))
        self.size.copy_(self.net[0].weight.detach().square().sum()[None])
        return y


class Images(nn.Module):
    """Ops of torch that weft has no entry for, each of which takes its samples by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.out = nn.Linear(6, 36), nn.Conv3d(1, 1, 3, padding=1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = F.interpolate(torch.special.i0e(self.first(x)).reshape(-1, 1, 6, 6), size=(4, 4), mode="bilinear")
        grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3), [len(x), 1, 4, 4], align_corners=False)
        image = F.grid_sample(image, grid + 0.1, align_corners=False)
        rows = self.mix(F.fold(F.unfold(image, 2, stride=2), (4, 4), 2, stride=2)[:, :, None])[:, 0, 0]
        return self.out((rows * torch.linalg.det(rows + 3 * torch.eye(4))[:, None, None]).flatten(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.first(x)))


def tokens(m: Any, b: Any, **how: Any) -> Tensor:
    out = m(b["x"])[:, None].expand(-1, 3, -1) * torch.arange(1, 4)[None, :, None]
    return F.cross_entropy(out.flatten(0, 1), b["labels"].flatten(), **how)


def masked(m: Any, b: Any) -> Tensor:
    keep = (b["classes"] > 0).to(torch.float64)
    return ((m(b["x"]) - b["y"]).abs().sum(-1) * keep).sum() / keep.sum().clamp(min=1)


def several(m: Any, b: Any) -> Tensor:
    out = m(b["x"])
    decay = sum(p.square().sum() for p in m.parameters())
    return F.l1_loss(out, b["y"]) + 2 * F.mse_loss(out[:, 0], b["y"][:, 0], reduction="sum") / len(out) + 0.01 * decay


def weighed(m: Any, b: Any) -> Tensor:
    return F.cross_entropy(m(b["x"]), b["classes"], weight=WEIGHTS)


def against_the_batch(m: Any, b: Any) -> Tensor:
    """Contrastive against what no parameter made."""
    return F.cross_entropy(F.normalize(m(b["x"]), dim=-1) @ F.normalize(b["y"], dim=-1).T, torch.arange(SAMPLES))


def mse(m: Any, b: Any) -> Tensor:
    return F.mse_loss(m(b["x"]), b["y"])


EQUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Tensor]]] = {
    "mean": (mlp, mse),
    "sum": (mlp, lambda m, b: F.mse_loss(m(b["x"]), b["y"], reduction="sum")),
    "labels that do not count": (mlp, tokens),
    "label smoothing": (mlp, lambda m, b: tokens(m, b, label_smoothing=0.1)),
    "class weights": (mlp, weighed),
    "a mask": (mlp, masked),
    "several losses": (mlp, several),
    "divergence": (mlp, lambda m, b: F.kl_div(m(b["x"]).log_softmax(-1), b["y"].softmax(-1), reduction="batchmean")),
    "against the batch": (mlp, against_the_batch),
    "branches": (Branches, mse),
    "tables": (Token, mse),
    "buffers": (Counts, mse),
    "ops without an entry": (Images, mse),
    "statistics of the batch alone": (lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4)), mse),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_whole_batch_is_the_judge(name: str) -> None:
    torch.manual_seed(0)
    make, loss = EQUAL[name]
    model, b = make().double(), batch()
    captured = capture(model, b, loss, gradients=True, accumulate=PARTS)
    got = interp.run_global(captured.program, captured.inputs(b))
    value = loss(model, b)
    value.backward()
    want = {"loss": value.detach(), **{f"d.param.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}}
    want |= {f"buffer.{n}": x for n, x in model.named_buffers() if f"buffer.{n}" in got}
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-11, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


REFUSED = {
    "contrastive": (mlp, lambda m, b: F.cross_entropy((z := m(b["x"])) @ z.T, torch.arange(len(z))), "matmul, which takes all samples at once"),
    "the greatest": (mlp, lambda m, b: (m(b["x"]) - b["y"]).abs().max(), "amax, which takes the greatest of all samples"),
    "batch norm": (Normed, mse, "which takes a sum over all samples"),
    "a root": (mlp, lambda m, b: mse(m, b).sqrt(), "sqrt, which takes a sum over all samples"),
    "a product": (mlp, lambda m, b: m(b["x"]).mean() * m(b["y"][:, :1].expand(-1, 6)).sum(), "mul, which takes a sum over all samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_over_samples_is_refused(name: str) -> None:
    make, loss, found = REFUSED[name]
    with pytest.raises(PlanError, match=rf"would not be the full batch's \(test_micro.py, line \d+\)(.|\n)*{found}(.|\n)*allow_micro_mean=True"):
        capture(make().double(), batch(), loss, gradients=True, accumulate=PARTS)
    alone = capture(make().double(), batch(), loss, gradients=True, accumulate=PARTS, allow_micro_mean=True)
    assert "loss" in alone.program.output_names


class Bounded(nn.Module):
    """Writes into a parameter of its own what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=x.abs().mean())
        return x * self.scale


@pytest.mark.parametrize(("make", "of"), [
    (lambda: nn.Sequential(Bounded(), nn.Linear(6, 4)), lambda: batch()["x"]),
    (lambda: nn.Sequential(nn.Embedding(5, 6, max_norm=0.5), nn.Linear(6, 4)), lambda: batch()["classes"]),
])  # fmt: skip
def test_a_parameter_that_the_forward_pass_makes_of_the_batch_is_refused(make: Callable[[], nn.Module], of: Callable[[], Tensor]) -> None:
    model = make().double()
    given = model, {"x": of()}, lambda m, b: m(b["x"]).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1)
    for asked in (lambda: capture(*given, accumulate=PARTS), lambda: micro_steps(*given)(2), lambda: micro_steps(*given)(1)):
        with pytest.raises(PlanError) as error:
            asked()
        words = "once, after the last of them", "needed  parameters that are made of their gradients", "made also of batch.x", "a plan without pp"
        assert [w for w in words if w not in str(error.value)] == []


@pytest.mark.parametrize("first", [True, False])
def test_what_is_dropped_is_what_the_whole_batch_drops(first: bool) -> None:
    """Elements and attention weights, samples in the first dim or in another."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.3, batch_first=first).double()
    x = drawn(3, SAMPLES, 5, 6) if first else drawn(3, 5, SAMPLES, 6)
    captured = capture(layer, {"x": x, "y": drawn(4, SAMPLES)}, lambda m, b: m(b["x"]).mean() + b["y"].mean(), gradients=True)
    parts = unrolled(in_micro_batches(captured, PARTS, {"batch.x": 0 if first else 1, "batch.y": 0}))
    values = {"batch.x": x, "batch.y": drawn(4, SAMPLES), "seed": torch.tensor(7), **captured.parameters}
    want, got = (interp.run_global(c.program, {n: values[n].detach() for n in c.program.input_names}) for c in (captured, parts))
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-11, atol=1e-12)


# -- the batch -----------------------------------------------------------------------------------------------------------------------


def test_a_mapping_of_any_kind_is_cut() -> None:
    """Collators of Hugging Face give a UserDict."""
    part = micro_batch(UserDict(x=torch.arange(8), n=3), 1, 4)
    assert isinstance(part, UserDict) and part["x"].tolist() == [2, 3] and part["n"] == 3


def test_tensors_without_samples_stay_whole() -> None:
    assert batch_dims_of({"x": torch.ones(8, 4), "y": torch.ones(8), "edges": torch.ones(2, 20)}) == (8, {"batch.x": 0, "batch.y": 0})
    assert batch_dims_of({"x": torch.ones(8, 4), "places": torch.ones(3, 8)}) == (8, {"batch.x": 0, "batch.places": 1})
    with pytest.raises(PlanError, match=r"is ambiguous(.|\n)*x \[8, 4\], y \[6\]"):
        batch_dims_of({"x": torch.ones(8, 4), "y": torch.ones(6)})
    with pytest.raises(PlanError, match="a batch of 8 is not 3 equal micro-batches"):
        micro_batch(torch.ones(8), 0, 3)
