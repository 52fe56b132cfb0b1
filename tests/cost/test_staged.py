"""Steps in micro-batches: gradients are added up, which takes time that one micro-batch does not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from weft import Mesh, trace
from weft.cluster.spec import cluster
from weft.core.node import Type
from weft.core.program import Program
from weft.cost.staged import StagedStep
from weft.lang import einsum, f32

ROWS, COLUMNS = 1000, 4096


@dataclass(frozen=True)
class Stage:
    number: int
    phases: tuple[Program, ...]
    types: dict[str, Type]


def step_of(micro: int) -> StagedStep:
    x, w, mesh = f32(8, ROWS), f32(ROWS, COLUMNS), Mesh()
    forward = trace(lambda x, w: {"y": x @ w}, mesh, x=x, w=w)
    backward = trace(lambda x, d: {"d.param.w": einsum("bi,bj->ij", x, d)}, mesh, x=x, d=f32(8, COLUMNS))
    update = trace(lambda w, d: {"w": w - d}, mesh, w=w, d=w)
    order = [(kind, 0, m) for m in range(micro) for kind in ("forward", "backward")]
    routes = {(0, kind): {} for kind in ("forward", "backward", "weight")}
    return StagedStep([Stage(0, (forward, backward), {})], update, [order], routes, cluster("1xA100"))


@pytest.mark.parametrize("micro", [2, 3, 8])
def test_gradients_of_later_micro_batches_are_added(micro: int) -> None:
    one, many = step_of(1), step_of(micro)
    passes = sum(one.seconds.values())
    added = many.seen.step_ms / 1e3 - micro * passes - many.updates[0].step_ms / 1e3
    read_and_written = 3 * ROWS * COLUMNS * 4 * (micro - 1)
    floor = read_and_written / many.cluster.device.get("memory.bandwidth")
    assert floor < added < 2 * floor


def test_one_micro_batch_adds_nothing() -> None:
    one = step_of(1)
    assert one.sum_seconds(one.stages[0]) == 0.0
