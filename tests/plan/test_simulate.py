"""A predicted step: what must hold of any, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench._layers import Counted
from weft.cli import app
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.cost.price import Costs
from weft.cost.walk import Walk
from weft.cost.work import Collective
from weft.plan.fits import fit
from weft.plan.partition import share
from weft.plan.phase import LayerRun, Pass, walk
from weft.plan.planner import captured_stack, sized_stack
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, _Simulation, held, simulate
from weft.plan.sizes import Shape
from weft.plan.workload import Workload, split_weight

GPT = Counted(24, 2048, 16, 51200, 2048, name="gpt")
MOE = Shape(8, 1024, 16, 32000, 1024, gated=True, rotary=True, experts=8, chosen=2, name="moe")


def workload(shape: Shape, setting: Setting) -> Workload:
    setting.check()
    return sized_stack(shape, setting.dtype).work(setting)


def predicted_step(shape: Shape, setting: Setting, place: str) -> SimulatedStep:
    return simulate(workload(shape, setting), setting, cluster(place))


SETTINGS = [
    Setting.counted(global_batch=8),
    Setting.counted(global_batch=32, dp=8, zero=3),
    Setting.counted(global_batch=32, dp=8, zero=2),
    Setting.counted(global_batch=32, dp=8, zero=1, overlap_params=False, overlap_grads=False),
    Setting.counted(global_batch=8, tp=8),
    Setting.counted(global_batch=8, tp=8, sequence_parallel=True),
    Setting.counted(global_batch=8, tp=8, sequence_parallel=True, overlap_tp=True),
    Setting.counted(global_batch=8, tp=2, cp=4),
    Setting.counted(global_batch=16, tp=2, pp=4, dp=1),
    Setting.counted(global_batch=32, pp=4, dp=2, schedule="gpipe"),
    Setting.counted(global_batch=32, pp=4, dp=2, schedule="interleaved", virtual=3),
    Setting.counted(global_batch=32, pp=4, dp=2, schedule="zero-bubble", overlap_sends=True),
    Setting.counted(global_batch=32, pp=4, dp=2, zero=3, keep_gathered=True, recompute="full"),
    Setting.counted(global_batch=8, kernels="classic", dtype="fp16", recompute="selective"),
    Setting.counted(global_batch=8, kernels="eager", recompute="per-op"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.dp}.{s.tp}.{s.pp}.{s.cp}.z{s.zero}.{s.schedule}.{s.recompute}.{s.kernels}")
def test_every_millisecond_has_a_cause(setting: Setting) -> None:
    place = f"{setting.devices}xH100"
    step = predicted_step(GPT, setting, place)
    assert sum(step.causes.values()) == pytest.approx(step.seconds)
    assert all(v >= -1e-9 for v in step.causes.values()), step.causes
    assert all(v >= -1e-9 for v in step.hidden.values()), step.hidden
    assert 0 < step.mfu < 0.9
    assert step.peak_memory.total > step.peak_memory.allocated > 0


def test_what_everyone_knows_of_training() -> None:
    """Twice the batch takes twice as long, tensor parallelism is worse across nodes, running all again costs about a third, nothing beats the device."""
    model = replace(GPT, hidden=4096, heads=32)
    one, two = (predicted_step(model, Setting.counted(global_batch=n, dp=8, zero=1), "8xH100") for n in (32, 64))
    assert two.seconds == pytest.approx(2 * one.seconds, rel=0.03)
    inside, across = (
        predicted_step(model, Setting.counted(global_batch=32, dp=32 // tp, tp=tp, sequence_parallel=True), "4x8xH100") for tp in (8, 16)
    )
    assert across.seconds > 1.2 * inside.seconds
    again = predicted_step(model, Setting.counted(global_batch=32, dp=8, zero=1, recompute="full"), "8xH100")
    assert 1.2 < again.seconds / one.seconds < 4 / 3 + 0.05
    assert all(0 < step.mfu < 1 for step in (one, two, inside, across, again))


def test_a_host_that_waits_hides_nothing_of_itself() -> None:
    """Where the host sets the pace, collectives come on top for one that waits for them, and are hidden for one that does not."""
    setting = Setting(global_batch=4, tp=2, dp=4, kernels="classic", dtype="fp16", overlap_grads=False, overlap_params=False)
    place, small = cluster("8xA100-server"), replace(GPT, hidden=1024, seq=256)
    (group,) = place.groups
    constants = {k: c for k, c in group.profile.device.constants.items() if k != "host.waits"}
    device = replace(group.profile.device, constants=constants)
    ahead = replace(place, groups=(replace(group, profile=replace(group.profile, device=device)),))
    waits, runs = (simulate(workload(small, setting), setting, where) for where in (place, ahead))
    sent = sum(
        op.kind == "all_reduce"
        for op in workload(small, setting).layer.forward + workload(small, setting).layer.back
        if isinstance(op, Collective)
    )
    assert sent == 4
    each = Costs(place, place.device, setting.place).seconds(Collective("all_reduce", 256 * 1024 * 2.0, "tp"))
    assert waits.seconds - runs.seconds > 0.8 * sent * small.layers * each


def test_classic_kernels_sum_gradients_before_a_norm() -> None:
    """So its weights, which all ranks of tp hold, need no sum of their own."""
    work = workload(GPT, Setting(global_batch=2, tp=4, kernels="classic", dtype="fp16"))
    few = [
        op
        for block in (work.first, work.layer, work.last)
        for op in block.back
        if isinstance(op, Collective) and op.bytes <= 4 * GPT.hidden
    ]
    assert not few


def test_collectives_take_units_from_what_runs_beside_them() -> None:
    """Slower than where they took none, and still no slower than one after the other."""
    place, setting = cluster("8x8xH100"), Setting.counted(global_batch=64, dp=64, zero=3)
    work = workload(GPT, setting)
    alone = replace(place.device, constants={k: c for k, c in place.device.constants.items() if k != "link.units"})
    free = replace(place, groups=tuple(replace(g, profile=replace(g.profile, device=alone)) for g in place.groups))
    none, some, apart = (
        simulate(work, s, at).seconds
        for s, at in ((setting, free), (setting, place), (replace(setting, overlap_grads=False, overlap_params=False), place))
    )
    assert none < some < apart


def test_a_layer_sums_only_what_it_computes() -> None:
    """The sum of a vocabulary's slices comes once, with the first part, and not with every layer."""
    llama = replace(GPT, gated=True, rotary=True, bias=False, tied=False)
    work = workload(llama, Setting.counted(4, 4, tp=2))
    assert [sum(isinstance(op, Collective) and op.kind == "all_reduce" for op in b.forward) for b in (work.first, work.layer)] == [1, 2]


