"""Baselines at their best: each against a sweep, written out here, of all it can say."""

from __future__ import annotations

import itertools
import math

import pytest

from bench._graph.roles import GRADS, PARAMS
from bench._graph.search import Candidate, GraphSearch
from bench._graph.stages import FULL, NONE, Stager
from bench._graph.task import CapturedTask
from weft.cluster.spec import cluster
from weft.plan.baselines import BASELINES
from weft.plan.planner import captured_stack, sized_stack
from weft.plan.search import CLOSE, Found, Search
from weft.plan.setting import Setting
from weft.plan.sizes import Shape
from weft.plan.space import Limits, PlanProblem
from weft.plan.spec import RECOMPUTE, Spec

SMALL = Shape(layers=8, hidden=1024, heads=16, vocab=32000, seq=1024, rotary=True, gated=True, bias=False, tied=False, name="small")
ALONE = {"data parallel": (0,), "zero1": (1,), "zero2": (2,), "zero3": (3,)}


def swept(search: Search, name: str) -> float:
    """The best of every micro-batch, every amount of recomputation and every sharding of plain data parallelism."""
    space, p = BASELINES[name], search.problem
    dp = p.cluster.devices
    own, best = p.batch // dp, math.inf
    for micro, again, zero, keep in itertools.product(range(1, own + 1), RECOMPUTE, ALONE[name], space.gather_once):
        if own % micro or (keep and (zero != 3 or micro == own)):
            continue
        s = Setting.counted(
            global_batch=p.batch, micro_batch=micro, dp=dp, zero=zero, recompute=again, keep_gathered=keep, kernels=p.kernels, dtype=p.dtype,
            overlap_grads=space.overlap_grads, overlap_params=space.overlap_params, overlap_sends=space.overlap_sends,
        )  # fmt: skip
        made = search.price(s)
        if made is not None and made.memory <= search.memory:
            best = min(best, made.seconds)
    return best


def problems() -> dict[str, tuple[PlanProblem, Limits]]:
    stack, _ = captured_stack("gpt2", "bf16")
    return {
        "a model by its sizes": (PlanProblem(sized_stack(SMALL, "bf16"), cluster("1x4xA100"), 96, "bf16"), Limits()),
        "where little fits": (PlanProblem(sized_stack(SMALL, "bf16"), cluster("1x4xA100"), 96, "bf16"), Limits(memory=9e9)),
        "captured blocks": (PlanProblem(stack, cluster("1x2xH100"), 24, "bf16"), Limits(memory=12e9)),
    }


@pytest.mark.parametrize("case", ["a model by its sizes", "where little fits", "captured blocks"])
def test_a_baseline_is_the_best_of_all_it_can_say(case: str) -> None:
    problem, limits = problems()[case]
    search = Search(problem, limits)
    for name in ALONE:
        found, best = search.best(BASELINES[name]), swept(search, name)
        if math.isinf(best):
            assert not isinstance(found, Found)
        else:
            assert isinstance(found, Found) and best * (1 - 1e-9) <= found.seconds <= best / (1 - CLOSE), name


def test_a_captured_program_is_run_in_as_many_micro_batches_as_serve_a_baseline() -> None:
    """Where a step fits only if all of it runs again, more micro-batches may be faster."""
    sizes = (("layers", 6), ("hidden", 1024), ("inputs", 1024), ("classes", 1024))
    task = CapturedTask("mlp", cluster("1x2xV100"), 65536, "fp32", "adam", sizes)
    whole = GraphSearch(task, math.inf)
    placed = whole._held(Spec(dp=2, zero=1), 1)
    assert placed is not None
    least = Stager(whole.units(placed, frozenset({GRADS})), math.inf, 1, FULL).split(1)
    assert least is not None
    search = GraphSearch(task, (least[0].memory + placed.memory(1)) / 2)  # fits in one micro-batch only by running again
    found = search.baselines()
    for name, spec, overlap in (
        ("zero1", Spec(dp=2, zero=1), frozenset({GRADS})), ("zero3", Spec(dp=2, zero=3), frozenset({GRADS, PARAMS})),
    ):  # fmt: skip
        ways = []
        for rounds, again in itertools.product((1, 2, 4, 8, 16, 32, 64), (NONE, FULL)):
            held = search._held(spec, rounds)
            made = search._whole(name, held, overlap, rounds, (again,)) if held is not None else None
            ways += [made.seconds] if made is not None else []
        way = found[name]
        assert isinstance(way, Candidate) and way.seconds == pytest.approx(min(ways)), name


