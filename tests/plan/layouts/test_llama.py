"""Layouts of Llama-3's own shapes on a mesh of 8 x 8: the kinds of parallelism people use come out of prices alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from weft.cluster.spec import cluster
from weft.core.layout import Mesh, R, S
from weft.core.node import Node
from weft.frontend.capture import Captured, capture
from weft.plan.layouts import Chosen, OnCluster, choose
from weft.plan.roles import Roles

PLACE, MESH = cluster("8x8xH100"), Mesh(dp=8, tp=8)
WORK = 5e7


@cache
def step(model: str, batch: int, seq: int, layers: int = 1) -> Captured:
    work = zoo.get(model, layers=layers, seq=seq, dtype=torch.bfloat16)
    return capture(work.model, work.example(batch, device="meta"), work.loss, torch.optim.AdamW(work.model.parameters()))


@cache
def chosen(model: str, batch: int, seq: int, layers: int = 1) -> Chosen:
    captured = step(model, batch, seq, layers)
    return choose(captured.program, MESH, OnCluster(PLACE, MESH), blocks=captured.blocks, work=WORK)


def products(found: Chosen) -> list[Node]:
    """Products of the block, forward, activation first and weight second."""
    roles = Roles(found.program)
    made = [n for n in found.program.nodes if n in roles.forward and n.op.name == "einsum" and n.args[1].ndim == 2]
    return made[:7]


def cuts(node: Node, arg: int, axis: str) -> Any:
    return node.args[arg].type.on(axis)


def test_a_large_batch_gives_data_parallelism_with_sharded_state() -> None:
    found = chosen("llama3-8b", 512, 2048)
    for n in products(found):
        assert all(isinstance(cuts(n, 0, a), S) and cuts(n, 0, a).dim < 2 for a in MESH.axes)
        assert all(cuts(n, 1, a) == R for a in MESH.axes)
    moments = [places for name, places in found.inputs.items() if name.startswith("exp_avg.blocks") and name.endswith("weight")]
    assert any(isinstance(p, S) for places in moments for p in places.values())


def test_wide_layers_and_few_samples_give_tensor_and_sequence_parallelism() -> None:
    found = chosen("llama3-70b", 16, 8192)
    assert sum(isinstance(cuts(n, 1, "tp"), S) for n in products(found)) >= 4
    norms = [n for n in found.program.nodes if n.op.name == "rms_norm"]
    assert any(n.type.on("tp") == S(1) for n in norms) or any(cuts(n, 0, "tp") == S(1) for n in products(found))


def test_one_long_sample_is_cut_along_its_sequence() -> None:
    found = chosen("llama3-8b", 1, 131072)
    assert all(S(1) in (cuts(n, 0, a) for a in MESH.axes) for n in products(found))


def test_forced_columns_and_rows_never_cost_less() -> None:
    captured = step("llama3-8b", 512, 2048)
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    pins = {
        name: [{"tp": S(0 if name.split(".")[-2] in columns else 1)}]
        for name in captured.program.input_names
        if name.startswith("param.blocks") and name.split(".")[-2] in columns + rows
    }
    assert len(pins) == 7
    forced = choose(captured.program, MESH, OnCluster(PLACE, MESH), blocks=captured.blocks, pins=pins, work=WORK)
    free = chosen("llama3-8b", 512, 2048)
    assert forced.cost >= free.answer.bound


@pytest.mark.parametrize("batch", [64])
def test_two_layers_cost_twice_one(batch: int) -> None:
    one, two, three = (chosen("llama3-8b", batch, 4096, n).cost for n in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.06)
