"""Configurations of other systems, priced by the simulator of plans: what they take, what was assumed, what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weft.cli import app
from weft.core.errors import PlanError
from weft.plan.price_configuration import price_configuration as price

TOML = """
[job]
description = "x"
[training]
local_batch_size = 1
seq_len = 1024
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
SIZES = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257"


def call(*words: str) -> dict:
    result = CliRunner().invoke(app, ["price", *words, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_a_configuration_takes_what_simulate_says(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TOML)
    found = call(str(tmp_path / "titan.toml"), "--model", "gpt2", "--cluster", "1x4xA100")
    words = ["gpt2", "--cluster", "1x4xA100", "--tp", "2", "--zero", "3", "--recompute", "full", "--sequence-parallel", "--batch", "2"]
    told = json.loads(CliRunner().invoke(app, ["simulate", *words, "--json"]).stdout.splitlines()[-1])
    assert found["form"] == "torchtitan" and found["fits"] and found["step_ms"] == pytest.approx(told["step_ms"], rel=1e-9)
    assert found["memory_gb"] == pytest.approx(told["memory_gb"]) and found["step_ms_low"] < found["step_ms"] < found["step_ms_high"]
    assert found["unused"] == ["job.description"] and found["assumed"]["training.global_batch_size"] == "-1"


def test_what_would_be_better_and_the_keys_that_lead_there(tmp_path: Path) -> None:
    (tmp_path / "titan.toml").write_text(TOML)
    better = call(str(tmp_path / "titan.toml"), "--model", "gpt2", "--cluster", "1x4xA100")["better"]
    assert better["gain"] > 1.06 and "activation_checkpoint" in {c["key"] for c in better["changes"]}


def test_arguments_of_megatron_say_their_model() -> None:
    found = price(f"{SIZES} --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16 --bf16 --weird-one 3", "1x4xA100", better=False)
    assert found.read.setting.dp == 2 and found.read.unused == ("weird-one",) and found.figures["step_ms"] > 0
    named = price("--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 16 --bf16", "1x4xA100", "gpt2", better=False)
    assert named.figures["step_ms"] == pytest.approx(found.figures["step_ms"], rel=1e-9)


def test_what_does_not_fit_is_said_and_one_that_does_is_found() -> None:
    found = price('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}', "1x8xH100", "llama3-8b")
    assert not found.fits and found.better is not None and found.better["memory_gb"] <= 85.0


@pytest.mark.parametrize(
    ("text", "model", "says"),
    [
        ('{"train_batch_size": 8}', "", "does not say the model"), ("--micro-batch-size 1 --tensor-model-parallel-size 3", "gpt2", "do not fill the cluster"),
        ("distributed_type: FSDP\nnum_processes: 16\n", "gpt2", "does not fill the cluster"),
        ("--micro-batch-size 1 --global-batch-size 8", "resnet50", r"resnet50 is not priced by its sizes(.|\n)*weft plan, which captures any model"),
    ],
)  # fmt: skip
def test_refusals(text: str, model: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        price(text, "1x8xA100", model, better=False)
