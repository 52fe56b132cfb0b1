"""`weft bench wild`: its judge is torch run by itself, every kind of miss is told, and rows are not run twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from bench import wild
from bench._wild.judge import Run, judged, miss, told_nothing
from bench._wild.processes import failure
from bench._wild.tools import cross_entropy, mlp, reals, squares, vectors
from weft.cli import app
from weft.core.errors import CaptureError, RuntimeFault, UnknownName

FILE = """
import os
import time
from bench._wild.tools import cross_entropy, mlp, vectors

JUDGE = []  # the process that asks torch; ranks are forked from it

def foreign():
    return os.getpid() not in JUDGE

def case(loss):
    def make():
        JUDGE[:] = JUDGE or [os.getpid()]
        return mlp(), loss, vectors()
    return make

def bug(model, batch):
    return cross_entropy(model, batch) if not foreign() else {}["a bug"]

def dies(model, batch):
    return cross_entropy(model, batch) if not foreign() else os.kill(os.getpid(), 9)

def hangs(model, batch):
    time.sleep(60 if foreign() else 0)
    return cross_entropy(model, batch)

def moved(model, batch):
    return cross_entropy(model, batch) * (1 + 1e-6 * foreign())

CASES = {f.__name__: case(f) for f in (cross_entropy, bug, dies, hangs, moved)} | {"torch_fails": lambda: 1 // 0}
"""


def test_every_kind_of_miss_is_told_and_rows_are_kept(tmp_path: Path) -> None:
    file, kept = tmp_path / "some_cases.py", tmp_path / "rows.jsonl"
    file.write_text(FILE)
    args = ["bench", "wild", "--cases", str(file), "--plans", "dp1", "--timeout", "10", "--jobs", "6", "--json", "--resume", str(kept)]
    result = CliRunner().invoke(app, args)
    told = json.loads(result.stdout.splitlines()[-1])
    rows = {row["case"]: row for row in told["rows"]}
    assert result.exit_code == 1 and told["cases"] == 6 and told["torch"] == ["torch_fails"]
    assert told["counts"] == {"dp1": {"ok": 1, "refused": 0, "wrong": 1, "crash": 2, "timeout": 1}}, told
    assert rows["bug"]["error"].startswith("KeyError: 'a bug'") and rows["dies"]["error"].startswith("rank 0 ended with SIGKILL")
    assert rows["moved"]["error"].startswith("loss of step 0: torch") and "ZeroDivisionError" in rows["torch_fails"]["error"]
    again = CliRunner().invoke(app, [*args, "--only", "cross|bug"])
    assert {row["case"] for row in json.loads(again.stdout.splitlines()[-1])["rows"]} == {"cross_entropy", "bug"}
    assert len(kept.read_text().splitlines()) == 6


def test_a_file_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="found   no such file"):
        wild.load(tmp_path / "none.py")
    (tmp_path / "empty.py").write_text("CASES = 3")
    with pytest.raises(UnknownName, match="found   CASES = 3"):
        wild.load(tmp_path / "empty.py")


def test_plans_are_joined_by_commas_or_semicolons() -> None:
    assert wild.plans_of('dp1,"dp2,tp2",auto') == ["dp1", "dp2,tp2", "auto"]
    assert wild.plans_of("dp1,dp2,zero3,tp2") == ["dp1", "dp2,zero3", "tp2"]
    assert wild.plans_of(";".join(wild.PLANS)) == wild.PLANS


def test_the_judge_works_in_float64_and_sees_the_ninth_digit() -> None:
    truth = judged(lambda: (mlp(), cross_entropy, vectors()))
    assert truth.double and not truth.note and truth.rounding < 1e-15
    assert miss(truth, truth.run) is None
    later = [*truth.run.losses[:4], truth.run.losses[4] * (1 + 1e-8)]
    assert "loss of step 4" in str(miss(truth, Run(later, truth.run.state)))
    state = truth.run.state | {"parameter 0.weight": truth.run.state["parameter 0.weight"] + 1e-8}
    assert "parameter 0.weight: differs by 1e-08" in str(miss(truth, Run(truth.run.losses, state)))
    assert miss(truth, Run(truth.run.losses[:2], {})) is None  # refused midway: what was done is compared


def test_buffers_of_every_dtype_are_compared() -> None:
    def make() -> tuple[object, ...]:
        model = mlp()
        for name, value in {
            "flags": torch.tensor([True, False]),
            "count": torch.tensor(3),
            "turn": torch.tensor(1j),
            "none": torch.zeros(0),
        }.items():
            model.register_buffer(name, value)
        return model, cross_entropy, vectors()

    truth = judged(make)
    assert miss(truth, truth.run) is None
    for name, value in {"flags": torch.tensor([True, True]), "count": torch.tensor(4), "turn": torch.tensor(1j + 1e-6)}.items():
        other = truth.run.state | {f"buffer {name}": value.to(truth.run.state[f"buffer {name}"].dtype)}
        assert f"buffer {name}: differs" in str(miss(truth, Run(truth.run.losses, other)))


def test_a_model_that_rounds_itself_is_judged_by_what_rounding_does() -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).float()

    truth = judged(lambda: (Rounds(), cross_entropy, vectors()))
    assert truth.double and truth.note == "the model rounds to 1e-07 itself"
    near = Run([x * (1 + 1e-7) for x in truth.run.losses], truth.run.state)
    far = Run([x * (1 + 1e-5) for x in truth.run.losses], truth.run.state)
    assert miss(truth, near) is None and "loss of step 0" in str(miss(truth, far))


def test_a_model_that_torch_takes_in_float32_only_or_below() -> None:
    weight = reals(0, 4, 8)
    only = judged(lambda: (mlp(), lambda m, b: cross_entropy(m, b) + (b["x"] @ weight.T).mean(), vectors()))
    assert not only.double and only.note.startswith("in float32: torch in float64 says RuntimeError")
    below = judged(lambda: (mlp().bfloat16(), lambda m, b: m(b["x"].bfloat16()).float().square().mean(), vectors()))
    assert not below.double and below.rounding == torch.finfo(torch.bfloat16).eps


def test_what_torch_draws_is_not_compared() -> None:
    truth = judged(lambda: (nn.Sequential(mlp(), nn.Dropout(0.5)), squares, vectors()))
    assert truth.random and "draws" in told_nothing(truth)
    still = judged(lambda: (mlp(), lambda m, b: squares(m, b) if torch.rand(()) >= 0 else None, vectors()))
    assert not still.random


def test_optimizers_come_as_they_are_or_as_what_makes_them() -> None:
    made = [torch.optim.SGD, lambda m: torch.optim.SGD(m.parameters(), lr=1e-3), lambda ps: torch.optim.SGD(ps, lr=1e-3)]
    runs = [judged(lambda f=f: (mlp(), squares, vectors(), f)).run for f in made]
    assert all(run.losses == runs[0].losses for run in runs)

    def scheduled(step_size: int) -> list[float]:
        def optimizer(m: nn.Module) -> tuple[torch.optim.Optimizer, object]:
            one = torch.optim.SGD(m.parameters(), lr=0.1)
            return one, torch.optim.lr_scheduler.StepLR(one, step_size)

        return judged(lambda: (mlp(), squares, vectors(), optimizer)).run.losses

    assert scheduled(1)[:2] == scheduled(2)[:2] and scheduled(1)[2] != scheduled(2)[2]


def test_ranks_that_hang_or_die_are_no_refusal() -> None:
    refused = failure(CaptureError("no such op", found="aten.odd"))
    assert refused["status"] == "refused" and refused["words"] == "CaptureError: no such op (found: aten.odd)"
    assert failure(RuntimeFault("rank 0 did not reach step"))["status"] == "timeout"
    assert failure(RuntimeFault("rank 1 died before sum"))["status"] == "crash"
    assert failure(RuntimeFault("batch 'x' on rank 0"))["status"] == "refused"
