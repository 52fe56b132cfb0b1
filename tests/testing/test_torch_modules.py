"""Random torch modules: their text, their judge, and that a fault is found and shrunk to a script that shows it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.testing.plant import Facet, plant
from weft.cli import app
from weft.core.errors import WeftError
from weft.core.node import OPS
from weft.testing.torch_grammar import Module, Statement, Var, random_module
from weft.testing.torch_modules import Case, Tally, check_module, draw, fuzz, random_case, run_script, script, shrunk

SEED = 6


def test_the_same_name_draws_the_same_module() -> None:
    assert random_case("a") == random_case("a")
    assert random_case("a") != random_case("b")


def test_modules_are_of_many_kinds() -> None:
    text = "".join(random_module(random.Random(k)).source() for k in range(400))
    for word in ("conv2d", "attention", "LSTM", "embedding", "einsum", "cross_entropy", "softmax", "BatchNorm", ".add_(", "permute", "gather"):
        assert word in text, word


def test_some_modules_are_equal() -> None:
    tally = fuzz(30, SEED)
    assert tally.mismatches == 0, "\n".join(tally.scripts)
    assert tally.counts["equal"] >= 24 and tally.plans >= 3 * 24


def test_what_nobody_needs_is_left_out() -> None:
    v, w, t = Var("v0", (2,)), Var("v1", (2,)), Var("v2", (2,))
    lines = (
        Statement(v, "v0 = x0 * self.p0", ("x0", "self.p0")), Statement(w, "v1 = v0 + self.p1", ("v0", "self.p1")),
        Statement(t, "v2 = v0 * 1.0", ("v0",)), Statement(t, "v2.add_(1.0)", ("v2",)),
    )  # fmt: skip
    module = Module((("p0", "a"), ("p1", "b")), (("x0", "c"),), lines, (Statement(Var("loss0", ()), "loss0 = v2.sum()", ("v2",)),)).needed()
    assert [line.text for line in module.lines] == ["v0 = x0 * self.p0", "v2 = v0 * 1.0", "v2.add_(1.0)"]
    assert module.attributes == (("p0", "a"),)


def wrong_tanh() -> Facet:
    """A tanh that is off by a hundred thousandth."""
    run = OPS["tanh"].run
    return Facet("tanh", "run", lambda x: run(x) * (1 + 1e-5))


def faulty() -> Case:
    module = Module(
        (("p0", "nn.Parameter(draw((4,), 'normal', 1))"), ("p1", "nn.Parameter(draw((4,), 'normal', 2))")), (("x0", "draw((4, 4), 'normal', 3)"),),
        (
            Statement(Var("v0", (4, 4)), "v0 = x0 * self.p0", ("x0", "self.p0")), Statement(Var("v1", (4, 4)), "v1 = torch.sin(v0)", ("v0",)),
            Statement(Var("v2", (4, 4)), "v2 = torch.tanh(v1)", ("v1",)), Statement(Var("v3", (4, 4)), "v3 = v2 * self.p1", ("v2", "self.p1")),
        ),
        (Statement(Var("loss0", ()), "loss0 = v3.sum()", ("v3",)), Statement(Var("loss1", ()), "loss1 = v0.mean()", ("v0",))),
    )  # fmt: skip
    return Case(module, "SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1)", ("dp2",))


def test_a_fault_is_found_and_shrunk(tmp_path: Path) -> None:
    with plant(wrong_tanh()):
        found = check_module(faulty())
        assert (found.status, found.plan) == ("wrong", "interpreter") and found.words.startswith("loss")
        small, again = shrunk(faulty(), found)
        assert again.status == "wrong"
        assert "tanh" in small.module.source() and "sin(" not in small.module.source() and len(small.module.losses) == 1
        assert small.optimizer == "SGD(params, lr=1.0)" and small.plans == ()
    assert check_module(faulty()).status == "equal"
    file = tmp_path / "script.py"
    file.write_text(script(small, again, "a planted fault"))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr  # the fault is gone
    assert "# a planted fault: wrong under interpreter" in file.read_text()


def test_a_script_raises_where_weft_is_wrong() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = torch.nn.Parameter(draw((4,), "normal", 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.p * x).sum()

    with plant(wrong_tanh()), pytest.raises(WeftError, match="wrong under interpreter"):
        run_script(Model, lambda: {"x": draw((4, 4), "normal", 3)}, "SGD(params, lr=1.0)", ("dp2",))


def test_what_rounding_alone_decides_is_no_fault() -> None:
    """Equal thirds, summed in another order, stand on either side of their mean."""
    apart = "v0 * 3.0 - v0 - v0 - v0"
    lines = (
        Statement(Var("v0", (4,)), "v0 = torch.softmax(self.p0 * 0.0, 0) / 3.0", ("self.p0",)),
        Statement(Var("v1", (4,)), f"v1 = torch.relu({apart}) + self.p0", ("v0", "self.p0")),
    )
    loss = Statement(Var("loss0", ()), f"loss0 = torch.sign({apart}).sum() + v1.sum()", ("v0", "v1"))
    case = Case(Module((("p0", "nn.Parameter(draw((4,), 'normal', 1))"),), (), lines, (loss,)), "SGD(params, lr=1.0)", ())
    assert check_module(case).status in ("equal", "unstable")


def test_the_command_tells_one_object_and_ends_with_1() -> None:
    done = CliRunner().invoke(app, ["fuzz", "--torch", "--programs", "2", "--seed", "6", "--json"])
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and {k: told[k] for k in ("programs", "wrong", "crash", "seed")} == {"programs": 2, "wrong": 0, "crash": 0, "seed": 6}
    assert told["equal"] + told["refused"] + told["unstable"] == 2
    tally = Tally(0)
    tally.counts["wrong"] = 1
    assert tally.mismatches == 1