def test_one_sample_is_priced_as_it_is_captured() -> None:
    """Its slices lie in one piece, those of two samples do not."""
    one, two = (workload(GPT, Setting.counted(n, n, tp=4, sequence_parallel=True)).layer.forward for n in (1, 2))
    assert not [op for op in one if "laid out" in op.name] and [op for op in two if "laid out" in op.name]


def test_experts_are_spread_over_copies() -> None:
    with pytest.raises(PlanError, match="ep a divisor of dp = 4"):
        Setting.counted(global_batch=8, dp=4, ep=3).check()
    with pytest.raises(PlanError, match="ep a divisor of experts = 8"):
        predicted_step(replace(GPT, experts=8, chosen=2), Setting.counted(global_batch=9, dp=9, ep=3), "9x1xH100")


def test_experts_are_spread() -> None:
    one, spread = (predicted_step(MOE, Setting.counted(global_batch=16, dp=8, ep=ep), "8xH100") for ep in (1, 8))
    assert spread.causes["ep"] > 0
    assert spread.peak_memory.params < one.peak_memory.params


def test_the_device_does_no_less_than_the_flops() -> None:
    setting = Setting.counted(global_batch=8, micro_batch=8)
    work = workload(GPT, setting)
    forward = GPT.layers * sum(op.flops for op in work.layer.forward) + sum(op.flops for op in work.last.forward)
    scores = GPT.layers * 2 * GPT.seq * GPT.hidden * work.tokens  # the causal half of them is not computed
    assert 3 * (forward + scores) == pytest.approx(GPT.flops_per_token * work.tokens, rel=0.01)
    done = GPT.layers * sum(op.flops for op in (*work.layer.forward, *work.layer.backward())) + 3 * sum(op.flops for op in work.last.forward)
    assert done == pytest.approx(work.model_flops * work.tokens, rel=0.01)


