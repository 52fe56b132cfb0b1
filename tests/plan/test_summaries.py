"""Plans in words: what stands in the table is what the plan does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from weft.plan import summaries as words
from weft.plan.plan import Plan, parse
from weft.plan.planner import Request, make_plan
from weft.plan.setting import Setting
from weft.plan.summaries import differences, rows


@pytest.fixture(scope="module")
def plan() -> Plan:
    made = make_plan(Request("gpt2", "1x4xA100", batch=32))
    assert isinstance(made, Plan)
    return made


def told(plan: Plan) -> dict[str, tuple[str, str]]:
    return {name: (value, means) for name, value, means in rows(plan)}


def staged(plan: Plan) -> Plan:
    """Four layers cut in the middle of one, the first run again in part."""
    stages = (
        (("first", "none", 1), ("layer", "activation", 1), ("layer", "none", 1), ("attention", "none", 1)),
        (("ffn", "full", 1), ("layer", "full", 1), ("last", "none", 1)),
    )
    setting = Setting.counted(global_batch=8, pp=2, recompute="mixed", schedule="zero-bubble")
    return replace(plan, setting=replace(setting, stages=stages))


def test_half_layers_count(plan: Plan) -> None:
    made = told(staged(plan))
    assert made["layers"] == ("2.5 1.5", "of each stage; half a layer is attention or MLP")
    assert made["recompute"] == ("mixed", "the full layer in 1.5 layers, the MLP's activation in 1 layer, nothing in 1.5 layers")
    assert made["sharded"] == ("nothing", "one replica")
    whole = replace(plan, setting=Setting.counted(global_batch=8, pp=2).with_layers((7, 5)))
    assert told(whole)["layers"] == ("7 5", "of each stage") and told(whole)["recompute"] == ("none", "all activations kept")


def test_one_is_one(plan: Plan) -> None:
    setting = Setting.counted(global_batch=4, dp=4, zero=1)
    once = told(replace(plan, setting=setting))
    assert once["micro-batch"] == ("1", "samples per device at a time, 1 micro-batch per step, global batch 4")
    assert once["sharded"] == ("zero1", "optimizer state sharded over replicas")
    assert told(replace(plan, setting=replace(setting, shares=(("A100", 1, 2, 1),))))["share"] == ("A100", "1 replica takes 1 micro-batch of 2")
    assert told(replace(plan, setting=replace(setting, shares=(("A100", 3, 2, 4),))))["share"] == ("A100", "3 replicas take 4 micro-batches of 2 each")


PROGRAM = """program m(dp=4, tp=2)
  %param.w = input()    f32[8, 8] dp:R tp:S(1)
  %param.b = input()    f32[8] dp:R tp:R
  %batch.x = input()    f32[64, 8] dp:{dp} tp:R
  %0 = matmul(%batch.x, %param.w)    f32[64, 8] dp:{dp} tp:S(1)
  return out=%0
"""


def captured(plan: Plan, dp: str) -> Plan:
    inputs = {"param.w": {"tp": "S(1)"}, **({"batch.x": {"dp": dp}} if dp != "R" else {})}
    layouts = {"mesh": {"dp": 4, "tp": 2}, "inputs": inputs, "rules": [], "micro_batches": 2, "program": PROGRAM.format(dp=dp)}
    return replace(plan, setting=Setting.counted(global_batch=64, micro_batch=8, dp=4, tp=2), layouts=layouts)


def test_axes_of_a_program_say_what_they_cut(plan: Plan) -> None:
    """Devices that all do the same work are no copies of the model, and a batch that is not cut is taken whole."""
    made = told(captured(plan, "R"))
    assert made["dp"] == ("4", "replicated: more devices do not make this batch faster")
    assert made["tp"] == ("2", "1 of 2 parameters sharded")
    assert made["micro-batch"][0] == "32" and "tensor" not in made and "sharded" not in made
    cut = told(captured(plan, "S(0)"))
    assert cut["dp"] == ("4", "data-parallel replicas") and cut["micro-batch"][0] == "8"


def test_differences_of_stages_and_of_what_is_held(plan: Plan) -> None:
    found = {name: (a, b) for name, a, b in differences(plan, staged(plan))}
    assert found["layers"] == ("all on one stage", "2.5 1.5") and found["recompute by layer"][1].startswith("the full layer in 1.5")
    found = {name: (a, b) for name, a, b in differences(captured(plan, "R"), captured(plan, "S(0)"))}
    assert found == {"batch.x": ("replicated", "dp:S(0)")}
    assert not list(differences(plan, plan))
    other = parse(json.dumps({**plan.data(), "spec": {**plan.data()["spec"], "pp": 2, "micro": 8, "virtual": 2, "schedule": "interleaved"}}))
    assert ("virtual", "1", "2") in list(differences(plan, other))


def test_an_odd_vocabulary_is_no_reason_to_share_products_and_padding_it_is_offered(plan: Plan) -> None:
    """50257 is odd; 50257 // 2 is divided by eight, but no device holds half a row less."""
    assert plan.setting.tp == 1
    (advice, ms), = plan.predicted["padded_ms"].items()
    assert advice.startswith("pad the vocabulary 50257 -> 50304, with dp4")
    assert ms < 0.95 * plan.step_ms
    assert f"tip: {advice}: {ms:,.1f} ms" in words.plan_text(plan)
    assert "padded_ms" not in make_plan(Request("llama3-1b", "1x4xA100", batch=8)).predicted  # 128256 is a multiple of 128
    assert "padded_ms" not in make_plan(Request("gpt2", "1x4xA100", batch=32, objective="memory")).predicted  # it saves none
