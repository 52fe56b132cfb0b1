"""Recursive functions decorated and not: the same values, the same gradients, and calls that share batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.dynamic import tree_lstm
from tests.dynamic.graphs import assert_same
from weft import dynamic
from weft.core.errors import StructureError
from weft.dynamic import lazy


def trees(seed: int, count: int) -> list[Any]:
    rng = random.Random(seed)

    def tree(leaves: int, start: int) -> Any:
        cut = rng.randint(1, leaves - 1) if leaves > 1 else 0
        return start if leaves == 1 else (tree(cut, start), tree(leaves - cut, start + cut))

    return [tree(rng.randint(1, 7), 0) for _ in range(count)]


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def test_a_recursion_over_trees() -> None:
    torch.manual_seed(0)
    cell, x = tree_lstm.ChildSum(3, 4).double(), torch.randn(8, 3, dtype=torch.float64, requires_grad=True)

    def encoder(decorate: Callable[..., Any]) -> Callable[[Any], Any]:
        @decorate
        def encode(tree: Any) -> tuple[Tensor, Tensor]:
            return cell.alone(x[tree], []) if isinstance(tree, int) else cell.alone(None, [encode(t) for t in tree])

        return encode

    ours, theirs = encoder(dynamic.batched), encoder(plain)
    for seed in range(3):
        batch = trees(seed, 20)
        assert_same(torch.stack([ours(t)[0] for t in batch]), torch.stack([theirs(t)[0] for t in batch]), [x, *cell.parameters()])


def test_a_decorated_cell_is_learnt_once() -> None:
    torch.manual_seed(0)
    cell, x, ran = tree_lstm.ChildSum(3, 4).double(), torch.randn(8, 3, dtype=torch.float64), [count(), count()]

    @dynamic.batched
    def leaf(word: Tensor) -> tuple[Tensor, Tensor]:
        next(ran[0])
        return cell.alone(word, [])

    @dynamic.batched
    def inner(h0: Tensor, c0: Tensor, h1: Tensor, c1: Tensor) -> tuple[Tensor, Tensor]:
        next(ran[1])
        return cell.alone(None, [(h0, c0), (h1, c1)])

    def encode(t: Any) -> Any:
        return leaf(x[t]) if isinstance(t, int) else inner(*encode(t[0]), *encode(t[1]))

    def alone(t: Any) -> Any:
        return cell.alone(x[t], []) if isinstance(t, int) else cell.alone(None, [alone(t[0]), alone(t[1])])

    batch = trees(5, 30)
    assert_same(torch.stack([encode(t)[0] for t in batch]), torch.stack([alone(t)[0] for t in batch]), list(cell.parameters()))
    assert [next(c) for c in ran] == [1, 1]


def test_calls_share_batches() -> None:
    torch.manual_seed(0)
    join = nn.Linear(6, 3)

    @dynamic.batched
    def step(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(join(torch.cat([a, b])))

    rows = [torch.randn(3) for _ in range(8)]
    seen: list[dynamic.Schedule] = []
    run = dynamic.Model.forward

    def spy(self: dynamic.Model, graphs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.schedule(graphs, args[0]))
        return run(self, graphs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic.Model, "forward", spy)
        lower = [step(rows[i], rows[i + 1]) for i in range(7)]
        upper = [step(lower[i], lower[i + 1]) for i in range(6)]
        total = torch.stack(upper).sum()
    assert [r.stop - r.start for r in seen[0].rounds] == [7, 6]
    low = [torch.tanh(join(torch.cat([rows[i], rows[i + 1]]))) for i in range(7)]
    high = [torch.tanh(join(torch.cat([low[i], low[i + 1]]))) for i in range(6)]
    assert torch.allclose(total, torch.stack(high).sum(), atol=1e-6)


def test_a_decision_needs_numbers_and_runs_what_is_pending() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()

    def walker(decorate: Callable[..., Any]) -> Callable[..., Any]:
        @decorate
        def walk(x: Tensor, left: int) -> Tensor:
            h = torch.tanh(layer(x))
            if h.sum() > 0:  # numbers are needed here
                h = h * 2
            return h if left == 0 else walk(h[:3] + x, left - 1)

        return walk

    xs = torch.randn(6, 3, dtype=torch.float64)
    ours = torch.stack([walker(dynamic.batched)(x, 3) for x in xs])
    theirs = torch.stack([walker(plain)(x, 3) for x in xs])
    assert_same(ours, theirs, list(layer.parameters()))


def test_results_know_their_shape_before_they_have_numbers() -> None:
    layer = nn.Linear(3, 5)

    @dynamic.batched
    def f(x: Tensor) -> Tensor:
        return layer(x)

    out = f(torch.ones(3))
    assert isinstance(out, lazy.Lazy)
    assert out.value is None
    assert out.shape == (5,)
    assert repr(out) == "Lazy([5], torch.float32)"
    assert torch.allclose(out.sum(), layer(torch.ones(3)).sum())
    assert out.value is not None


def test_several_results_and_settings() -> None:
    @dynamic.batched
    def f(x: Tensor, scale: float) -> list[Tensor]:
        return [x * scale, torch.cat([x, x])[1:]]

    a, b = f(torch.ones(2), 3.0)
    c, _ = f(torch.ones(2), 4.0)
    assert torch.equal(torch.stack([a, c]), torch.tensor([[3.0, 3.0], [4.0, 4.0]]))
    assert b.tolist() == [1.0, 1.0, 1.0]


def test_a_function_must_return_what_it_computed() -> None:
    @dynamic.batched
    def f(x: Tensor) -> Any:
        return {"y": x + 1}

    with pytest.raises(StructureError, match="f does not return what it computed"):
        f(torch.ones(2))


def test_an_error_inside_a_call_leaves_nothing_open() -> None:
    @dynamic.batched
    def f(tree: Any) -> Tensor:
        raise ValueError("no such tree")

    with pytest.raises(ValueError, match="no such tree"):
        f((1, 2))
    assert lazy._recorder.open == []


class Reader(nn.Module):
    """A cell that reads numbers, a tensor and its mode of training of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.rows, self.ran = nn.Linear(3, 3).double(), 1.0, torch.ones(3, dtype=torch.float64), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) * self.scale) + self.rows * 2 + float(self.training)