def test_what_recompute_costs_and_saves() -> None:
    steps = {r: predicted_step(GPT, Setting.counted(8, 8, recompute=r), "H100") for r in ("none", "selective", "per-op", "full")}
    time = [steps[r].seconds for r in ("none", "selective", "per-op", "full")]
    held = [steps[r].peak_memory.activations for r in ("none", "selective", "full")]
    assert time == sorted(time)
    assert held == sorted(held, reverse=True)
    assert steps["full"].seconds / steps["none"].seconds == pytest.approx(4 / 3, rel=0.1)


def test_a_degree_that_heads_do_not_divide_shards_the_rest() -> None:
    """Of 16 heads none is shared by three devices; feed-forwards are, in uneven slices."""
    two, three, four = (predicted_step(GPT, Setting.counted(global_batch=8, tp=n), f"{n}xH100").peak_memory.params for n in (2, 3, 4))
    assert four < two and four < three


def test_zero_shards_what_it_says() -> None:
    held = [predicted_step(GPT, Setting.counted(global_batch=8, dp=8, zero=z), "8xH100").peak_memory for z in range(4)]
    assert held[1].optimizer == pytest.approx(held[0].optimizer / 8)
    assert held[2].grads == pytest.approx(held[1].grads / 8)
    assert held[3].params == pytest.approx(held[2].params / 8)


def test_more_copies_cost_only_the_gradients() -> None:
    one = predicted_step(GPT, Setting.counted(global_batch=4), "H100")
    many = predicted_step(GPT, Setting.counted(global_batch=32, dp=8, overlap_grads=False), "8xH100")
    assert many.seconds - one.seconds == pytest.approx(many.causes["dp"], rel=0.02)


def test_a_large_cluster_costs_no_more_to_simulate() -> None:
    setting = Setting.counted(global_batch=2048, tp=8, pp=16, dp=128, zero=1, sequence_parallel=True, schedule="interleaved", virtual=7)
    step = simulate(captured_stack("llama3-405b", "bf16")[0].work(setting), setting, cluster("2048x8xH100"))
    assert len(step.timeline.tasks) < 10_000
    assert 0.2 < step.mfu < 0.5
    assert step.tokens == 2048 * 8192


@pytest.mark.parametrize(("place", "turns"), [("16x1xH100", True), ("4x4xH100", False)])
def test_collectives_on_one_link_take_turns(place: str, turns: bool) -> None:
    """Between single devices tensor and data parallelism share the network; in nodes of four each has its own link."""
    setting = Setting.counted(global_batch=4, tp=4, dp=4, zero=3)
    made = cluster(place)
    walker = Walk(Costs(made, made.device, setting.place))
    first = walker.carry(Collective("all_gather", 2**24, "data"), "dp", 0.0)
    second = walker.carry(Collective("all_reduce", 2**24, "tp"), "tp", 0.0)
    alone = walker.costs.seconds(Collective("all_reduce", 2**24, "tp"))
    assert second == pytest.approx(alone + (first if turns else 0.0))


def test_a_stage_on_slower_devices_is_priced_by_them() -> None:
    """Two kinds in one cluster: the pipeline's second half on the slower one sets the pace, and the trace shows which stage."""
    setting = Setting.counted(global_batch=32, pp=2, dp=8)
    fast, mixed, slow = (predicted_step(GPT, setting, p) for p in ("2x8xH100", "8xH100+8xA100", "2x8xA100"))
    assert fast.seconds < mixed.seconds < slow.seconds
    assert mixed.timeline.busy("stage 1") > 1.5 * mixed.timeline.busy("stage 0")


def test_the_slower_device_sets_the_pace() -> None:
    setting = Setting.counted(global_batch=32, dp=16)
    mixed, slow, fast = (predicted_step(GPT, setting, place) for place in ("1x8xH100+1x8xA100", "2x8xA100", "2x8xH100"))
    assert fast.seconds < mixed.seconds
    assert mixed.seconds == pytest.approx(slow.seconds, rel=0.05)


def test_a_slow_stage_makes_the_others_wait() -> None:
    setting = Setting.counted(global_batch=32, pp=2, dp=8)
    mixed = predicted_step(GPT, setting, "1x8xH100+1x8xA100")
    assert mixed.seconds > predicted_step(GPT, setting, "2x8xH100").seconds
    assert mixed.timeline.busy("stage 1") > 1.3 * mixed.timeline.busy("stage 0")


