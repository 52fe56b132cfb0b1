"""Published planning cases: every word of a statement counts, and a file may hold its cases in any of several forms."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from bench import _stage_dp
from bench._case_words import counted, options
from bench.planner_cases import run

MLP = {"model": "MLP 2xDense(64)+bias, Adam", "batch": 8, "alpha": [1, 1], "beta": [1, 1], "mesh": [4, 1]}
FORCED = 2 * (1 + 1.5 * 64 * 64 * 4 + 0.01) + 2 * (1 + 1.5 * 64 * 4 + 0.01)  # one all_reduce of each gradient


def only(document: Any) -> dict[str, Any]:
    rows = list(run(document))
    assert len(rows) == 1
    return rows[0]


def test_forced_data_parallel_sums_every_gradient() -> None:
    row = only([{**MLP, "id": "forced", "option": "force_data_parallel", "objective": FORCED, "counts": {"all_reduce": 1, "total": 1}}])
    assert row["correct"] and row["found"]["objective"] == pytest.approx(FORCED, rel=1e-2)


def test_an_objective_below_what_can_be_had_is_missed() -> None:
    assert only([{**MLP, "id": "forced", "option": "force_data_parallel", "objective": 0.9 * FORCED}])["correct"] is False


def test_sharding_that_does_not_hold_is_missed() -> None:
    row = only([{**MLP, "id": "forced", "option": "force_data_parallel", "specs": "kernel k even: column-sharded(4)"}])
    assert row["correct"] is False


@pytest.mark.parametrize("change", [{"option": "be_quick"}, {"model": "MLP 2xDense(64)+bias, sparsely"}, {"weather": "fine"}])
def test_words_not_understood_are_said_and_not_reached(change: dict[str, Any]) -> None:
    row = only([{**MLP, "id": "odd", **change}])
    assert row["correct"] is None and "not understood" in row["why"]


def test_recomputed_layers_pay_for_their_sums_twice() -> None:
    bert = {"id": "bert", "batch": 8, "seq": 8, "mesh": [4, 1]}
    rows = list(run([{**bert, "model": "2 BERT layers h128 heads8, Adam"}, {**bert, "model": "2 BERT layers h128 heads8, remat, Adam"}]))
    once, twice = (r["found"]["objective"] for r in rows)
    assert once == pytest.approx(7 * 49153, rel=1e-3) and twice == pytest.approx(11 * 49153, rel=1e-3)  # 4 L - 1 and 6 L - 1


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: {"cases": c}, lambda c: {"shard_parallel": c}, lambda c: {"shard_parallel": {"cases": c}}])
def test_cases_come_in_lists_and_tables(wrap: Any) -> None:
    assert only(wrap([{**MLP, "id": "a", "option": "force_data_parallel", "objective": FORCED}]))["correct"]


def test_layers_are_grouped_by_bytes_within_eps() -> None:
    row = {"id": "E", "flops": [1] * 6, "out": [9, 9, 1, 9, 9, 9], "L": 2, "eps": 0.5, "groups": [3, 3], "cost": 1}
    assert only({"layer_clustering": [row]})["correct"]
    assert not only({"layer_clustering": [{**row, "eps": 0.0, "out": [9, 1, 9, 9, 9, 9]}]})["correct"]  # the cheap cut is too uneven


def test_stages_over_submeshes_are_the_best_of_all() -> None:
    cost = np.random.default_rng(3).random((4, 4, 2, 2))
    row = {"layers": 4, "hosts": 1, "dev": 4, "B": 5, "configs": 2, "submesh": [[1, 1], [1, 2]], "cost": cost.tolist(), "max_n_succ": 2}
    problem = _stage_dp.read(row)
    assert not isinstance(problem, str)
    assert problem.training()[0] == pytest.approx(min(_every(cost)))


def _every(cost: Any) -> list[float]:
    """All stages of four layers on four devices, by trying them all; no stage has more than two behind it."""
    found = []
    for parts in range(1, 4):
        for ends in itertools.combinations(range(1, 4), parts - 1):
            spans = list(itertools.pairwise((0, *ends, 4)))
            for chosen in itertools.product(range(2), repeat=parts):
                if sum(m + 1 for m in chosen) == 4:
                    costs = [cost[a, b - 1, m].min() for (a, b), m in zip(spans, chosen, strict=True)]
                    found.append(sum(costs) + 4 * max(costs))
    return found


def test_a_source_of_costs_is_evaluated_and_nothing_else() -> None:
    row = {"layers": 2, "hosts": 1, "dev": 1, "B": 2, "configs": 1, "submesh": [[1, 1]]}
    made = _stage_dp.read({**row, "cost_source": "np.random.seed(7); np.random.rand(2,2,1,1) * 2"})
    np.random.seed(7)
    assert not isinstance(made, str) and np.array_equal(made.cost, np.random.rand(2, 2, 1, 1) * 2)
    assert isinstance(_stage_dp.read({**row, "cost_source": "__import__('os').getcwd()"}), str)


def test_counts_are_compared_as_they_are_stated() -> None:
    assert counted({"all_reduce": 5}, "all_reduce+reduce_scatter==5; reduce_scatter==all_gather")
    assert not counted({"all_reduce": 6}, {"all_reduce": 5, "total": 5})
    assert not counted({"all_reduce": 1}, {"all_to_all": ">0"})
    assert counted({"all_reduce": 1}, {"sends": 2}) is None


def test_options_are_read_by_name() -> None:
    assert options({"option": "prefer_reduce_scatter, allow_all_gather=False"}) == {"prefer_reduce_scatter": True, "allow_all_gather": False}
    assert options({"method": "Zero2Parallel"}) == {"force_data_parallel": True, "prefer_reduce_scatter": True}
    assert options({"option": "hurry"}) == "hurry"


def test_orders_are_compared_clock_by_clock() -> None:
    table = [[[0, 0], None], [[1, 0], [0, 1]], [None, [0, 2]], [[0, 3], [1, 1]], [None, [1, 2]], [[1, 3], None], [[1, 4], [1, 5]]]
    told = {"schedules": {"rows": [], "table_1f1b_n2_m2": "clock by clock", "t": table}}
    assert only(told)["correct"]
    table[2] = [None, None]
    assert not only(told)["correct"]
