"""Equal values of a graph are made once; what draws is left alone."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime.once import once_each


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
