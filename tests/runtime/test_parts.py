"""A step that Inductor refuses whole is compiled in parts around what it refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime.traced import Traced, in_parts

REFUSED = "LoweringException: NotImplementedError: View\n  target: {}\n  args[0]: TensorBox"


def work(a: Tensor, b: Tensor) -> list[Tensor]:
    x = torch.sin(a) + b
    z = torch.cumsum(x, 0) * 2 + a
    return [torch.cumsum(z, 0).erf(), z, x.sum()]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Inductor was asked to compile. It takes neither cumsum nor erf."""
    asked: list[list[str]] = []

    def compile_(graph: Any, given: Any, options: Any = None) -> Any:
        asked.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
        refused = next((op for op in asked[-1] if "cumsum" in op or "erf" in op), None)
        if refused:
            raise NotImplementedError(REFUSED.format(refused))
        return lambda *tensors: made if isinstance(made := graph(*tensors), (list, tuple)) else [made]  # as Inductor does

    monkeypatch.setattr("torch._inductor.compile", compile_)
    return asked


def test_only_what_is_refused_runs_apart(seen: list[list[str]]) -> None:
    given = {"a": torch.randn(5), "b": torch.randn(5)}

    def compute(v: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        return dict(zip("xyz", work(v["a"], v["b"]), strict=True)), ()

    step = Traced(lambda v: pytest.fail("it ran node by node"), compute, lambda v, made: {}, (), torch.device("cpu"), record=False)
    with pytest.warns(
        UserWarning, match=r"in parts, around aten.cumsum.default: Inductor refused it in one piece \(NotImplementedError: Lowering"
    ):
        first = step(given)
    for out in (first, step(given)):
        torch.testing.assert_close(list(out.values()), work(**given), rtol=0, atol=0)
    assert step.how == "Inductor's kernels, apart from aten.cumsum.default, aten.erf.default"
    assert seen[1:3] == [["aten.sin.default", "aten.add.Tensor"], ["aten.mul.Tensor", "aten.add.Tensor"]]
    assert len(seen) == 4  # nothing was asked for a second time


def test_a_refusal_that_names_no_op_of_the_graph_stands() -> None:
    graph = make_fx(work, tracing_mode="fake")(torch.randn(3), torch.randn(3))
    error = RuntimeError("out of patience")
    with pytest.raises(RuntimeError, match="patience"):
        in_parts(graph, error)
