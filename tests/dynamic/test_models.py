"""The ready models against a recursion over one vertex at a time: values and gradients, in float64, to 1e-9.

Each kind of model sees 50 random graphs, in batches: trees, DAGs with shared children, forests, chains, single vertices, empty ones;
`weft bench dynamic --equal` shows it 500.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from examples.dynamic import (
    dag_rnn,
    experts,
    gat,
    lattice_lstm,
    recursive_transformer,
    sequence,
    token_tree,
    tree_fc,
    tree_lstm,
)  # fmt: skip
from tests.dynamic.graphs import assert_same, by_hand, graphs
from weft import dynamic

HIDDEN = 4
ANY = ("tree", "binary", "dag", "forest", "chain", "single", "empty")
TWO = ("binary", "single", "empty")
ONE = ("chain", "single", "empty")
BATCHES = (1, 2, 7, 40)  # 50 graphs
CHAINS = [1, 2, 3, 60, 117, 200]


def child_sum() -> tuple[nn.Module, dynamic.Model]:
    cell = tree_lstm.ChildSum(3, HIDDEN).double()
    return cell, tree_lstm.model(cell, HIDDEN)


def binary() -> tuple[nn.Module, dynamic.Model]:
    cell = tree_lstm.Binary(3, HIDDEN).double()
    return cell, tree_lstm.model(cell, HIDDEN)


def lstm() -> tuple[nn.Module, dynamic.Model]:
    cell = sequence.LSTM(3, HIDDEN).double()
    return cell, sequence.lstm(cell)


def gru() -> tuple[nn.Module, dynamic.Model]:
    cell = sequence.GRU(3, HIDDEN).double()
    return cell, sequence.gru(cell)


def dag() -> tuple[nn.Module, dynamic.Model]:
    cell = dag_rnn.DagRNN(3, HIDDEN).double()
    return cell, dag_rnn.model(cell)


def transformer() -> tuple[nn.Module, dynamic.Model]:
    cell = recursive_transformer.Block(3, HIDDEN, heads=2).double()
    return cell, recursive_transformer.model(cell)


KINDS = {
    "child-sum tree-lstm, words at leaves": (child_sum, ANY, "leaves"),
    "child-sum tree-lstm, words at some": (child_sum, ANY, "some"),
    "binary tree-lstm": (binary, TWO, "leaves"),
    "lstm": (lstm, ONE, "all"),
    "gru": (gru, ONE, "all"),
    "dag-rnn": (dag, ANY, "all"),
    "recursive transformer": (transformer, ANY, "some"),
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_one_vertex_at_a_time(kind: str, fuse: bool) -> None:
    equals(kind, fuse, BATCHES)


def equals(kind: str, fuse: bool, batches: Sequence[int]) -> None:
    torch.manual_seed(0)
    make, shapes, words = KINDS[kind]
    cell, model = make()
    model.fuse = fuse
    for seed, count in enumerate(batches):
        s = graphs(seed, count, shapes, words, largest=6 if count > 20 else 12)
        _compare(cell, model, s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_replayed_equals_one_vertex_at_a_time(kind: str) -> None:
    """Graphs put into the rows of a template recorded for other graphs; spare rows change nothing."""
    torch.manual_seed(0)
    make, shapes, words = KINDS[kind]
    cell, model = make()
    model.replay = True
    for seed, count in enumerate((40, 30, 20, 38, 25)):
        _compare(cell, model, graphs(100 + seed, count, shapes, words, largest=6))
    recorded = [t for templates in model._made.templates.values() for t in templates.kept]
    assert 1 <= len(recorded) < 5


@pytest.mark.parametrize("make", [lstm, gru, child_sum, dag])
def test_long_chains(make: object) -> None:
    torch.manual_seed(0)
    cell, model = make()
    _compare(cell, model, dynamic.chains(CHAINS))


def _compare(cell: nn.Module, model: dynamic.Model, s: dynamic.Structure) -> None:
    x = torch.randn(max(s.vertices, 1), 3, dtype=torch.float64, requires_grad=True)
    every = [h if isinstance(h, torch.Tensor) else h[0] for h in by_hand(s, x, cell.alone)]
    theirs = torch.stack(every) if every else x.new_zeros(0, HIDDEN) + 0 * x.sum()
    assert_same(model(s, x, at="all"), theirs, [x, *cell.parameters()])


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_tree_fc(fuse: bool) -> None:
    torch.manual_seed(0)
    cell = tree_fc.TreeFC(HIDDEN).double()
    model = tree_fc.model(cell, HIDDEN)
    model.fuse = fuse
    rng = random.Random(0)

    def tree(leaves: int, start: int) -> object:
        cut = rng.randint(1, leaves - 1) if leaves > 1 else 0
        return start if leaves == 1 else (tree(cut, start), tree(leaves - cut, start + cut))

    for count in BATCHES:
        samples = [tree(rng.randint(1, 7), 0) if rng.random() < 0.8 else tree_fc.complete(8) for _ in range(count)]
        s = dynamic.trees(samples, leaf="leaf", inner="inner")
        x = torch.randn(8, HIDDEN, dtype=torch.float64, requires_grad=True)
        theirs = torch.stack(by_hand(s, x, cell.alone))[s.roots]
        assert_same(model(s, x), theirs, [x, *cell.parameters()])


def test_lattice_lstm() -> None:
    torch.manual_seed(0)
    cell = lattice_lstm.Lattice(3, HIDDEN).double()
    model, rng = lattice_lstm.model(cell), random.Random(0)
    for count in BATCHES:
        sentences = [_sentence(rng) for _ in range(count)]
        rows = [length + len(words) for length, words in sentences]
        x = torch.randn(sum(rows), 3, dtype=torch.float64, requires_grad=True)
        s = lattice_lstm.graph(sentences)
        last = [int(end) - 1 for end in s.sample[1:]]
        parts = zip(x.split(rows), sentences, strict=True)
        theirs = torch.stack([cell.sentence(p[:n], words, p[n:]) for p, (n, words) in parts])
        assert_same(model(s, x, at=last), theirs, [x, *cell.parameters()])


def _sentence(rng: random.Random) -> tuple[int, list[tuple[int, int]]]:
    length = rng.randint(1, 7)
    spans = [(a, b) for a in range(length) for b in range(a + 1, min(a + 4, length))]
    return length, rng.sample(spans, min(len(spans), rng.randint(0, 4)))


def test_experts() -> None:
    torch.manual_seed(0)
    layer = experts.Experts(HIDDEN, 6, experts=5, top=2).double()
    for tokens in BATCHES:
        x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
        theirs = torch.stack([layer.alone(t) for t in x])
        assert_same(layer(x), theirs, [x, *layer.parameters()])


def test_token_trees() -> None:
    torch.manual_seed(0)
    net, rng = token_tree.Decoder(11, 8, heads=2, layers=2).double(), random.Random(0)
    for count in (1, 9, 40, 200, 250):
        requests = [[-1, *(rng.randint(0, v) for v in range(rng.randint(0, 3)))] for _ in range(count)]
        tokens = torch.randint(11, (sum(map(len, requests)),))
        logits, start, theirs = net.verify(requests, tokens), 0, []
        for parents in requests:
            paths = token_tree._paths(parents)
            theirs += [net.along(tokens[[start + p for p in path]])[-1] for path in paths]
            start += len(parents)
        used = [p for n, p in net.named_parameters() if "position" not in n]
        assert_same(logits, torch.stack(theirs), used)


def test_accepting_follows_the_drafts_that_greedy_decoding_would_choose() -> None:
    parents, tokens = [-1, 0, 1, 1, 2, 4], [5, 6, 7, 8, 9, 1]
    assert token_tree.accept(parents, tokens, best=[6, 7, 9, 0, 3, 0], known=2) == [2, 4]
    assert token_tree.accept(parents, tokens, best=[6, 0, 9, 0, 3, 0], known=2) == []


@pytest.mark.parametrize("example", [tree_lstm, tree_fc, sequence, dag_rnn, lattice_lstm, recursive_transformer, experts, token_tree])
def test_the_example_runs(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    said = capsys.readouterr().out
    if "largest difference" in said:
        assert float(said.split("largest difference:")[1].split()[0]) < 1e-6


@pytest.mark.parametrize("fuse", [False, None], ids=["ops", "kernels"])
def test_attention_over_graphs_equals_its_plain_form(fuse: bool | None) -> None:
    """Its output is a view of a value that gradients read too, which must be there when the forward pass ends."""
    torch.manual_seed(0)
    net = gat.GAT(8, 2, layers=2).double()
    net.net.fuse = fuse
    edges = torch.cat([torch.randint(0, 20, (2, 60)), torch.arange(20).expand(2, 20)], 1)
    x = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for out in (net.net(gat.unrolled(20, edges.numpy(), 2), x, at=range(40, 60)), net.plain(x, *edges)):
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, *net.parameters()])])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)
