"""A step that is traced whole has its collectives in the trace: between hosts torch's functional ones, beside each other weft's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from tests.ranks import run_interpreted_ranks, run_ranks


def traced_without_inductor(wires: list[str]) -> None:
    """From here on every step is traced, and its trace run as it is, not compiled; the collectives in it are noted."""
    import torch._inductor

    from weft.api import compiled

    def inductor(graph: Any, given: Any, options: Any = None) -> Any:
        wires.extend(n.target.__name__ for n in graph.graph.nodes if str(n.target).startswith(("_c10d_functional", "weft")))
        return lambda *tensors: graph(*tensors)

    may = compiled.Compiled._may_trace
    compiled.Compiled._may_trace = lambda self, asked: may(self, True if asked is None else asked)  # type: ignore[method-assign]
    torch._inductor.compile = inductor  # type: ignore[assignment]


def losses(plan: str) -> tuple[list[float], str]:
    """Three losses, and how the step ran."""
    from weft.api.parallelize import parallelize

    w = zoo.small("gpt2", dropout=0.0)
    step = parallelize(w.model, w.loss, torch.optim.AdamW(w.model.parameters(), lr=1e-2), w.example(8), plan=plan)
    return [float(step(w.example(8, seed=i))) for i in range(3)], step.compiled.how


def between_hosts(rank: int) -> None:
    os.environ["NCCL_HOSTID"] = f"host {rank}"
    want, how = losses("dp2,zero1")
    assert how == "node by node"
    wires: list[str] = []
    traced_without_inductor(wires)
    os.environ["WEFT_CHANNELS"] = "2"  # and over two groups in turn
    for plan, wanted in {"dp2": "all_reduce", "dp2,zero1": "reduce_scatter_tensor", "dp2,zero3": "all_gather_into_tensor"}.items():
        got, how = losses(plan)
        assert how == "Inductor's kernels, messages along dp over 2 groups" and any(wire.startswith(wanted) for wire in wires), (plan, how, wires)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def beside_each_other(rank: int) -> None:
    want, _ = losses("dp2")
    wires: list[str] = []
    traced_without_inductor(wires)
    got, how = losses("dp2,zero1")
    assert how == "Inductor's kernels" and "intra_host_reduce.default" in wires, (how, wires)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


@pytest.mark.timeout(300)
def test_a_traced_step_sends_what_it_sends_untraced(tmp_path: Path) -> None:
    run_ranks(2, between_hosts, tmp_path, seconds=250)


@pytest.mark.timeout(300)
def test_a_traced_step_over_peer_memory_ends_with_the_fused_update(tmp_path: Path) -> None:
    run_interpreted_ranks(2, beside_each_other, tmp_path, seconds=250)
