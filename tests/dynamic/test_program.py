"""Vertex functions as programs: written out and back, rewritten, and sharded over two ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from examples.dynamic import sequence, tree_lstm
from tests.dynamic.graphs import assert_same, graphs
from weft import dynamic
from weft.core.errors import StructureError
from weft.core.layout import Mesh, S
from weft.interp import run_global
from weft.ops.linalg import matmul
from weft.ops.shape import concat, narrow

X = {"dtype": torch.float64}


def child_sum() -> tuple[nn.Module, dynamic.Model, dynamic.Structure]:
    cell = tree_lstm.ChildSum(3, 4).double()
    return cell, tree_lstm.model(cell, 4), graphs(0, 12, ("tree", "dag", "single", "chain"), "some")


def lstm() -> tuple[nn.Module, dynamic.Model, dynamic.Structure]:
    cell = sequence.LSTM(3, 4).double()
    return cell, sequence.lstm(cell), dynamic.chains([3, 1, 5, 2])


def peaked() -> tuple[nn.Module, dynamic.Model, dynamic.Structure]:
    """Each state over its largest part, which ranks that hold parts of it find together."""

    class Peaked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.before = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, v: dynamic.Vertex) -> None:
            h = torch.exp(torch.tanh(self.word(v.pull("x")) + self.before(v.gather("h", 0))))
            h = h / h.amax(1, keepdim=True)
            v.scatter(h=h)
            v.push(h=h)

    cell = Peaked().double()
    return cell, dynamic.Model(cell, {"h": 4}), dynamic.chains([3, 1, 5, 2])


MODELS = {"lstm": lstm, "child_sum": child_sum, "peaked": peaked}


@pytest.mark.parametrize("make", [child_sum, lstm])
def test_a_function_written_out_and_run_again_is_the_same(make: Any) -> None:
    torch.manual_seed(0)
    cell, model, s = make()
    x = torch.randn(s.vertices, 3, requires_grad=True, **X)
    written = dynamic.program(model, x)
    again = dynamic.Model(written, model.states)
    assert_same(again(s, x, at="all"), model(s, x, at="all"), [x, *cell.parameters()])


def test_a_program_computes_what_the_cell_does_on_one_vertex() -> None:
    torch.manual_seed(0)
    cell, model, _ = lstm()
    x = torch.randn(5, 3, **X)
    written = dynamic.program(model, x)
    assert {n.removeprefix("param.") for n in written.weights} == {"word.weight", "word.bias", "before.weight", "before.bias"}
    assert [n.op.name for n in written.program.find_all("matmul")] == ["matmul", "matmul"]
    small = {**{n: w.detach() for n, w in written.weights.items()}, "batch.pull_x": x[:1]}
    small |= {"batch.slot_h_0": torch.zeros(1, 4, **X), "batch.slot_c_0": torch.zeros(1, 4, **X)}
    h, c = cell.alone(x[0], [])
    cut = run_global(written.program, {k: v.expand(1_000_003, *v.shape[1:]) if k.startswith("batch") else v for k, v in small.items()})
    assert torch.allclose(cut["out.state_h"][0], h)
    assert torch.allclose(cut["out.state_c"][-1], c)


def test_a_rewritten_program_runs_in_its_place() -> None:
    """Two products with the same operand become one: concat of the weights, then two parts of the result."""
    torch.manual_seed(0)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, v: dynamic.Vertex) -> None:
            below = v.gather("h", 0)
            h = torch.tanh(v.pull("x") + self.a(below)) * torch.sigmoid(self.b(below))
            v.scatter(h=h)
            v.push(h=h)

    cell = Two().double()
    model, s, x = dynamic.Model(cell, {"h": 4}), dynamic.chains([4, 2]), torch.randn(6, 4, requires_grad=True, **X)
    written = dynamic.program(model, x)
    first, second = written.program.find_all("matmul")
    both = matmul(first.args[0], concat([first.args[1], second.args[1]], dim=1))
    merged = written.program.rewrite({first: narrow(both, dim=1, start=0, stop=4), second: narrow(both, dim=1, start=4, stop=8)}, "merge")
    again = dynamic.Model(written.with_program(merged), model.states)
    assert len(merged.find_all("matmul")) == 1
    assert_same(again(s, x, at="all"), model(s, x, at="all"), [x, *cell.parameters()])


def test_a_program_of_another_function_is_refused() -> None:
    _, model, _ = lstm()
    _, other, _ = child_sum()
    x = torch.randn(2, 3, **X)
    with pytest.raises(StructureError, match="not one of the same vertex function"):
        dynamic.program(model, x).with_program(dynamic.program(other, x).program)
    with pytest.raises(StructureError, match="no weight is called 'middle'"):
        dynamic.shard(dynamic.program(model, x), Mesh(tp=2), {}, {"middle": S(0)}, 0)


PLACES = {
    "lstm": {"word.weight": S(0, within=4), "word.bias": S(0, within=4), "before.weight": S(0, within=4), "before.bias": S(0, within=4)},
    "child_sum": {
        "word.weight": S(0, within=4), "word.bias": S(0, within=4), "below.weight": S(0, within=4), "forget.weight": S(0),
        "forget.bias": S(0),
    },
    "peaked": {"word.weight": S(0), "word.bias": S(0), "before.weight": S(0), "before.bias": S(0)},
}  # fmt: skip


def _sharded(rank: int, store: str, name: str, answers: Any) -> None:
    """One rank: forward and backward on its share, then the whole of everything, gathered."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    _, model, s = MODELS[name]()
    x = torch.randn(s.vertices, 3, **X).requires_grad_()
    function, states = dynamic.shard(dynamic.program(model, x), Mesh(tp=2), dict.fromkeys(model.states, S(0)), PLACES[name], rank)
    out = dynamic.Model(function, states)(s, x, at="all")
    out.square().sum().backward()
    shares = {n.removeprefix("param."): (tuple(w.shape), w.grad.tolist()) for n, w in function.weights.items()}
    answers.put((rank, states, out.tolist(), x.grad.tolist(), shares))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", PLACES)
def test_two_ranks_share_the_weights_of_a_vertex_function(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_sharded, args=(r, str(tmp_path / "store"), name, answers), daemon=True) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        found = sorted((answers.get(timeout=90) for _ in ranks), key=lambda a: a[0])
    finally:
        for process in ranks:
            process.join(5)
            process.kill()
    torch.manual_seed(0)
    cell, model, s = MODELS[name]()
    x = torch.randn(s.vertices, 3, **X).requires_grad_()
    out = model(s, x, at="all")
    out.square().sum().backward()
    for rank, states, values, dx, shares in found:
        assert states == dict.fromkeys(model.states, (2,))
        assert torch.allclose(torch.tensor(values, **X), out, atol=1e-12)
        assert torch.allclose(torch.tensor(dx, **X), x.grad, atol=1e-12)
        for weight, (shape, grad) in shares.items():
            whole = cell.get_parameter(weight).grad
            mine = whole.reshape(-1, 4, *whole.shape[1:])[:, 2 * rank : 2 * rank + 2].reshape(shape)
            assert torch.allclose(torch.tensor(grad, **X), mine, atol=1e-12), weight