def test_embedding_and_head_may_be_stages_of_their_own() -> None:
    """As 126 layers are run in 16 x 8 chunks: shorter than 16 x 7, whose busiest stages hold one layer more."""
    model = replace(GPT, layers=14)
    way = Setting.counted(global_batch=32, pp=4, virtual=4, schedule="interleaved")
    apart, less = predicted_step(model, way, "4xH100"), predicted_step(model, replace(way, virtual=3), "4xH100")
    assert apart.seconds < less.seconds and max(m.params for m in apart.memory) <= max(m.params for m in less.memory)


def test_layers_are_shared_out() -> None:
    assert share(24, 4) == [6, 6, 6, 6]
    assert share(126, 16) == [7] + [8] * 14 + [7]
    assert sum(share(61, 7)) == 61


# --- refusals


@pytest.mark.parametrize(
    ("given", "place", "says"),
    [
        ({"global_batch": 8, "dp": 4}, "8xH100", "try     --dp 8"),
        ({"global_batch": 7, "dp": 8}, "8xH100", "try     --batch 8"),
        ({"global_batch": 32, "pp": 32}, "32xH100", "pp x virtual at most 24"),
        ({"global_batch": 8, "virtual": 2}, "H100", "try     --schedule interleaved"),
        ({"global_batch": 8, "recompute": "some"}, "H100", "none or selective or per-op or full"),
        ({"global_batch": 8, "zero": 4}, "H100", "ZeRO has stages 0 to 3"),
        ({"global_batch": 8, "dp": 8, "ep": 2}, "8xH100", "a model with experts"),
        ({"global_batch": 8, "dp": 2, "tp": 3}, "8xH100", "try     --tp 2 --dp 4"),
        ({"global_batch": 8, "dp": 1, "pp": 3}, "8xH100", "try     --pp 2 --dp 4"),
        ({"global_batch": 8, "pp": 0}, "8xH100", "pp of 1 or more"),
        ({"global_batch": -8}, "H100", "global batch of 1 or more"),
        ({"global_batch": 8, "micro_batch": 0}, "H100", "micro batch of 1 or more"),
        ({"global_batch": 8, "dtype": "int8"}, "H100", "no dtype named 'int8'"),
    ],
)
def test_what_cannot_be_run(given: dict[str, Any], place: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        predicted_step(GPT, Setting.counted(**given), place)
    assert says in str(caught.value)


# --- will it fit


def test_advice_was_tried() -> None:
    setting = Setting.counted(global_batch=64, micro_batch=8, dp=8)
    place = cluster("8xH100")
    model = replace(GPT, layers=64)
    answer = fit(sized_stack(model, setting.dtype), setting, place)
    assert not answer.fits
    assert answer.changes
    assert [c.step.seconds for c in answer.changes] == sorted(c.step.seconds for c in answer.changes)
    for change in answer.changes:
        assert fit(sized_stack(model, setting.dtype), change.setting, place).fits, change.says


def test_what_needs_several_changes_or_more_nodes_is_told() -> None:
    """A model whose state alone fills eight devices has an answer too, and two changes are told where one is not enough."""
    model = replace(GPT, layers=48, hidden=8192, heads=64)
    far = fit(sized_stack(model, "bf16"), Setting.counted(global_batch=8, dp=8), cluster("8xA100-40"))
    assert not far.fits and far.largest == 0 and far.changes
    assert all(c.says.startswith("--cluster 2x8xA100-40 ") or c.says.startswith("--cluster 4x8xA100-40 ") for c in far.changes)
    assert all(c.cluster.devices == c.setting.devices and c.step.peak_memory.total <= far.memory for c in far.changes)
    near = fit(sized_stack(replace(GPT, layers=64, seq=8192), "bf16"), Setting.counted(global_batch=8, dp=8, tp=1), cluster("8xH100"))
    assert near.changes and all("--cluster" not in c.says for c in near.changes)


def test_bytes_alone_are_those_of_the_step() -> None:
    setting, place = Setting.counted(global_batch=16, dp=2, pp=4), cluster("8xH100")
    step = predicted_step(GPT, setting, "8xH100")
    assert held(workload(GPT, setting), setting, place) == step.peak_memory.total == pytest.approx(sum(step.peak_memory.parts().values()))


def test_the_largest_batch_is_the_largest() -> None:
    setting, place = Setting.counted(global_batch=1), cluster("H100")
    largest = fit(sized_stack(GPT, "bf16"), setting, place).largest
    assert largest > 1
    assert fit(sized_stack(GPT, "bf16"), Setting.counted(largest, largest), place).fits
    assert not fit(sized_stack(GPT, "bf16"), Setting.counted(largest + 1, largest + 1), place).fits


# --- records


def test_weight_gradients_may_wait() -> None:
    block = workload(GPT, Setting.counted()).layer
    early, late = split_weight(block.backward())
    assert len(late) == 4
    assert sum(op.flops for op in (*early, *late)) == pytest.approx(sum(op.flops for op in block.backward()))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2", 0.124), ("gpt3-175b", 174.6), ("gpt-530b", 529.6), ("llama3-8b", 8.03), ("llama3-70b", 70.55),
        ("llama3-405b", 405.9), ("llama2-7b", 6.74), ("mixtral-8x7b", 46.7), ("bert-large", 0.335), ("vit-l16", 0.304),
    ],
)  # fmt: skip
def test_named_models_have_their_published_size(name: str, billions: float) -> None:
    assert captured_stack(name, "bf16")[0].params / 1e9 == pytest.approx(billions, rel=0.02)


