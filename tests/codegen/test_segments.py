"""Kernels over vertices and edges: random vertex functions against torch on one vertex at a time; in Triton, they compile for a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dynamic.graphs import graphs
from weft import dynamic
from weft.codegen import segments_triton
from weft.dynamic import compiled
from weft.runtime import modules

WIDE = 4
ONE = (torch.tanh, torch.sigmoid, torch.relu, torch.neg, lambda x: torch.exp(torch.tanh(x)), lambda x: x * torch.tanh(x))
TWO = (
    lambda a, b: torch.tanh(a) * b + 0.5, lambda a, b: torch.where(a > b, b, 0.5 * a), lambda a, b: a * torch.tanh(b)[:, :1],
    lambda a, b: torch.cat([a[:, :2], b[:, 2:]], 1), lambda a, b: torch.where((a > 0) & ~(b > 0.3), b, -a),
    lambda a, b: a.clamp(-0.7, 0.9) / (1.5 + torch.tanh(b)),
)  # fmt: skip


def drawn(seed: int) -> Callable[[Any], None]:
    """Steps on vertices and edges, each on what came before; the result goes to parents."""
    rng = random.Random(seed)
    steps = [(rng.randrange(7), rng.random() < 0.5, rng.random(), rng.random()) for _ in range(rng.randint(6, 14))]

    def function(v: Any) -> None:
        x, e = v.pull("x"), v.gather("h")
        rows, edges = [x, v.reduce(e)], [e, v.spread(x)]
        for what, of_rows, a, b in steps:
            here = rows if of_rows else edges
            one, two = here[int(a * len(here))], here[int(b * len(here))]
            row, edge = rows[int(a * len(rows))], edges[int(b * len(edges))]
            if what < 2:
                here.append(ONE[int(6 * b)](one))
            elif what < 4:
                here.append(TWO[int(6 * (a + b) / 2)](one, two))
            elif what == 4:
                rows.append(v.reduce(edge, ("sum", "mean", "max")[int(3 * a)]))
            elif what == 5:
                edges.append(v.softmax(torch.tanh(edge)) * v.spread(row))
            else:
                rows.append(v.reduce(v.spread(torch.tanh(row)) * edge) + 0.1 * v.count(x.dtype).unsqueeze(1))
        h = torch.tanh(rows[-1]) + torch.tanh(rows[-2]) + 0.1 * x + 0.1 * v.reduce(torch.tanh(edges[-1]))
        v.scatter(h=h)
        v.push(h=h)

    return function


class Alone:
    """One vertex in plain torch: rows are its own, edges those to its children."""

    def __init__(self, x: Tensor, children: Tensor) -> None:
        self.x, self.children = x, children

    def pull(self, name: str) -> Tensor:
        return self.x

    def gather(self, name: str) -> Tensor:
        return self.children

    def spread(self, row: Tensor) -> Tensor:
        return row.expand(len(self.children), WIDE)

    def reduce(self, edges: Tensor, how: str = "sum") -> Tensor:
        if not len(edges):
            return edges.sum(0, keepdim=True)
        return {"sum": edges.sum, "mean": edges.mean, "max": edges.amax}[how](0, keepdim=True)

    def softmax(self, edges: Tensor) -> Tensor:
        return edges.softmax(0)

    def count(self, dtype: torch.dtype) -> Tensor:
        return torch.tensor([len(self.children)], dtype=dtype)

    def scatter(self, h: Tensor) -> None:
        self.h = h

    push = scatter


def alone(function: Callable[[Any], None], s: dynamic.Structure, x: Tensor) -> Tensor:
    """Vertex after vertex."""
    done: dict[int, Tensor] = {}
    for v in sorted(range(s.vertices), key=lambda v: s.depth[v]):
        below = s.child[s.first[v] : s.first[v + 1]].tolist()
        vertex = Alone(x[v : v + 1], torch.cat([x.new_zeros(0, WIDE), *(done[c] for c in below)]))
        function(vertex)
        done[v] = vertex.h
    return torch.cat([done[v] for v in range(s.vertices)])


@pytest.mark.parametrize("seed", range(6))
def test_random_functions_of_vertices_and_edges_equal_torch(seed: int) -> None:
    torch.manual_seed(seed)
    function, s = drawn(seed), graphs(seed, 5, ("tree", "dag", "single", "chain"), "all", largest=6)
    x = torch.randn(s.vertices, WIDE, dtype=torch.float64, requires_grad=True)
    ours, theirs = dynamic.Model(function, {"h": WIDE})(s, x, at="all"), alone(function, s, x)
    torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-11)
    weights = torch.arange(ours.numel(), dtype=torch.float64).cos().reshape(ours.shape)
    mine, judge = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (ours, theirs))
    torch.testing.assert_close(mine, judge, atol=1e-10, rtol=1e-10)


def test_the_same_in_triton_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, made = {"f32": "*fp32", "f64": "*fp64", "bool": "*i1", "i64": "*i64"}, list[str]()

    def compile_all(groups: Any) -> Any:
        writers = [segments_triton.TritonEmitter(group, f"k{i}") for i, group in enumerate(groups)]
        module = modules.load("\n\n".join([segments_triton.HEADER, *(w.text() for w in writers)]))
        for w in writers:
            function = getattr(module, w.name)
            given = {f"p{i}": types[t] for i, t in enumerate(w.arguments.values())} | {"lo": "i32", "eb": "i32", "BLOCK": "constexpr"}
            source = ASTSource(function, given, {(function.arg_names.index("BLOCK"),): 64})
            made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
        raise InterruptedError

    monkeypatch.setattr(compiled, "_triton", compile_all)
    function, s = drawn(1), graphs(1, 2, ("tree", "single"), "all", largest=4)
    with pytest.raises(InterruptedError):
        dynamic.Model(function, {"h": WIDE}, target="triton")(s, torch.randn(s.vertices, WIDE, requires_grad=True))
    assert len(made) > 3
    assert all(".visible .entry" in text for text in made)
