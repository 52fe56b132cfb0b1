"""Programs as records: sizes of the busiest rank, what is sent, what a fused kernel saves, what is held."""

from __future__ import annotations

import pytest

from weft.cluster.spec import cluster
from weft.core.layout import Mesh
from weft.core.program import Program
from weft.plan.records import peak_bytes, program_phase, records
from weft.plan.workload import Collective, Gemm, Touch
from weft.programs.blocks import mlp
from weft.schedule.groups import fuse

BATCH, SEQ, HIDDEN = 2, 64, 128


def block(tp: int) -> Program:
    return mlp(Mesh(tp=tp), BATCH, SEQ, HIDDEN)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_products_shrink_with_the_cut(tp: int) -> None:
    products = [op for op in records(block(tp)) if isinstance(op, Gemm)]
    assert [(op.m, op.n, op.k) for op in products] == [
        (BATCH * SEQ, 4 * HIDDEN // tp, HIDDEN),
        (BATCH * SEQ, HIDDEN, 4 * HIDDEN // tp),
    ]


def test_the_sum_is_of_the_whole_tensor() -> None:
    (sent,) = [op for op in records(block(4)) if isinstance(op, Collective)]
    assert (sent.kind, sent.axis, sent.bytes) == ("all_reduce", "tp", BATCH * SEQ * HIDDEN * 4)


def test_a_fused_kernel_touches_less() -> None:
    plain = block(1)
    pointwise = [n for n in plain.nodes if n.op.name in ("add", "gelu")][:2]
    fused = fuse(plain, pointwise)
    less = sum(op.bytes for op in records(plain) if isinstance(op, Touch)) - sum(op.bytes for op in records(fused) if isinstance(op, Touch))
    assert less == 2 * BATCH * SEQ * 4 * HIDDEN * 4  # the sum is neither written nor read again


def test_time_has_causes() -> None:
    made = program_phase(block(4), cluster("4xH100"))
    assert made.causes["tp"] > 0
    assert sum(made.causes.values()) == pytest.approx(made.seconds)
    assert program_phase(block(4), cluster("2x2xH100")).seconds > made.seconds


def test_bytes_held() -> None:
    one, four = peak_bytes(block(1)), peak_bytes(block(4))
    weights = 2 * HIDDEN * 4 * HIDDEN * 4
    assert one > weights + 2 * BATCH * SEQ * 4 * HIDDEN * 4
    assert four < one
