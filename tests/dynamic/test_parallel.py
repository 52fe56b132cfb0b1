"""Samples dealt out by predicted time, and gradients summed over ranks while the next ones are worked out."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench._trees import long_tailed_batch
from bench.dynamic import at_random, predicted
from examples.dynamic import tree_lstm
from tests.dynamic.graphs import graphs
from weft import dynamic
from weft.core.errors import StructureError
from weft.dynamic.balance import Sizes

COST = dynamic.Cost(level=0.1, vertex=0.01)


def test_every_sample_is_dealt_once() -> None:
    s = graphs(0, 101, ("tree", "chain", "single", "empty"), "all")
    for mixing in (0.0, 0.5, 1.0):
        steps = dynamic.assign(s, 3, 8, cost=COST, mixing=mixing)
        assert sorted(int(i) for step in steps for hand in step for i in hand) == list(range(101))
        assert all(len(step) == 3 for step in steps)


def test_balanced_steps_are_predicted_to_be_shorter_than_random_ones() -> None:
    s = dynamic.trees(long_tailed_batch(2 * 16 * 20, random.Random(0)))
    sizes = Sizes.of(s)
    balanced = predicted(sizes, dynamic.assign(s, 2, 16, cost=COST), COST)
    mixed = predicted(sizes, dynamic.assign(s, 2, 16, cost=COST, mixing=1.0), COST)
    chance = predicted(sizes, at_random(len(s), 2, 16), COST)
    assert chance / balanced > 1.15
    assert balanced < mixed < chance


def test_sizes_of_samples() -> None:
    sizes = Sizes.of(dynamic.join([dynamic.trees([((0, 1), 2), ()]), dynamic.Builder().sample().done(), dynamic.chains([4])]))
    assert sizes.levels.tolist() == [3, 1, 0, 4]
    assert sizes.vertices.tolist() == [5, 1, 0, 4]


def test_a_cost_is_fitted_to_measured_runs() -> None:
    rng = np.random.default_rng(0)
    runs = [(int(a), int(b), 0.2 * a + 0.03 * b + 1.5) for a, b in rng.integers(5, 500, (20, 2))]
    found = dynamic.Cost.fit(runs)
    assert (found.level, found.vertex, found.run) == pytest.approx((0.2, 0.03, 1.5))
    assert dynamic.Cost.fit([(a, b, 0.03 * b) for a, b, _ in runs]).level == pytest.approx(0, abs=1e-9)
    with pytest.raises(StructureError, match="too few runs to fit a cost"):
        dynamic.Cost.fit(runs[:2])
    with pytest.raises(StructureError, match="mixing is a share of the samples"):
        dynamic.assign(dynamic.chains([1]), 1, 1, mixing=2)


def _train(rank: int, world: int, store: str, replay: bool, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cell, x, s = _setting()
    model = tree_lstm.model(cell, 4).reduce_over()
    model.replay = replay
    hands = dynamic.assign(s, world, len(s) // world)[0]
    for _ in range(2):  # recorded, and replayed
        cell.zero_grad()
        model(s.take(hands[rank]), x).sum().div(len(s)).backward()
    answers.put((rank, [p.grad.tolist() for p in cell.parameters()]))
    dist.barrier()
    dist.destroy_process_group()


def _setting() -> tuple[tree_lstm.ChildSum, torch.Tensor, dynamic.Structure]:
    torch.manual_seed(0)
    cell = tree_lstm.ChildSum(3, 4).double()
    trees = [((0, 1), 2), 3, 4, (5, (6, 7)), 5, 1]  # one rank may get single leaves only, without recurrent products
    return cell, torch.randn(8, 3, dtype=torch.float64), dynamic.trees(trees)


@pytest.mark.parametrize("replay", [False, True], ids=["once", "replayed"])
def test_two_ranks_give_the_gradient_of_one(replay: bool, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_train, args=(r, 2, str(tmp_path / "store"), replay, answers), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    cell, x, s = _setting()
    tree_lstm.model(cell, 4)(s, x).sum().div(len(s)).backward()
    for grads in found.values():
        for mine, theirs in zip(grads, cell.parameters(), strict=True):
            assert torch.allclose(torch.tensor(mine, dtype=torch.float64), theirs.grad, atol=1e-12)
