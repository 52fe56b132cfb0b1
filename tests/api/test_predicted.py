"""What is predicted of a plan is what is predicted of the step that is built from it: both are made and priced by the same functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import weft_zoo as zoo
from tests.api.ranks import on_ranks
from weft.api.micro_steps import micro_steps
from weft.api.parallelize import parallelize
from weft.api.pipeline_plans import PipelinePlans, staged
from weft.api.pool import PlanRequest, Pool, with_doubles, words
from weft.cluster.spec import cluster
from weft.cost.simulate import predict
from weft.frontend.capture import capture

BATCH = 8


def adamw(w: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(w.model.parameters(), lr=1e-2)


def priced(w: Any, where: Any) -> dict[str, float]:
    """Milliseconds of every plan by name that `auto` compares as it will run, for two processes."""
    lines = PipelinePlans(micro_steps(w.model, w.example(BATCH), w.loss, adamw(w)), BATCH)
    pool = Pool(capture(w.model, w.example(BATCH), w.loss, adamw(w)), where, PlanRequest(), lines)
    for named in words(pool.captured, where.devices):
        pool.try_named(str(named), named, pool.request)
    pool.try_stages()
    pool.reorder()
    pool.schedule()
    return {name: pool.options[name].ms for name in pool.programs if pool._fits(name)}


@pytest.mark.parametrize(("name", "least"), [("gpt2", 11), ("llama3-8b", 11), ("mlp", 8)])
def test_a_plan_is_predicted_as_its_step_is(name: str, least: int, tmp_path: Path) -> None:
    where = with_doubles(cluster("2xx86-2"))
    plans = priced(zoo.small(name), where)
    assert len(plans) >= least, plans

    def job(rank: int) -> None:
        for plan, ms in plans.items():
            w = zoo.small(name)
            step = parallelize(w.model, w.loss, adamw(w), w.example(BATCH), plan=plan, check=False)
            seen = staged(step.micro_batches.pipeline, step.plan, where).seen if step.micro_batches is not None else predict(step.program, where)
            assert seen.step_ms == pytest.approx(ms, rel=1e-3), plan

    on_ranks(2, job, tmp_path)
