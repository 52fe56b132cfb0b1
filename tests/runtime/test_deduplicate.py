"""Equal values of a graph are made once; what draws is left alone."""

import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime.deduplicate import barrier, mark_recomputed, once_each


def _traced(f, *args):
    graph = make_fx(f, tracing_mode="fake")(*args)
    once_each(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph, [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def test_the_same_work_is_done_once():
    def f(x):
        return torch.log_softmax(x.float(), -1), torch.softmax(x.float(), -1), torch.softmax(x.float(), -1) * 2

    x = torch.randn(3, 5, dtype=torch.bfloat16)
    graph, ops = _traced(f, x)
    assert ops.count("aten._to_copy.default") == 1
    assert ops.count("aten._softmax.default") == 1
    for got, want in zip(graph(x), f(x), strict=True):
        torch.testing.assert_close(got, want)


def test_numbers_of_other_kinds_are_other_operands():
    _, ops = _traced(lambda x: (x.sum(0, keepdim=True), x.sum(0, keepdim=False), x + 1, x + 1.0), torch.randn(3, 5))
    assert ops.count("aten.sum.dim_IntList") == 2
    assert ops.count("aten.add.Tensor") == 2


def test_draws_stay():
    _, ops = _traced(lambda x: torch.bernoulli(x) + torch.bernoulli(x), torch.rand(3))
    assert ops.count("aten.bernoulli.default") == 2


def test_what_is_made_of_constants_alone_is_made_once():
    def f(x):
        keys = [torch.where(x < 0, torch.full((), 9, dtype=x.dtype), x) for _ in range(2)]
        return [torch.sort(k, stable=True)[1] + torch.arange(5) for k in keys]

    x = torch.tensor([3, -1, 2, 0, 2])
    graph, ops = _traced(f, x)
    assert ops.count("aten.sort.stable") == ops.count("aten.arange.default") == 1
    assert all(torch.equal(got, want) for got, want in zip(graph(x), f(x), strict=True))


def test_what_is_recomputed_is_made_again_behind_inductors_own_trace():
    def f(x, w):
        first = torch.relu(x @ w)
        (taken,) = barrier((x,))
        second = torch.relu(taken @ w)
        return first.sum() + (x @ w).sum(), second * 2, torch.relu(taken @ w) * 3

    args = torch.randn(3, 3), torch.randn(3, 3)
    graph = make_fx(f, tracing_mode="fake")(*args)
    mark_recomputed(graph.graph)
    graph.recompile()
    seen: list[list[str]] = []

    def inner(given, *_, **__):
        once_each(given.graph)
        seen.append([str(n.target) for n in given.graph.nodes if n.op == "call_function"])
        given.recompile()
        return given.forward

    run = compile_fx(graph, list(args), inner_compile=inner)
    assert seen[0].count("aten.mm.default") == seen[0].count("aten.relu.default") == 2, seen
    for got, want in zip(run(*args), f(*args), strict=True):
        torch.testing.assert_close(got, want)


def test_one_padded_tensor_does_for_a_matrix_and_for_the_same_turned():
    def f(x):
        y = x * 2
        return torch.constant_pad_nd(y, [0, 3, 0, 0]), torch.constant_pad_nd(y.permute(1, 0), [0, 0, 0, 3]), torch.constant_pad_nd(y.t(), [1, 0, 0, 3])

    x = torch.randn(4, 5)
    graph, ops = _traced(f, x)
    assert ops.count("aten.constant_pad_nd.default") == 2
    assert all(torch.equal(got, want) for got, want in zip(graph(x), f(x), strict=True))
