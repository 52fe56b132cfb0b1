"""Layouts of single tensors: read, refused by name, priced, and a user's own plan beside the planner's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from weft.cli import app
from weft.core.errors import PlanError
from weft.core.layout import R, S
from weft.frontend.source import load
from weft.plan.pins import Pin, dtensor_pins, is_layout, parse_pin, resolve
from weft.plan.plan import Plan
from weft.plan.planner import Infeasible, Request
from weft.plan.tensors import plan_pinned, with_baseline

REQUEST = Request("gpt2", "1x2xA100", batch=8)
SHAPES = {"param.blocks.0.mlp.up.weight": (64, 16), "param.blocks.1.mlp.up.weight": (64, 16), "param.tokens.weight": (10, 16)}


def test_a_pin_is_read() -> None:
    assert parse_pin("blocks.*.mlp.up=tp:S(1),dp:R") == Pin("blocks.*.mlp.up", (("tp", S(1)), ("dp", R)))
    assert is_layout("a=tp:S(1)") and not is_layout("tp=4")
    held = resolve([parse_pin("blocks.*.mlp.up=tp:S(0)")], SHAPES, {"tp": 2})
    assert held == {n: {"tp": S(0)} for n in list(SHAPES)[:2]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("blocks.*.mlp.up=tp:T(1)", "cannot pin"),
        ("blocks.*.mlp.upp=tp:S(0)", "no parameter is named"),
        ("tokens=tp:S(0)", "tokens.weight cannot have the layout .*\n\n +needed +dim 0 to divide by 4"),
        ("tokens=tp:S(2)", "a dim below 2"),
        ("tokens=cp:S(0)", "an axis of tp"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        resolve([parse_pin(text)], SHAPES, {"tp": 4})


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return load("gpt2", device="meta", layers=2).model


def test_the_plans_own_cut_is_free_and_another_costs(model: nn.Module) -> None:
    names = [n for n, _ in model.named_parameters()]
    up = next(n for n in names if n.endswith("mlp.up.weight")).replace("blocks.0", "blocks.*")
    made = plan_pinned(REQUEST, [parse_pin(f"{up}=tp:S(0)")])
    assert isinstance(made, Plan) and made.setting.tp == 2 and made.predicted["layouts_ms"] == 0.0
    other = plan_pinned(REQUEST, [parse_pin(f"{up}=tp:S(1)")])
    assert isinstance(other, Plan) and other.predicted["layouts_ms"] > 0 and other.step_ms > made.step_ms
    assert other.setting.pins == (f"{up}=tp:S(1)",)
    assert other.infeasible["zero3"] == f"no degree of tp above 1, which {up}=tp:S(1) needs"


def test_infeasible_says_without_which_pin(model: nn.Module) -> None:
    names = [n for n, _ in model.named_parameters()]
    up = next(n for n in names if n.endswith("mlp.up.weight"))
    made = plan_pinned(REQUEST, [parse_pin(f"{up}=tp:S(7)")])
    assert isinstance(made, Infeasible) and "a dim below 2" in made.reason and f'without --pin "{up}=tp:S(7)"' in made.change
    with pytest.raises(PlanError, match="cannot pin a layout along dp"):
        plan_pinned(REQUEST, [parse_pin(f"{up}=dp:S(0)")])


def test_a_users_plan_is_a_baseline(model: nn.Module) -> None:
    good = {
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
    }
    modules = {n for n, _ in model.named_modules()}
    mine = {k: v for k, v in good.items() if k.replace("*", "0") in modules}
    from weft.plan.planner import make_plan

    free = make_plan(REQUEST)
    assert isinstance(free, Plan) and mine
    made = with_baseline(free, REQUEST, "dtensor", mine)
    assert made.baselines_ms["dtensor"] >= made.step_ms
    with pytest.raises(PlanError, match="the plan names no module"):
        dtensor_pins(model, {"nowhere": "colwise"})
    with pytest.raises(PlanError, match="cannot read the plan of"):
        dtensor_pins(model, {next(iter(mine)): "diagonal"})


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("[1]")
    call = ["plan", "gpt2", "--cluster", "1x2xA100", "--batch", "8"]
    bad = CliRunner().invoke(app, [*call, "--dtensor", str(tmp_path / "mine.json")])
    assert bad.exit_code == 1 and "cannot read the plan" in bad.output
    none = CliRunner().invoke(app, [*call, "--pin", "nothing=tp:S(0)", "--json"])
    assert none.exit_code == 2 and "no parameter is named" in json.loads(none.stdout.strip().splitlines()[-1])["infeasible"]["weft"]
    assert "no noise scale" in CliRunner().invoke(app, [*call, "--objective", "goodput"]).output
