"""The time that `weft plan` prints is what the simulator says of the programs that `parallelize` builds from the plan's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.api.ranks import on_ranks
from weft.api.parallelize import parallelize
from weft.api.pipeline_plans import staged
from weft.api.pool import with_doubles
from weft.cli import app
from weft.cluster.spec import cluster
from weft.cost.simulate import predict
from weft.plan.plan import load

WHERE = "2xx86-2"
MODELS = '''
import torch
from torch import nn
from torch.nn import functional as F

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.EmbeddingBag(4096, 32, mode="sum"), nn.Linear(32, 16)
    def forward(self, x):
        return self.out(self.rows(x))

class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 16)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(32, 64), nn.Linear(32, 48), nn.Linear(112, 16)
    def forward(self, x):
        return self.out(torch.cat([torch.relu(self.left(x)), torch.tanh(self.right(x))], -1))

def square(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])

def perceptron():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 16)), square, {"x": torch.rand(8, 32), "y": torch.rand(8, 16)}
def table():
    return Table(), square, {"x": torch.randint(4096, (8, 4)), "y": torch.rand(8, 16)}
def pictures():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(576, 16))
    return model, square, {"x": torch.rand(8, 3, 8, 8), "y": torch.rand(8, 16)}
def attend():
    return Attend(), square, {"x": torch.rand(8, 6, 32), "y": torch.rand(8, 6, 16)}
def towers():
    return Towers(), square, {"x": torch.rand(8, 32), "y": torch.rand(8, 16)}
'''
STACKS = '''
import torch
from weft.frontend.catalog import get

def small(name, **sizes):
    made = get(name, device=str(torch.empty(0).device), dtype=torch.float32, layers=3, hidden=32, heads=4, **sizes)
    batch = {k: torch.randint(f.high, f.shape) if f.high else torch.rand(f.shape) for k, f in made.fields(8).items()}
    return made.model, made.loss, batch

def llama():
    return small("llama3-8b", kv_heads=2, vocab=64, ffn=64, seq=16)
def gpt():
    return small("gpt2", vocab=64, seq=16, dropout=0.1)
def vit():
    return small("vit-b16", image=32, patch=16, classes=10)
def bert():
    return small("bert-base", vocab=64, seq=16)
def mixtral():
    return small("mixtral-8x7b", kv_heads=2, vocab=64, ffn=64, seq=16, experts=4, chosen=2)
'''
PINS = ("dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,micro_batches=4", "pp=2,schedule=gpipe", "")


def printed(source: str, pins: str, out: Path) -> float | None:
    """The milliseconds that the command prints of the plan it saves; None where there is no such plan."""
    fixed = [word for pin in pins.split(",") if pin for word in ("--pin", pin)]
    result = CliRunner().invoke(app, ["plan", source, "--cluster", WHERE, "--batch", "16", "--json", "--out", str(out), *fixed])
    said = json.loads(result.stdout.splitlines()[-1]) if result.exit_code == 0 else {}
    return said.get("step_ms")


def simulated(step: Any) -> float:
    """What the simulator says of the programs that a step has."""
    where = with_doubles(cluster(WHERE))
    if step.micro_batches is not None:
        return staged(step.micro_batches.pipeline, step.plan, where).seen.step_ms
    return predict(step.program, where).step_ms


@pytest.mark.parametrize("name", ["perceptron", "table", "pictures", "attend", "towers"])
def test_a_plan_takes_what_its_step_is_predicted_to(name: str, tmp_path: Path) -> None:
    as_predicted(MODELS, name, PINS, tmp_path)


STACK_PINS = (*PINS[:5], "dp=2,zero=0,recompute=full", "dp=2,zero=1,micro_batches=2", "pp=2,micro_batches=4,recompute=full")


OF_STACKS = {"llama": STACK_PINS, "gpt": STACK_PINS[::2], "vit": STACK_PINS[1::2], "bert": STACK_PINS[3:6], "mixtral": ("ep=2", "cp=2")}


@pytest.mark.parametrize(("name", "pins"), OF_STACKS.items())
def test_so_does_one_of_a_stack_of_blocks(name: str, pins: tuple[str, ...], tmp_path: Path) -> None:
    as_predicted(STACKS, name, pins, tmp_path)


def as_predicted(source: str, name: str, every: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(source)
    files = {pins: tmp_path / f"plan{k}.json" for k, pins in enumerate(every)}
    said = {pins: printed(f"{tmp_path}/own.py:{name}", pins, out) for pins, out in files.items()}
    plans = {pins: ms for pins, ms in said.items() if ms is not None}
    assert len(plans) >= len(every) - 1, said

    def job(rank: int) -> None:
        scope: dict[str, Any] = {}
        exec(source, scope)
        for pins, ms in plans.items():
            for plan in (files[pins], *([str(load(files[pins]).spec)] if pins.startswith("pp") else [])):  # pipelines also by the words of the plan
                model, loss, batch = scope[name]()
                example = {k: torch.cat([x, x]) for k, x in batch.items()}
                step = parallelize(model, loss, torch.optim.AdamW(model.parameters()), example, plan=plan, precision=torch.bfloat16, check=False)
                assert simulated(step) == pytest.approx(ms, rel=1e-3), (pins, plan)

    on_ranks(2, job, tmp_path, 240)
