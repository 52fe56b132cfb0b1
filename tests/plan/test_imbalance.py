"""Picks of experts that fall unevenly: an assumption of a plan that is stated, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft_zoo as zoo
from weft import passes
from weft.api.plan_program import as_built
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.cost.simulate import predict
from weft.frontend.capture import capture
from weft.passes import Draft
from weft.plan.plan import Plan, load
from weft.plan.planner import Request, make_plan, sized_stack
from weft.plan.price_configuration import price_configuration
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, simulate
from weft.plan.sizes import Shape
from weft.plan.space import Limits
from weft.plan.spec import Spec
from weft.plan.summaries import differences, plan_text

SHAPE = Shape(8, 1024, 16, 512, 512, gated=True, experts=8, chosen=2)
MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 2 --global-batch-size 64 --bf16 "
EXPERTS = "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"


def step(imbalance: float, ep: int = 8, ragged: bool = True) -> SimulatedStep:
    s = Setting.counted(64, 4, 8, ep=ep, zero=1, ragged_ep=ragged and ep > 1, imbalance=imbalance)
    s.check()
    return simulate(sized_stack(SHAPE, s.dtype).work(s), s, cluster("1x8xH100"))


@pytest.mark.parametrize("ragged", [False, True])
def test_the_busiest_rank_sets_the_pace(ragged: bool) -> None:
    """Up to a rank that all tokens pick once: with as many ranks as experts no rank gets two of a token's picks."""
    times, bytes_ = zip(*((s.seconds, s.peak_memory.total) for s in (step(i, ragged=ragged) for i in (1, 1.25, 2, 4, 8, 100))), strict=True)
    assert times[0] < times[1] < times[2] < times[3] == times[4] == times[5]
    assert bytes_[0] <= bytes_[1] <= bytes_[2] < bytes_[3] == bytes_[4] == bytes_[5]


def test_one_rank_has_all_picks_however_they_fall() -> None:
    assert step(3.0, ep=1).seconds == step(1.0, ep=1).seconds


def test_a_plan_says_what_it_assumed(tmp_path: Path) -> None:
    limits = Limits(pins={"ep": "8", "ragged_ep": "true"})
    even, uneven = (make_plan(Request("mixtral-8x7b", "8x8xH100", 1024, 4096, limits=limits, imbalance=i)) for i in (1.0, 1.5))
    assert isinstance(even, Plan) and isinstance(uneven, Plan)
    assert uneven.step_ms > even.step_ms
    assert "imbalance" in plan_text(even) and ("imbalance", "1.0", "1.5") in set(differences(even, uneven))
    uneven.save(path := tmp_path / "plan.json")
    assert load(str(path)).setting.imbalance == 1.5
    before = json.loads(path.read_text())
    del before["given"]["imbalance"]  # a file of an earlier version
    path.write_text(json.dumps(before))
    assert load(str(path)).setting.imbalance == 1.0


def test_the_price_of_a_configuration_says_so_too() -> None:
    even, uneven = (price_configuration(MEGATRON + EXPERTS, "1x8xH100", better=False, imbalance=i) for i in (1.0, 1.5))
    assert even.read.assumed["imbalance"].startswith("1 (picks of the busiest rank") and uneven.read.assumed["imbalance"].startswith("1.5 ")
    assert uneven.figures["step_ms"] > even.figures["step_ms"]
    assert "imbalance" not in price_configuration(MEGATRON, "1x8xH100", better=False).read.assumed


@pytest.mark.parametrize("words", ["ep2", "ep2,ragged-ep"])
def test_programs_are_priced_so_and_run_as_they_were(words: str) -> None:
    w, place = zoo.small("mixtral-8x7b"), cluster("1x2xx86-2")
    captured = capture(w.model, w.example(8), w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2))
    placed = passes.run(Draft(captured, Spec.parse(words)), until="place").program
    assert placed is not None
    even, uneven = (as_built(Spec.parse(words), placed, i) for i in (1.0, 2.0))
    assert predict(uneven, place).step_ms > predict(even, place).step_ms
    assert all(n.attr("imbalance") is None for n in even.nodes)


@pytest.mark.parametrize("value", [0.5, -1.0, float("nan"), float("inf")])
def test_what_is_no_imbalance_is_refused(value: float) -> None:
    with pytest.raises(PlanError, match="imbalance is") as caught:
        replace(Setting(), imbalance=value).check()
    assert "1 (even) to" in str(caught.value)
    with pytest.raises(PlanError, match="imbalance is"):
        make_plan(Request("mixtral-8x7b", "1x8xH100", imbalance=value))


def test_the_command_takes_it() -> None:
    run = [sys.executable, "-m", "weft", "simulate", "mixtral-8x7b", "--cluster", "1x8xH100", "--plan", "ep8", "--json"]
    even, uneven = (json.loads(subprocess.run([*run, *more], capture_output=True, text=True, check=True).stdout) for more in ([], ["--imbalance", "2"]))
    assert uneven["step_ms"] > even["step_ms"]
