"""A model with a dynamic part under `parallelize`: real processes against one process of torch, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention  # so that capture hears it, here in one trace inside another
from torch import Tensor, nn

import weft
from examples.dynamic import tree_lstm
from tests.ranks import run_ranks
from weft import dynamic
from weft.core.errors import WeftError
from weft.dynamic.packed import pack, unpack
from weft.dynamic.part import _hand
from weft.ops.rounds import HANDS

WORDS, HIDDEN = 16, 8


class Net(nn.Module):
    """A Tree-LSTM encoder, and a transformer over pairs of trees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.tree = dynamic.Model(tree_lstm.ChildSum(HIDDEN, HIDDEN), states={"h": HIDDEN, "c": HIDDEN})
        self.head = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(HIDDEN, 3)

    def forward(self, graphs: Any, ids: Tensor) -> Tensor:
        roots = self.tree(graphs, self.embed(ids))
        return self.out(self.head(roots.reshape(-1, 2, HIDDEN))).flatten(0, 1)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["graphs"], batch["ids"]), batch["y"])


def trees(seed: int, samples: int = 8) -> dict[str, Any]:
    """Trees of unequal sizes: the last are the largest."""
    rng, leaves = random.Random(seed), 0

    def tree(depth: int) -> Any:
        nonlocal leaves
        if depth == 0 or rng.random() < 0.2:
            leaves += 1
            return leaves - 1
        return tuple(tree(depth - 1) for _ in range(rng.randint(1, 3)))

    graphs = dynamic.trees([(tree(1 + i // 2),) for i in range(samples)])
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (256,), generator=gen)
    return {"graphs": graphs, "ids": ids, "y": torch.randint(0, 3, (samples,), generator=gen)}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def _torch(batches: list[Any]) -> tuple[list[float], list[Tensor]]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("plan", "ranks"), [("dp2", 2), ("dp2,tp2", 4), ("dp2,zero3", 2), ("tp2", 2)])
def test_ranks_equal_one_process_of_torch(plan: str, ranks: int, tmp_path: Path) -> None:
    batches = [trees(0), trees(1)]
    losses, parameters = _torch(batches)

    def job(rank: int) -> Any:
        model = _model()
        step = weft.parallelize(model, loss, torch.optim.AdamW(model.parameters(), 1e-2), trees(0), plan, check=rank >= 0)
        for batch, want in zip(batches, losses, strict=True):
            assert float(step(batch)) == pytest.approx(want, abs=1e-10)
        step.sync_model()
        for mine, theirs in zip(model.parameters(), parameters, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-9)
        return next(r.last.structure.vertices for r in weft.ops.rounds.RUNNERS.values() if r.last is not None)  # others are of other tests

    said = run_ranks(ranks, job, tmp_path)
    sizes = [int(x) for x in said.values()]
    assert sum(sizes) == trees(1)["graphs"].vertices, "every sample is run by one rank"
    largest = int(np.diff(trees(1)["graphs"].sample).max())
    assert max(sizes) <= max(largest, 1.5 * min(sizes)), "work is balanced, though the last samples are the largest"


def test_samples_are_dealt_once_to_any_number_of_ranks() -> None:
    s = trees(3, 21)["graphs"]
    for ranks in (1, 2, 3, 4, 6, 11):
        cuts = torch.arange(HANDS).tensor_split(ranks)
        hands = [_hand(s, c) for c in cuts]
        assert sorted(np.concatenate(hands).tolist()) == list(range(21))


def test_graphs_are_a_tensor_and_graphs_again() -> None:
    s = dynamic.join([trees(5)["graphs"], dynamic.chains([4, 1]), dynamic.edges([(3, [(0, 2), (1, 2), (0, 1)])])])
    again = unpack(pack(s), s.kinds)
    for name in ("first", "child", "row", "sample", "kind"):
        assert np.array_equal(getattr(s, name), getattr(again, name)), name
    drawn = torch.randint(0, 9, (30, 40), generator=torch.Generator().manual_seed(0))
    assert len(unpack(drawn, ("a", "b"))) == 30, "any numbers are some graphs: plans are tried on drawn ones"


def test_one_process_in_micro_batches_and_over_sizes() -> None:
    batches = [trees(0), trees(1), trees(2, 6)]
    losses, _ = _torch(batches)
    for plan in ("dp1", "micro2"):
        model = _model()
        step = weft.parallelize(model, loss, torch.optim.AdamW(model.parameters(), 1e-2), batches[0], plan)
        assert [float(step(b).detach()) for b in batches] == pytest.approx(losses, abs=1e-10), plan


def test_a_part_that_a_step_cannot_hold_is_refused() -> None:
    batch = trees(0)
    two = dynamic.edges([(3, [(0, 1), (0, 2)])])

    def refused(words: str, model: nn.Module, example: Any) -> None:
        with pytest.raises(WeftError, match=words):
            weft.parallelize(model, loss, torch.optim.SGD(model.parameters(), 0.1), example, "dp1")

    refused("sample 0 of a batch has 2 roots", _model(), {**batch, "graphs": two, "y": batch["y"][:1]})
    at = _model()
    at.forward = lambda graphs, ids: at.out(at.tree(graphs, at.embed(ids), at="all"))  # type: ignore[method-assign]
    refused("a step takes the outputs of graphs at their roots", at, batch)
    peeps = _model()
    peeps.forward = lambda graphs, ids: peeps.out(peeps.tree(graphs, peeps.embed(ids))) / graphs.vertices  # type: ignore[method-assign]
    refused("a step reads .vertices of the graphs", peeps, batch)
    drops = _model()
    drops.tree.cells["vertex"].word = nn.Sequential(drops.tree.cells["vertex"].word, nn.Dropout(0.5))
    refused("draws random numbers inside a step", drops, batch)


@pytest.mark.parametrize("replay", [False, True], ids=["once", "replayed"])
def test_a_step_runs_where_tensors_are_made_elsewhere(replay: bool) -> None:
    """Steps on accelerators run where new tensors are theirs: what a part keeps on the host says so. Replayed, it has copies of the weights."""
    model, batches = _model(), [trees(0), trees(1), trees(0)]
    model.tree.replay = replay
    losses, _ = _torch(batches)
    step = weft.parallelize(model, loss, torch.optim.AdamW(model.parameters(), 1e-2), batches[0], "dp1")
    rounds = next(n for n in step.program.nodes if n.op.name == "rounds")
    run = weft.ops.rounds.RUNNERS[rounds.attr("runner")]
    forward, backward = run.forward, run.backward

    def elsewhere(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with torch.device("meta"):
                return function(*args)

        return call

    run.forward, run.backward = elsewhere(forward), elsewhere(backward)  # type: ignore[method-assign]
    try:
        assert [float(step(b).detach()) for b in batches] == pytest.approx(losses, abs=1e-10)
    finally:
        run.forward, run.backward = forward, backward  # type: ignore[method-assign]
