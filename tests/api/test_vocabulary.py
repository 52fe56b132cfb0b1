"""Under tensor parallelism vocabularies are sharded: lookups, heads, losses and their gradients equal torch on two real processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.ranks import run_ranks
from weft.api.parallelize import parallelize

WORDS, WIDTH = 37, 8  # 37 is not divided by two


class Words(nn.Module):
    """A model of one hidden layer over words; the head may be the table itself, and logits may be capped."""

    def __init__(self, tied: bool, cap: float = 0.0, bias: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        self.cap = cap
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        logits = self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def smooth(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten(), label_smoothing=0.1, reduction="sum") / 8


def chances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In steps of its own, with a loss of the normaliser beside it."""
    logits = model(batch["ids"])
    kept = batch["next"].clamp(min=0)
    return -logits.log_softmax(-1).gather(-1, kept[..., None]).mean() + 1e-2 * logits.logsumexp(-1).square().mean()


def weighed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten(), weight=torch.linspace(0.5, 2, WORDS, dtype=torch.float64))


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "its own head": ({"tied": False, "bias": True}, mean),
    "tied": ({"tied": True, "padding": 3}, smooth),
    "tied and capped": ({"tied": True, "cap": 2.0}, mean),
    "by log_softmax": ({"tied": False}, chances),
    "classes weighed": ({"tied": True}, weighed),
}


def _batches() -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(3)
    batches = [{k: torch.randint(0, WORDS, (4, 6), generator=g) for k in ("ids", "next")} for _ in range(3)]
    batches[0]["next"][0, :3] = -100
    return batches


def _by_torch(model: nn.Module, loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in _batches():
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, {k: p.detach().clone() for k, p in model.named_parameters()}


@pytest.mark.parametrize("plan", ["tp2", "tp2,sp"])
def test_a_sharded_vocabulary_trains_as_torch(plan: str, tmp_path: Path) -> None:
    made = {}
    for name, (how, loss) in CASES.items():
        torch.manual_seed(0)
        model = Words(**how).double()
        made[name] = model, loss, *_by_torch(copy.deepcopy(model), loss)

    def job(rank: int) -> None:
        for name, (model, loss, losses, params) in made.items():
            step = parallelize(model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), _batches()[0], plan=plan)
            table = step.program.input_names["param.table.weight"]
            assert table.layout.local_shape({"dp": 0, "tp": rank})[0] == (19, 18)[rank], name
            assert not any(n.op.name == "all_gather" and WORDS in n.shape for n in step.program.nodes), name
            for batch, want in zip(_batches(), losses, strict=True):
                assert abs(float(step(batch)) - want) < 1e-12, name
            step.sync_model()
            for k, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), params[k], rtol=0, atol=1e-11, msg=f"{name}: {k}")

    run_ranks(2, job, tmp_path)
