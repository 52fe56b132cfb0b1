"""Vertex functions: what is hoisted, what is specialised away, what is refused, and kernels in every language."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from examples.dynamic import sequence, tree_lstm
from tests.ranks import ROOT, interpreted
from weft import dynamic
from weft.core.errors import StructureError
from weft.dynamic.cell import Cell
from weft.dynamic.kernel import Kernel


def cells(model: dynamic.Model, s: dynamic.Structure, x: torch.Tensor) -> dict[tuple[str, bool], Cell]:
    variant = model._variant({"x": x}, s)
    return model._plan(variant, dynamic.Schedule(s, variant.reads), {"x": x}).cells


def products(cell: Cell, phase: str) -> int:
    return sum(step.op.name == "matmul" for step in cell.steps[phase] if not isinstance(step, Kernel))


def test_only_what_the_recurrence_forces_runs_by_rounds() -> None:
    """LSTM: the input product runs once, one recurrent product per round each way, and no weight gradient in any round."""
    cell = sequence.LSTM(3, 4)
    found = cells(sequence.lstm(cell), dynamic.chains([3, 2]), torch.randn(5, 3))["vertex", True]
    assert {p: products(found, p) for p in ("eager", "rounds", "back", "after")} == {"eager": 1, "rounds": 1, "back": 1, "after": 0}
    assert products(found, "sums") == 2
    kernels = {p: sum(isinstance(s, Kernel) for s in found.steps[p]) for p in ("rounds", "back")}
    assert kernels == {"rounds": 1, "back": 1}


def test_leaves_lose_the_recurrent_product_and_inner_vertices_the_input_product() -> None:
    cell = tree_lstm.ChildSum(3, 4)
    found = cells(tree_lstm.model(cell, 4), dynamic.trees([((0, 1), 2)]), torch.randn(3, 3))
    leaf, inner = found["vertex", False], found["vertex", True]
    assert [n.shape[1:] for n in leaf.steps["eager"] if not isinstance(n, Kernel)] == [(12,), (4,)]
    assert leaf.steps["rounds"] == []
    assert products(inner, "eager") == 0
    assert products(inner, "rounds") == 2


def test_a_product_with_a_gathered_state_is_done_where_the_state_is_made() -> None:
    """gather(h) @ W = gather(h @ W): no product has one row per edge."""
    cell = tree_lstm.ChildSum(3, 4)
    model = tree_lstm.model(cell, 4)
    s, x = dynamic.trees([((0, 1), 2)]), torch.randn(3, 3)
    assert "h@0" in model._variant({"x": x}, s).states


ZEROS = torch.zeros(12, 3)
REFUSED: dict[str, tuple[Callable[[dynamic.Vertex], None], str]] = {
    "mixing rows by a mean": (lambda v: v.scatter(h=v.pull("x") - v.pull("x").mean(0)), "mixes vertices: 'h' of one depends on the others"),
    "the number of rows": (lambda v: v.scatter(h=v.pull("x") / v.pull("x").shape[0]), "the number of vertices or edges read as a number"),
    "the number of rows, added": (lambda v: v.scatter(h=v.pull("x") + float(len(v.pull("x")))), "the number of vertices or edges read as a number"),
    "rows turned round": (lambda v: v.scatter(h=v.pull("x").flip(0)), "mixes vertices: 'h' of one depends on the others"),
    "mixing rows in place": (lambda v: v.scatter(h=v.pull("x").cumsum(0)), "mixes vertices: 'h' of one depends on the others in its batch"),
    "an unknown state": (lambda v: v.scatter(c=v.pull("x")), "scatters an unknown state 'c'"),
    "a wrong shape": (
        lambda v: v.scatter(h=v.pull("x")[:, :2]),
        r"scatters state 'h' in the wrong shape.*needed  \[vertices, 3\].*found   \[vertices, 2\]",
    ),
    "an unknown input": (lambda v: v.scatter(h=v.pull("y")), "pulls an input that is not there: 'y'"),
    "a state never scattered": (lambda v: v.scatter(h=v.gather("c", 0)), "gathers a state that is not there: 'c'"),
    "another dtype": (lambda v: v.scatter(h=v.pull("x").double()), "mixes dtypes in state 'h'"),
    "an output without rows": (lambda v: v.push(y=torch.ones(3)), "pushes 'y' without one row per vertex"),
    "two sets of children": (
        lambda v: v.scatter(h=v.gather("h", reduce="sum") + v.gather("h", reduce="sum", after=1)), "two different sets of children",
    ),
    "a child read twice": (
        lambda v: v.scatter(h=v.gather("h", 1) + v.gather("h", reduce="sum", after=1)), "a child both by itself and together with others.*needed  after=2",
    ),
    "rows one by one": (lambda v: v.scatter(h=torch.stack([row * 2 for row in v.pull("x")])), "goes through its vertices one by one"),
    "an op without a batched form": (
        lambda v: v.scatter(h=torch.vmap(lambda x: torch.lstm_cell(x[None], (x[None], x[None]), ZEROS, ZEROS)[0][0])(v.pull("x"))),
        "torch.vmap has no way to do an op for many vertices at once.*found   Batching rule not implemented for aten::lstm_cell",
    ),
    "an unknown reduction": (lambda v: v.scatter(h=v.gather("h", reduce="median")), "unknown reduction over children"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_function_that_cannot_be_batched_is_refused(what: str) -> None:
    function, message = REFUSED[what]
    with pytest.raises(StructureError, match="(?s)" + message):
        dynamic.Model(function, states={"h": 3})(dynamic.chains([2]), torch.randn(2, 3))


def test_inference_keeps_nothing_for_a_backward() -> None:
    cell = tree_lstm.ChildSum(3, 4)
    model = tree_lstm.model(cell, 4)
    with torch.no_grad():
        out = model(dynamic.trees([((0, 1), 2)]), torch.randn(3, 3))
    assert not out.requires_grad
    assert all(not p.backward for vs in model._made.variants.values() for v in vs for p in v.plans.values())
    assert [len(pool._free) for pool in model._made.pools.values()] == [1]


def test_memory_is_used_again() -> None:
    cell, x = tree_lstm.ChildSum(3, 4), torch.randn(3, 3)
    model, s = tree_lstm.model(cell, 4), dynamic.trees([((0, 1), 2)])
    for _ in range(3):
        model(s, x).sum().backward()
    kept = model(s, x)  # a result that is dropped without a backward gives its memory back too
    del kept
    assert [len(pool._free) for pool in model._made.pools.values()] == [1]


def test_two_results_may_be_alive_at_once() -> None:
    torch.manual_seed(0)
    cell, x = tree_lstm.ChildSum(3, 4).double(), torch.randn(3, 3, dtype=torch.float64)
    model = tree_lstm.model(cell, 4)
    a, b = model(dynamic.trees([((0, 1), 2)]), x), model(dynamic.trees([(0, 1), 2]), x)
    both = torch.autograd.grad(a.sum() + b.sum(), list(cell.parameters()))
    one = torch.autograd.grad(model(dynamic.trees([((0, 1), 2)]), x).sum(), list(cell.parameters()))
    two = torch.autograd.grad(model(dynamic.trees([(0, 1), 2]), x).sum(), list(cell.parameters()))
    for p, q, r in zip(both, one, two, strict=True):
        assert torch.allclose(p, q + r, atol=1e-12)


def test_a_model_moves_to_another_dtype() -> None:
    cell = tree_lstm.ChildSum(3, 4)
    model, s, x = tree_lstm.model(cell, 4), dynamic.trees([((0, 1), 2)]), torch.randn(3, 3)
    single = model(s, x)
    double = model.double()(s, x.double())
    assert double.dtype is torch.float64
    assert torch.allclose(single.double(), double, atol=1e-6)


def test_dropout_runs_inside_a_vertex_function() -> None:
    class Noisy(nn.Module):
        def forward(self, v: dynamic.Vertex) -> None:
            h = nn.functional.dropout(v.pull("x") + v.gather("h", 0), 0.5)
            v.scatter(h=h)
            v.push(h=h)

    x = torch.ones(50, 8, requires_grad=True)
    out = dynamic.Model(Noisy(), states={"h": 8})(dynamic.chains([1] * 50), x)
    out.sum().backward()
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, (out > 0) * 2.0)


SCRIPT = """
import sys; sys.path.insert(0, {root!r})
import torch
from examples.dynamic import dag_rnn, lattice_lstm, tree_lstm
from tests.dynamic.graphs import by_hand, graphs
from weft import dynamic
torch.manual_seed(0)
for cell, model in ((c := tree_lstm.ChildSum(3, 5), tree_lstm.model(c, 5)), (d := dag_rnn.DagRNN(3, 5), dag_rnn.model(d))):
    model.target = "triton"
    for replay in (False, True):
        model.replay = replay
        s = graphs(1, 4, ("tree", "dag", "single"), "all", largest=5)
        x = torch.randn(s.vertices, 3, requires_grad=True)
        ours = model(s, x, at="all")
        theirs = torch.stack([h if isinstance(h, torch.Tensor) else h[0] for h in by_hand(s, x, cell.alone)])
        inputs = [x, *cell.parameters()]
        pairs = zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs))
        print(max(float((a - b).abs().max()) for a, b in [(ours, theirs), *pairs]))
"""


def test_kernels_in_triton_compute_the_same() -> None:
    """In Triton's interpreter, which a process must choose before it imports triton."""
    printed = interpreted(SCRIPT.format(root=str(ROOT)), seconds=100)
    assert all(float(line) < 1e-5 for line in printed.split()), printed