def test_a_learnt_call_reads_python_again() -> None:
    torch.manual_seed(0)
    reader, x = Reader(), torch.randn(3, dtype=torch.float64)
    ours = dynamic.batched(reader.forward)

    def replaced() -> None:
        reader.layer.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    changes = [lambda: None, lambda: setattr(reader, "scale", 2.0), lambda: reader.rows.add_(1), reader.eval, replaced]
    changes += [lambda: setattr(reader, "rows", torch.zeros(3, dtype=torch.float64)), reader.train]
    for change in changes:
        change()
        assert torch.allclose(ours(x) * 1, reader(x))


def test_what_a_call_does_besides_is_done_each_time() -> None:
    done = list[int]()

    @dynamic.batched
    def count_and_draw(x: Tensor) -> Tensor:
        done.append(1)
        return x + torch.randn(2)

    a, b = count_and_draw(torch.ones(2)), count_and_draw(torch.ones(2))
    assert len(done) == 2
    assert not torch.equal(a * 1, b * 1)


def test_numbers_of_another_type_are_other_numbers() -> None:
    whole = torch.tensor([1, 2])
    one, real, true = (dynamic.batched(f) for f in (lambda x: x + 1, lambda x: x + 1.0, lambda x: x + True))
    assert [(f(whole) * 1).dtype for f in (one, real, true)] == [torch.int64, torch.float32, torch.int64]
    up, down = (dynamic.batched(f) for f in (lambda x: x / 0.0, lambda x: x / -0.0))
    assert (float(up(torch.ones(()))), float(down(torch.ones(())))) == (float("inf"), -float("inf"))


def test_gradients_are_taken_where_the_call_was_made() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(2)
    step = dynamic.batched(lambda x: torch.tanh(layer(x)))
    with torch.no_grad():
        without = step(x)
    with_ = step(x)
    with torch.no_grad():
        float(with_.sum())
    assert ((without * 1).requires_grad, (with_ * 1).requires_grad) == (False, True)

    @dynamic.batched
    def partly(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = layer(x)
        return y * layer.bias

    partly(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(layer.bias.grad, layer(x))  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [torch.tensor([1, -1, 0]), torch.tensor([[2], [0]]), torch.tensor(3)], ids=["some", "two dims", "one"])
@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_elements_that_an_index_of_each_call_names(shape: tuple[int, ...], at: torch.Tensor) -> None:
    w = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def pick(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x * w)[i] * 2

    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (dynamic.batched(pick), pick):
        out = torch.stack([function(a, (at + k) % 4 - (at < 0) * 4) for k, a in enumerate(x)])
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, w])])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_an_op_that_vmap_takes_row_by_row_is_refused_in_words() -> None:
    w = nn.Parameter(torch.randn(3, 3))
    call = dynamic.batched(lambda x: nn.functional.pdist(x * w))
    with pytest.raises(StructureError, match="no way to do an op for many vertices at once"):
        torch.stack([call(torch.randn(3)), call(torch.randn(3))])
    dynamic.flush()


def test_calls_that_read_weights_alone_and_neural_tensors() -> None:
    """A recursive neural tensor network whose leaves are rows of a table that the function closes over."""
    torch.manual_seed(0)
    words, join = nn.Embedding(5, 3).double(), nn.Bilinear(3, 3, 3).double()

    def encode(read: Any, tree: Any) -> Tensor:
        return torch.tanh(words.weight[tree]) if isinstance(tree, int) else torch.tanh(join(read(tree[0]), read(tree[1])))

    @dynamic.batched
    def batched(tree: Any) -> Tensor:
        return encode(batched, tree)

    def plain(tree: Any) -> Tensor:
        return encode(plain, tree)

    trees = [((0, 1), (2, (3, 4))), (1, 1), 3]
    assert_same(torch.stack([batched(t) for t in trees]), torch.stack([plain(t) for t in trees]), [*words.parameters(), *join.parameters()])


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(cell: Any) -> None:
    torch.manual_seed(0)
    one, x = cell(3, 3).double(), torch.randn(3, dtype=torch.float64)

    def step(h: Tensor) -> Tensor:
        return one(x, (h, h))[0] if cell is nn.LSTMCell else one(x, h)

    ours = dynamic.batched(step)
    assert_same(ours(ours(x)), step(step(x)), list(one.parameters()))


def test_writes_in_place_are_refused_where_another_would_see_them() -> None:
    own = dynamic.batched(lambda x: (x * 2).add_(1))
    theirs = dynamic.batched(lambda x: x[1:].add_(1))
    x = torch.ones(2)
    assert (own(x) * 1).tolist() == [3.0, 3.0]
    with pytest.raises(StructureError, match="a batched function writes into a tensor that is not its own"):
        theirs(x)
    late = own(x)
    x.add_(1)
    with pytest.raises(StructureError, match="written into between a batched call that reads it and the first use of a result"):
        late.sum()
