"""Rules and layouts chosen together: rewritten steps train alike, and a rule that gains nothing on one device pays on a mesh."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import weft_zoo as zoo
from bench._graph.planner import all_ways, record
from bench._graph.search import Candidate, GraphSearch
from bench._graph.task import CapturedTask
from bench._sequential import joint_and_sequential, one_device
from weft import interp
from weft.cluster.spec import cluster
from weft.core.layout import Mesh, S
from weft.frontend.capture import Captured, capture
from weft.plan.layouts import OnCluster, choose
from weft.plan.rewritten import RewrittenStep, as_products
from weft.plan.space import Limits
from weft.plan.substitute import best_path, value_rules
from weft.plan.summaries import rows

RULE = "stack_columns"
SUMMIT = cluster("8x6xV100-Summit")


@cache
def small() -> tuple[Captured, dict[str, torch.Tensor]]:
    """A recommender of four tables, and numbers for a step of it."""
    work = zoo.load("xdl", device="cpu", tables=(20, 20, 20, 20), width=4, bag=3, top=(8, 2))
    batch = work.example(8)
    captured = capture(work.model, batch, work.loss, torch.optim.AdamW(work.model.parameters()))
    return captured, captured.inputs(batch, step=1)


@cache
def stacked() -> RewrittenStep:
    return next(there for move, there in as_products(small()[0]).neighbours(value_rules(), 40) if str(move) == RULE)


def task() -> CapturedTask:
    return CapturedTask("xdl", SUMMIT, 1024 * SUMMIT.devices, "fp32", "sgd", (("tables", (100_000,) * 4), ("width", 48)))


def test_stacking_changes_forward_and_backward_and_no_number() -> None:
    captured, values = small()
    before, after = interp.run_global(captured.program, values), interp.run_global(stacked().program, values)
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value)
    cut = [n for n in stacked().program.find_all("narrow") if n.args[0].shape == (8, 4, 4)]
    assert len(cut) == 4, "the gradient comes apart along the stack as well"
    assert not [n for n in stacked().program.find_all("concat") if n.attr("dim") == 1 and n.ndim == 2]


def test_a_stacked_step_laid_out_means_what_it_did() -> None:
    captured, values = small()
    mesh = Mesh(dp=2, tp=2)
    pins = {name: [{"tp": S(1)}] for name in captured.program.input_names if ".tables." in name}
    made = choose(stacked().program, mesh, OnCluster(cluster("2x2xV100"), mesh), pins=pins, work=1e7)
    assert made.communication["all_to_all"] <= 2, "one exchange each way, however many tables there are"
    found = interp.run(made.program, values, tolerance=1e-5)
    for name, value in interp.run_global(captured.program, values).items():
        torch.testing.assert_close(found[name], value)


def test_one_device_has_no_reason_to_stack() -> None:
    lone = as_products(replace(task(), batch=1024).captured())
    price = one_device(SUMMIT)
    there = next(there for move, there in lone.neighbours(value_rules(), 40) if str(move) == RULE)
    assert math.isclose(price(lone.program), price(there.program), rel_tol=1e-9)
    assert RULE not in [str(move) for move in best_path(lone, price, value_rules(), 2, 16)]


@cache
def searched() -> tuple[GraphSearch, dict[str, Candidate | str]]:
    search = GraphSearch(task(), SUMMIT.device.memory)
    search.meshes = lambda devices: [Mesh(dp=devices // 48, tp=48)]  # type: ignore[method-assign]
    search.depths = lambda: [1]  # type: ignore[method-assign]
    return search, all_ways(search, lambda _: None)


def test_joint_finds_what_sequential_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench._sequential.BUDGET", 1)
    search, found = searched()
    both = joint_and_sequential(search)
    assert both.joint.rules == (RULE,) and RULE not in both.sequential.rules
    assert both.sequential.seconds > 1.2 * both.joint.seconds
    own, unity = found["weft"], found["unity-like"]
    assert isinstance(own, Candidate) and isinstance(unity, Candidate)
    assert own.seconds == both.joint.seconds and own.rules == unity.rules == (RULE,), "Unity has the rule too"
    plan = record(task(), Limits(), own, {}, {}, "time")
    assert ("rules", RULE) in [row[:2] for row in rows(plan)] and plan.layouts["rules"] == [RULE]


@pytest.mark.parametrize("model", ["fusion", "mixture"])
def test_a_weight_sharded_inside_the_parts_it_reads_needs_no_exchange(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide layers side by side into a narrow one: stacked, each part stays sharded, and so do its columns of the weight that joins them."""
    monkeypatch.setattr("bench._sequential.BUDGET", 1)
    where = cluster("1x8xH100-PCIe")
    search = GraphSearch(CapturedTask(model, where, 128 * 8, "fp32", "sgd"), where.device.memory)
    search.meshes = lambda devices: [Mesh(dp=devices)]  # type: ignore[method-assign]
    search.depths = lambda: [1]  # type: ignore[method-assign]
    list(search.free(lambda _: None))
    both = joint_and_sequential(search)
    assert both.joint.rules == (RULE,) and RULE not in both.sequential.rules
    assert both.sequential.seconds > 1.15 * both.joint.seconds
    assert both.joint.placed.program.input_names["param.joint.weight"].layout.placement("dp") == S(1, within=8192)


def test_the_same_moves_lead_the_same_way_at_another_batch() -> None:
    first = as_products(small()[0])
    move = next(move for move, _ in first.neighbours(value_rules(), 40) if str(move) == RULE)
    other = as_products(replace(task(), batch=96).captured())
    assert [n.shape for n in other.moved(move, value_rules()).program.find_all("concat")] == [(96, 4, 48)]
