"""What a page is shown of: plans for llama3-8b and for a model of one's own, a GPT trained on two processes, copies or stages, a Tree-LSTM."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import nn

from tests.ranks import run_ranks
from weft import dynamic
from weft.report import report

NAMES = ("llama3-8b-plan", "own-plan", "gpt-run", "pipeline-run", "tree-lstm-run")
EVERY = (*NAMES, "compare")  # two plans side by side too
OWN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=256, layers=6):
        super().__init__()
        self.words = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers))
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def make():
    return Net(), loss, {"x": torch.randint(0, 512, (16, 32)), "y": torch.randint(0, 512, (16, 32))}
"""


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name; made once, also where tests run in several processes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make(tmp_path_factory.mktemp("pages"))
    folder = tmp_path_factory.getbasetemp().parent / "pages"
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return {name: folder / f"{name}.html" for name in EVERY}
        making = tmp_path_factory.mktemp("making")
        make(making)
        making.rename(folder)
    return {name: folder / f"{name}.html" for name in EVERY}


def make(folder: Path) -> dict[str, Path]:
    llama().save(folder / "llama.json")
    (folder / "own.py").write_text(OWN)
    planned(f"{folder}/own.py:make", 2).save(folder / "own.json")
    for plan, where in (("dp2,zero1", "gpt"), ("pp2,micro4", "line")):
        (folder / where).mkdir()
        run_ranks(2, lambda rank, plan=plan, where=where: train_gpt(folder / where, plan), folder / where, seconds=300)
    train_trees(folder / "trees")
    sources = (folder / "llama.json", folder / "own.json", folder / "gpt", folder / "line", folder / "trees")
    explained = {"llama3-8b-plan"}  # to explain a captured plan is to search again
    made = {n: report(source, folder / f"{n}.html", n in explained, run_model=True)[0] for n, source in zip(NAMES, sources, strict=True)}
    for name, pins in (("zero3", {"zero": "3", "tp": "1"}), ("tp2", {"zero": "1", "tp": "2"})):
        llama(pins | {"pp": "1"}).save(folder / f"{name}.json")
    return made | {"compare": report(folder / "zero3.json", folder / "compare.html", other=folder / "tp2.json")[0]}


@cache
def planned(model: str, pp: int) -> Any:
    """The plan of four devices in so many stages of data parallel devices."""
    from weft.api.plan_program import plan_program
    from weft.cluster.spec import cluster
    from weft.plan.space import Limits

    return plan_program(model, cluster("2x2xV100"), 64, "fp16", Limits(pins={"pp": str(pp), "tp": "1", "zero": "0", "schedule": "1f1b"}))


def llama(pins: dict[str, str] = {"tp": "2", "pp": "2", "zero": "1", "schedule": "1f1b"}) -> Any:  # noqa: B006
    """Small enough to be explained in a second or two; pinned so that every axis has something to show."""
    from weft.plan.planner import Request, make_plan
    from weft.plan.space import Limits

    return make_plan(Request("llama3-8b", "8xA100", 32, 4096, "time", Limits(0, 0.0, pins)))


def train_gpt(folder: Path, plan: str) -> None:
    import weft_zoo as zoo
    from weft.api.parallelize import parallelize

    w = zoo.get("gpt2", device="cpu", layers=2, hidden=64, heads=2, vocab=128, seq=32, dropout=0.0)
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters()), w.example(8), plan=plan, record=str(folder))
    for i in range(8):
        step(w.example(8, seed=i))
    step.recorder.close()


class TreeLSTM(nn.Module):
    """Child-sum, as Tai and others wrote it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.word, self.below = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.forget = nn.Linear(hidden, hidden)

    def forward(self, v: dynamic.Vertex) -> None:
        x, h, c = v.pull("x", optional=True), v.gather("h"), v.gather("c")
        i, o, u = (self.word(x) + self.below(v.reduce(h, "sum"))).chunk(3, dim=1)
        c = torch.sigmoid(i) * torch.tanh(u) + v.reduce(torch.sigmoid(self.forget(h)) * c, "sum")
        h = torch.sigmoid(o) * torch.tanh(c)
        v.scatter(h=h, c=c)
        v.push(h=h)


def train_trees(folder: Path) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)

    def tree(leaves: int) -> Any:
        if leaves == 1:
            return rng.randrange(50)
        left = rng.randint(1, leaves - 1)
        return tree(left), tree(leaves - left)

    model, words = dynamic.Model(TreeLSTM(16, 32), states={"h": 32, "c": 32}), torch.randn(50, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = dynamic.Recorder(model, folder, name="Tree-LSTM")
    for _ in range(9):
        graphs = dynamic.trees([tree(rng.randint(4, 24)) for _ in range(16)])
        with run.step(graphs):
            optimizer.zero_grad()
            loss = (model(graphs, words).sum(1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            run.loss = float(loss.detach())
    run.close()
