"""A variance about a mean becomes one op where it is one, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime.moments import in_one_pass


def rewritten(f: Callable[..., Any], *given: torch.Tensor) -> tuple[int, list[str]]:
    """How many pairs became one, and the ops there are then; the values are compared in float64."""
    graph = make_fx(f, tracing_mode="fake")(*given)
    found = in_one_pass(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for got, want in zip(graph(*given), f(*given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    return found, [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


def moments(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, ...]:
    n = x.numel() // x.sum(dims).numel()
    kept = [1 if d in dims else s for d, s in enumerate(x.shape)]
    center = x.sum(dims) * (1 / n)
    off = x - center.detach().clone().view(kept)
    return off, (off * off).sum(dims) * (1 / n), center


@pytest.mark.parametrize("dims", [[0, 2, 3], [0], [1, 2]])
def test_a_mean_and_the_variance_about_it(dims: list[int]) -> None:
    found, ops = rewritten(lambda x: moments(x, dims), torch.randn(4, 3, 5, 6, dtype=torch.float64) + 3)
    assert found == 1 and "aten.sum.dim_IntList" not in ops and ops.count("aten.var_mean.correction") == 1


def test_two_norms_in_turn() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        off, var, _ = moments(x, [0, 2])
        return moments(off * torch.rsqrt(var + 1e-5).view(1, -1, 1), [0, 2])

    found, ops = rewritten(f, torch.randn(4, 3, 5, dtype=torch.float64))
    assert found == 2 and "aten.sum.dim_IntList" not in ops


def test_squares_about_something_else_stay() -> None:
    def other_dims(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        center = x.sum([0]) * 0.25
        off = x - center
        return (off * off).sum([1]) * 0.25, center

    def other_value(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        off = x - (x.sum([0]) * 0.5).view(1, 4)  # no mean
        return ((off * off).sum([0]) * 0.25,)

    def other_stretch(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        off = x - (x.sum([0]) * 0.25).view(4, 1)  # along the dim that is left
        return ((off * off).sum([0]) * 0.25,)

    for f in (other_dims, other_value, other_stretch):
        assert rewritten(f, torch.randn(4, 4, dtype=torch.float64))[0] == 0
