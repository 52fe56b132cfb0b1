"""Tables updated by the rows a batch looked up: training equals torch's with whole gradients, in one process and where tables are cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize

ROWS, WIDTH, STEPS = 400, 4, 3
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adam with decay": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd with decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adagrad uphill": partial(torch.optim.Adagrad, lr=0.1, maximize=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1),
}


class Tables(nn.Module):
    """A table of bags and one with a row that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", dtype=torch.float64)
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=3, dtype=torch.float64)
        self.top = nn.Linear(2 * WIDTH, 1, dtype=torch.float64)

    def forward(self, bags: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.bags(bags), self.words(words).sum(1)], 1).tanh())


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch["bags"], batch["words"]).square().mean()


def batch(seed: int, size: int = 6) -> dict[str, torch.Tensor]:
    """Some rows more than once, within a bag and between bags; the padding among them."""
    g = torch.Generator().manual_seed(seed)
    near = torch.randint(0, 5, (size, 3), generator=g)
    return {"bags": torch.where(near < 3, near * 100, torch.randint(0, ROWS, (size, 3), generator=g)), "words": near}


def by_torch(make: Make, size: int = 6) -> dict[str, torch.Tensor]:
    model = Tables()
    optimizer = make(model.parameters())
    for k in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(k, size)).backward()
        optimizer.step()
    return {n: t.detach() for n, t in model.named_parameters()}


def by_weft(make: Make, plan: str, pins: tuple[str, ...] = (), size: int = 6) -> tuple[dict[str, torch.Tensor], str]:
    model = Tables()
    step = parallelize(model, loss, make(model.parameters()), batch(0, size), plan=plan, pins=pins)
    for k in range(STEPS):
        step(batch(k, size))
    return {n: step.full(f"param.{n}") for n, _ in model.named_parameters()}, step.compiled.code.text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_equals_torch(name: str) -> None:
    found, code = by_weft(OPTIMIZERS[name], "dp1")
    torch.testing.assert_close(found, by_torch(OPTIMIZERS[name]), rtol=1e-12, atol=1e-12)
    assert code.count("by_rows.update_") == 2
    assert ("still=True" in code) == (name in ("sgd", "adagrad", "adagrad uphill"))


CUTS = {"by rows": "S(0)", "by columns": "S(1)"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cut", CUTS)
def test_cut_tables_equal_torch(cut: str, tmp_path: Path) -> None:
    """A batch of which one rank's half of the table has nothing is among them: all rows of the second are in the first half."""
    want = {name: by_torch(OPTIMIZERS[name]) for name in ("adamw", "sgd", "adagrad")}
    pins = tuple(f"{table}.weight=tp:{CUTS[cut]}" for table in ("bags", "words"))

    def job(rank: int) -> None:
        for name, expected in want.items():
            found, code = by_weft(OPTIMIZERS[name], "tp2", pins)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
            assert "by_rows.update_" in code

    on_ranks(2, job, tmp_path)


@pytest.mark.timeout(120)
def test_copies_equal_torch_where_one_has_no_samples(tmp_path: Path) -> None:
    want = by_torch(OPTIMIZERS["adamw"], size=1)

    def job(rank: int) -> None:
        for plan in ("dp2", "dp2,zero1"):
            found, _ = by_weft(OPTIMIZERS["adamw"], plan, size=1)
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12, msg=lambda m, plan=plan: f"{plan}: {m}")

    on_ranks(2, job, tmp_path)


def test_a_small_table_has_a_whole_gradient() -> None:
    """Where a batch looks up as many rows as there are, nothing is gained."""
    _, code = by_weft(OPTIMIZERS["adamw"], "dp1", size=ROWS)
    assert "by_rows.update_" not in code


def test_a_gradient_that_is_clipped_is_whole() -> None:
    model = Tables()
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters()), batch(0), plan="dp1", clip=1.0)
    assert "by_rows.update_" not in step.compiled.code.text
