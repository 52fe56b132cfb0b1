"""Vertices added while running: the same as one batch, in values and in gradients, whatever the cuts between runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from examples.dynamic import sequence, tree_lstm
from tests.dynamic.graphs import assert_same, by_hand, graphs
from weft import dynamic
from weft.core.errors import StructureError


def test_runs_join_into_one_batch() -> None:
    torch.manual_seed(0)
    cell = tree_lstm.ChildSum(3, 4).double()
    model = tree_lstm.model(cell, 4)
    s = graphs(3, 12, ("dag", "tree", "chain"), "all", largest=8)
    x = torch.randn(s.vertices, 3, dtype=torch.float64, requires_grad=True)
    rng, grown = random.Random(0), model.grow()
    for v in range(s.vertices):
        grown.add([s.child[s.first[v] : s.first[v + 1]].tolist()], x[v : v + 1])
        if rng.random() < 0.3:
            grown.run()
    grown.run()
    assert grown.waiting == 0
    theirs = torch.stack([h for h, _ in by_hand(s, x, cell.alone)])
    assert_same(grown.output("h", range(s.vertices)), theirs, [x, *cell.parameters()])


def test_decoding_chooses_what_comes_next() -> None:
    """Greedy decoding of two requests at once against one at a time: the next input is chosen from the last output."""
    torch.manual_seed(0)
    cell, words = sequence.LSTM(5, 6), torch.randn(9, 5)
    model = sequence.lstm(cell)
    with torch.no_grad():
        grown = model.grow()
        last = grown.add([(), ()], words[[3, 7]])
        chosen: list[list[int]] = [[], []]
        for _ in range(6):
            grown.run()
            best = (grown.output("h", last) @ torch.randn(6, 9, generator=torch.Generator().manual_seed(1))).argmax(1)
            for request, word in zip(chosen, best.tolist(), strict=True):
                request.append(word)
            last = grown.add([(v,) for v in last], words[best])
        for request, start in zip(chosen, (3, 7), strict=True):
            assert request == _alone(cell, words, start)


def _alone(cell: sequence.LSTM, words: torch.Tensor, start: int) -> list[int]:
    project = torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    h, c = cell.alone(words[start], [])
    out = []
    for _ in range(6):
        out.append(int((h @ project).argmax()))
        h, c = cell.alone(words[out[-1]], [(h, c)])
    return out


def test_several_types_and_states() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def leaf(v: dynamic.Vertex) -> None:
        v.scatter(h=v.pull("x") @ weight)

    def join(v: dynamic.Vertex) -> None:
        h = torch.tanh(v.gather("h", reduce="sum"))
        v.scatter(h=h)
        v.push(y=2 * h)

    grown = dynamic.Model({"leaf": leaf, "join": join}, states={"h": 3}).grow()
    x = torch.randn(2, 3, dtype=torch.float64)
    leaves = grown.add([(), ()], x, kind="leaf")
    grown.run()
    (top,) = grown.add([leaves], kind="join")
    grown.run()
    expected = torch.tanh((x @ weight).sum(0))
    assert torch.allclose(grown.state("h", [top])[0], expected)
    assert torch.allclose(grown.output("y", [top])[0], 2 * expected)
    assert np.allclose(torch.autograd.grad(grown.output("y", [top]).sum(), weight)[0], torch.autograd.grad(2 * expected.sum(), weight)[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda g: g.add([(5,)]), "vertex 0 has child 5, which is not there"),
        (lambda g: g.add([()], torch.zeros(2, 3)), "input 'x' does not match the vertices added"),
        (lambda g: g.add([()], kind="node"), "no vertex function is called 'node'"),
    ],
)
def test_what_cannot_be_added(wrong: object, message: str) -> None:
    grown = tree_lstm.model(tree_lstm.ChildSum(3, 4), 4).grow()
    with pytest.raises(StructureError, match=message):
        wrong(grown)
