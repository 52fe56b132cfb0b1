"""What Inductor compiled is kept, and ranks of a host that compile the same graph wait for one of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime import deduplicate, inductor
from weft.runtime.traced import _options


def traced(scale: float, *, again: bool = False) -> tuple[GraphModule, torch.Tensor]:
    def f(x: torch.Tensor) -> list[torch.Tensor]:
        (y,) = deduplicate.barrier((x,)) if again else (x,)
        return [torch.sin(x) * scale, torch.sin(y) * scale]

    x = torch.linspace(-2, 2, 12, dtype=torch.float64)
    graph = make_fx(f, tracing_mode="fake")(x)
    deduplicate.mark_recomputed(graph.graph)
    graph.recompile()
    return graph, x


def test_a_graph_compiled_before_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for found in ({"fxgraph_cache_miss": 1}, {"fxgraph_cache_hit": 1}):
        counters.clear()
        graph, x = traced(3.0)
        got = inductor.compiled(graph, [x], _options(graph))(x)
        torch.testing.assert_close(list(got), [torch.sin(x) * 3.0] * 2)
        assert {k: n for k, n in counters["inductor"].items() if k in ("fxgraph_cache_miss", "fxgraph_cache_hit", "fxgraph_cache_bypass")} == found


def test_what_is_made_again_is_kept_apart_from_what_is_not() -> None:
    (plain, _), (marked, _) = traced(1.0), traced(1.0, again=True)
    assert plain.code == marked.code
    assert deduplicate.as_pass(plain.graph).uuid() != deduplicate.as_pass(marked.graph).uuid()


@pytest.mark.parametrize(("scales", "most"), [((2.0, 2.0, 2.0), 1), ((2.0, 3.0), 2)])
def test_ranks_that_compile_the_same_wait_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scales: tuple[float, ...], most: int
) -> None:
    at_work, peak, lock = [0], [0], threading.Lock()
    both = threading.Barrier(most)

    def compile_(graph: Any, given: Any, options: Any = None) -> Any:
        with lock:
            at_work[0] += 1
            peak[0] = max(peak[0], at_work[0])
        both.wait(timeout=20)
        time.sleep(0.02)
        with lock:
            at_work[0] -= 1

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.compile", compile_)
    monkeypatch.setattr(inductor, "dist", SimpleNamespace(is_initialized=lambda: True))
    graphs = [traced(scale) for scale in scales]
    threads = [threading.Thread(target=inductor.compiled, args=(graph, [x])) for graph, x in graphs]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    assert not any(t.is_alive() for t in threads) and peak[0] == most
