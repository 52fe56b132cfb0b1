"""Activations kept in the host's memory: the same bits under every plan, less held meanwhile, priced by the host's link."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft import passes
from weft.api.parallelize import parallelize
from weft.cluster.spec import cluster
from weft.core.errors import PlanError
from weft.core.program import Program
from weft.cost.memory import peak_bytes
from weft.cost.simulate import predict
from weft.frontend.capture import capture
from weft.plan.spec import Spec


def losses(plan: str) -> list[float]:
    w = zoo.small("gpt2", layers=3)
    opt = torch.optim.AdamW(w.model.parameters(), lr=1e-2)
    step = parallelize(w.model, w.loss, opt, w.example(8), plan=plan, check="offload" in plan)
    return [step(w.example(8, seed=i)).item() for i in range(2)]


def test_bits_are_the_same(tmp_path: Path) -> None:
    assert losses("offload") == losses("recompute,offload") == losses("dp1")

    def job(rank: int) -> None:
        for plan in ("dp2,zero3", "pp2,micro2", "dp2,recompute"):
            assert losses(f"{plan},offload") == losses(plan), plan

    on_ranks(2, job, tmp_path)


def program(words: str, batch: int = 16) -> Program:
    w = zoo.small("gpt2", layers=6, hidden=128)
    captured = capture(w.model, w.example(batch), w.loss, torch.optim.SGD(w.model.parameters(), lr=1e-2))
    made = passes.run(passes.Draft(captured, Spec.parse(words))).program
    assert made is not None
    return made


def test_less_is_held_and_the_link_is_paid_for() -> None:
    plain, kept = program("dp1", 256), program("offload", 256)
    assert peak_bytes(kept) < 0.75 * peak_bytes(plain)
    quick, slow = (predict(kept, cluster(f"1x1x{device}")) for device in ("GH200", "H100"))
    sent, back, there = (len(kept.find_all(op)) for op in ("to_host", "from_host", "landed"))
    assert sent == back == there > 0
    assert slow.causes_ms["host"] > quick.causes_ms.get("host", 0.0)
    assert predict(plain, cluster("1x1xH100")).causes_ms.get("host", 0.0) == 0.0


def test_of_recomputed_blocks_their_inputs_are_kept_by_the_host() -> None:
    """Of six blocks the first begins at the embedding, which stands outside; less is held than by recompute or offload alone."""
    plain, both, alone = (program(words, 256) for words in ("recompute", "recompute,offload", "offload"))
    moved = both.find_all("to_host")
    assert {n.shape for n in moved} == {(256, 16, 128)} and 5 <= len(moved) <= 6
    assert len(both.find_all("landed")) == len(moved)
    assert peak_bytes(both) < peak_bytes(plain) - 3 * 256 * 16 * 128 * 4 and peak_bytes(both) < peak_bytes(alone)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(PlanError, match="offload is not searched"):
        Spec.parse("offload").setting(global_batch=8)
    assert Spec.parse(str(Spec.parse("dp2,offload"))).offload
