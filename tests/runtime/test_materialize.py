"""What several kernels read is kept where making it anew would read more, and the step's values stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime import materialize
from weft.runtime import traced as traced_step
from weft.runtime.custom_ops import define

SHAPE, WIDTH = (512, 256), 256
NOTED: list[int] = []


def _note(x: Tensor, k: int) -> Tensor:
    NOTED.append(k)
    return x.clone()


define("noted(Tensor x, int k) -> Tensor", _note, lambda x, k: torch.empty_like(x))


def traced(f: Callable[..., Any], *given: Tensor) -> GraphModule:
    return make_fx(f, tracing_mode="fake")(*given)


def names(f: Callable[..., Any], *given: Tensor) -> list[str]:
    return [str(n.target) for n in materialize.shared(traced(f, *given).graph)]


def stream(x: Tensor, a: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """A residual stream of two sums; what follows a matmul reads the first again, as a backward pass does."""
    first = x + a @ w
    second = first + torch.tanh(first) @ w
    back = torch.sinh(second) @ w
    return (torch.cosh(first) * back) @ w + b


def given(count: int) -> list[Tensor]:
    return [torch.randn(SHAPE) for _ in range(count)]


def test_sums_read_on_both_sides_of_matmuls_are_kept() -> None:
    weight = torch.randn(WIDTH, WIDTH)
    assert names(stream, *given(3), weight) == ["aten.add.Tensor"]


def test_what_one_kernel_reads_is_made_there() -> None:
    """Sums and functions of them with no matmul between their readers."""

    def near(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        total = x + a
        return (torch.tanh(total) * total.mean(-1, keepdim=True) + torch.sinh(total)) @ w

    assert names(near, *given(2), torch.randn(WIDTH, WIDTH)) == []


def test_functions_of_one_tensor_are_made_anew() -> None:
    """Two readings of one tensor move less than one writing and two readings."""

    def again(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(x)
        return ((y + 1) @ w * y) @ w * y

    assert names(again, *given(1), torch.randn(WIDTH, WIDTH)) == []


def test_what_a_matmul_reads_is_not_marked() -> None:
    """It is written for the matmul already."""

    def read(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        y = x + a
        return torch.sinh(torch.tanh(y @ w) * y) @ w * y

    assert names(read, *given(2), torch.randn(WIDTH, WIDTH)) == []


def test_small_values_are_left_alone() -> None:
    small = [torch.randn(8, 16) for _ in range(3)]
    assert names(stream, *small, torch.randn(16, 16)) == []


@pytest.mark.timeout(300)
def test_a_marked_step_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual network's step, forward and back, in which Inductor's own pass finds sums to keep."""
    from torch._inductor import compile as inductor

    marked, keep = [], materialize.shared
    monkeypatch.setattr(materialize, "shared", lambda graph: marked.extend(keep(graph)))
    torch.manual_seed(0)
    x, a, b, w = *given(3), torch.randn(WIDTH, WIDTH) / WIDTH

    def step(x: Tensor, a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        out = stream(x, a, b, w)
        return [out, *torch.autograd.grad(out.square().mean(), [x, w])]

    leaves = [t.requires_grad_() for t in (x, a, b, w)]
    graph = traced(step, *leaves)
    want = step(*leaves)
    with torch.no_grad():
        got = inductor(graph, leaves, options=traced_step._options(graph) | {"fx_graph_cache": False})(*leaves)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert "aten.add.Tensor" in [str(n.target) for n in marked]


@pytest.mark.timeout(300)
def test_ops_stay_where_the_step_has_them() -> None:
    """What leaves for the host early leaves early, although it is read late."""
    from torch._inductor import compile as inductor

    def work(x: Tensor, w: Tensor) -> list[Tensor]:
        away = torch.ops.weft.noted(x, 0)
        y = torch.ops.weft.noted(torch.ops.weft.noted(x @ w, 1) @ w, 2)
        return [torch.ops.weft.noted(away, 3) + y]

    graph = traced(work, *given(1), torch.randn(WIDTH, WIDTH))
    with torch.no_grad():
        run = inductor(graph, [*given(1), torch.randn(WIDTH, WIDTH)], options=traced_step._options(graph))
        NOTED.clear()
        run(*given(1), torch.randn(WIDTH, WIDTH))
    assert NOTED == [0, 1, 2, 3]


def test_large_matmuls_of_uneven_sizes_are_always_padded() -> None:
    def options(rows: int, deep: int, columns: int) -> dict[str, Any]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            x, w = torch.empty(rows, deep, dtype=torch.bfloat16), torch.empty(deep, columns, dtype=torch.bfloat16)
            return traced_step._options(make_fx(lambda x, w: x @ w)(x, w))

    assert "force_shape_pad" in options(8192, 1024, 50257)
    assert "force_shape_pad" not in options(8192, 1024, 50264)
    assert "force_shape_pad" not in options(64, 64, 7)