# --- the command


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    argv = ["simulate", "gpt2-large", "--cluster", "2x8xA100", "--tp", "2", "--pp", "2", "--json", "--trace", str(trace)]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["fits"] is True
    assert said["memory_gb"] < said["device_memory_gb"]
    parts = said["breakdown_ms"]
    exposed = sum(parts["exposed"].values())
    assert parts["compute"] + parts["host"] + parts["bubble"] + parts["optimizer"] + exposed == pytest.approx(said["step_ms"])
    assert json.loads(trace.read_text())["traceEvents"]


def test_what_the_command_advises_fits() -> None:
    first = ["simulate", "gpt2-xl", "--cluster", "1x2xV100", "--micro-batch", "16", "--json"]
    said = json.loads(CliRunner().invoke(app, first).stdout.splitlines()[-1])
    assert said["fits"] is False and said["dtype"] == "fp16"  # where bf16 has no units of its own
    advised = said["changes"][0]
    again = json.loads(CliRunner().invoke(app, [*first, *advised["try"].split()]).stdout.splitlines()[-1])
    assert again["fits"] is True and again["memory_gb"] == pytest.approx(advised["memory_gb"])
    assert sum(again["memory_parts_gb"].values()) == pytest.approx(again["memory_gb"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tp", "0"], "tp of 1 or more"), (["--micro-batch", "0"], "micro batch of 1 or more"), (["--recompute", "mixed"], "weft plan"),
        (["--trace", "nowhere/step.json"], "no folder nowhere"), (["--dtype", "fp8"], "A100 has no rate of fp8"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_run(options: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "gpt2", "--cluster", "8xA100", *options])
    assert result.exit_code == 1 and says in result.output


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["simulate", "gpt2", "--cluster", "8xA100", "--dp", "3"])
    assert result.exit_code == 1
    assert "the setting does not fill the cluster" in result.output


def test_gradients_of_later_micro_batches_are_added_to_those_before() -> None:
    """Twice the micro-batches of one size take more than twice as long less what a step does once: each gradient is read, and the sum read and written."""
    setting, place = Setting.counted(2, 1), cluster("1xA100")
    work = workload(Counted(2, 1024, 8, 1024, 512), setting)
    made = _Simulation(work, setting, place)
    way = made._way("backward")
    assert way.summed_bytes == 2 + 2 * 4 and made._way("forward").summed_bytes == 0
    assert _Simulation(work, replace(setting, micro=1, global_batch=1), place)._way("backward").summed_bytes == 0
    part = [LayerRun(work.layer, 1)]
    more = walk(made.costs[0], part, way).now - walk(made.costs[0], part, Pass("backward")).now
    assert more == pytest.approx(work.layer.params * 10 / made.costs[0].device.bandwidth, rel=0.2)
