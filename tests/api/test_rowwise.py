"""Tables updated by the rows a batch looked up: training equals torch's with whole gradients, in one process and where tables are cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft_zoo as zoo
from bench._graph.planner import record
from bench._graph.search import ALL, Candidate
from bench._graph.task import CapturedTask
from bench._graph.timing import PlacedProgram
from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.cluster.spec import cluster
from weft.core.layout import Mesh, S
from weft.plan.layouts import OnCluster, choose
from weft.plan.rewritten import as_run
from weft.plan.space import Limits
from weft.rewrite.updates import rules_of

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
def test_copies_exchange_rows_and_equal_torch(tmp_path: Path) -> None:
    """A batch of one sample leaves the second copy without any. Where a slice is updated and then handed out, its gradient is a tensor."""
    want = {size: by_torch(OPTIMIZERS["adamw"], size) for size in (6, 1)}

    def job(rank: int) -> None:
        for plan, size in (("dp2", 6), ("dp2,zero1", 6), ("dp2,zero3", 6), ("dp2", 1)):
            found, code = by_weft(OPTIMIZERS["adamw"], plan, size=size)
            torch.testing.assert_close(found, want[size], rtol=1e-12, atol=1e-12, msg=lambda m, plan=plan: f"{plan}: {m}")
            assert code.count("by_rows.update_") == (0 if plan == "dp2,zero1" else 2)

    on_ranks(2, job, tmp_path)


@pytest.mark.timeout(120)
def test_a_plan_file_is_run_by_rows(tmp_path: Path) -> None:
    """The file has the step with whole gradients; they are never made."""
    changes = {"tables": (400, 300), "width": 4, "bag": 2, "dense": 5, "bottom": (8, 4), "top": (8, 1)}
    task = CapturedTask("dlrm", cluster("2xx86-2"), 8, "fp32", "adam", tuple(changes.items()))
    mesh = Mesh(dp=2)
    pins = {n: [{"dp": S(1)}] for n in task.captured().program.input_names if "tables" in n}
    made = choose(as_run(task.captured().program, 1), mesh, OnCluster(task.cluster, mesh), pins=pins, work=1e7)
    placed = PlacedProgram(as_run(made.program, 1), task.cluster, made.again)
    assert rules_of(placed.program) == ("adam_by_rows",)
    plan = record(task, Limits(), Candidate("weft", placed, ALL, 1, 1e-3, 1e6, None, rules_of(placed.program)), {}, {}, "time")
    assert "adam_at" not in plan.layouts["program"]
    plan.save(tmp_path / "plan.json")

    def losses(plan: str) -> tuple[list[float], str]:
        torch.manual_seed(0)
        work = zoo.load("dlrm", device="cpu", **changes)
        step = parallelize(work.model, work.loss, torch.optim.AdamW(work.model.parameters(), lr=0.1), work.example(8), plan=plan)
        return [float(step(work.example(8, seed=k))) for k in range(STEPS)], step.compiled.code.text

    want, _ = losses("dp1")

    def job(rank: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, code = losses(str(tmp_path / "plan.json"))
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        assert code.count("by_rows.update_") == 2

    on_ranks(2, job, tmp_path)


def test_a_small_table_has_a_whole_gradient() -> None:
    """Where a batch looks up as many rows as there are, nothing is gained."""
    _, code = by_weft(OPTIMIZERS["adamw"], "dp1", size=ROWS)
    assert "by_rows.update_" not in code


def test_a_gradient_that_is_clipped_is_whole() -> None:
    model = Tables()
    step = parallelize(model, loss, torch.optim.AdamW(model.parameters()), batch(0), plan="dp1", clip=1.0)
    assert "by_rows.update_" not in step.compiled.code.text
