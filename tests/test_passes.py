"""THE list of passes: what parallelize runs is what it made, and the command prints it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import weft
from weft.cli import app
from weft.passes import NAMES, PASSES, Draft, run
from weft.plan.spec import Spec

NET = """
import torch
from torch import nn


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()


def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)))
    return model, loss, {"x": torch.randn(8, 8)}
"""


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) ** 2).mean()


def test_every_pass_has_a_name_of_its_own_and_a_reason() -> None:
    assert len(set(NAMES)) == len(PASSES) >= 10 and all(len(p.why.split()) > 6 and not p.why.endswith(".") for p in PASSES)


@pytest.mark.parametrize("words", ["dp2,zero1", "tp2", "dp2,recompute", "pp2,micro4", "micro2"])
def test_the_command_prints_the_list(words: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    shown = CliRunner().invoke(app, ["show", f"{tmp_path / 'net.py'}:make", "--plan", words, "--passes"])
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()[1:]]
    assert [line[:15].strip() for line in shown.stdout.splitlines()[1:]] == NAMES
    text = CliRunner().invoke(app, ["show", f"{tmp_path / 'net.py'}:make", "--plan", words]).stdout
    programs = text.count("program ")
    assert programs == (1 if "pp" not in words and "micro" not in words else 2 * (2 if "pp" in words else 1) + 1), text[:500]
    assert rows


def test_the_list_without_a_model_says_what_each_is_for() -> None:
    shown = CliRunner().invoke(app, ["show", "--passes"]).stdout
    assert all(p.name in shown and p.why in shown for p in PASSES)


def test_what_runs_is_what_the_list_made() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    batch = {"x": torch.randn(4, 8, dtype=torch.float64)}
    optimizer = torch.optim.AdamW(model.parameters())
    captured = weft.capture(model, batch, loss, optimizer)
    step = weft.parallelize(model, loss, optimizer, batch, plan=Spec())
    assert run(Draft(captured, Spec())).program is not None
    assert step.program.text == run(Draft(captured, Spec())).program.text  # type: ignore[union-attr]
