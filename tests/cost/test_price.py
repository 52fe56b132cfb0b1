"""One price: the layout ILP, the search and the walk of a program ask the same functions about the same nodes."""

from __future__ import annotations

import pytest
import torch

import weft_zoo as zoo
from bench._graph.timing import PlacedProgram
from weft import lang as w
from weft.cluster.spec import cluster
from weft.core.layout import Mesh, P
from weft.core.program import Program
from weft.cost.price import compiles, on_mesh
from weft.cost.simulate import predict
from weft.cost.work import Collective, MemoryBound, Work, records
from weft.frontend.capture import capture
from weft.frontend.trace import tensor, trace
from weft.plan.layouts import OnCluster, choose
from weft.programs.blocks import self_attention


def step(name: str) -> Program:
    work = zoo.small(name)
    return capture(work.model, work.example(4), work.loss, torch.optim.SGD(work.model.parameters(), lr=0.1)).program


@pytest.mark.parametrize("place", ["H100", "x86-2"])
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "mlp"])
def test_the_ilp_prices_a_program_as_the_walk_does(name: str, place: str) -> None:
    mesh, where = Mesh(dp=1), cluster(place)
    chosen = choose(step(name), mesh, OnCluster(where, mesh), work=1e6)
    costs = on_mesh(where, mesh)
    priced = sum(map(costs.seconds, records(chosen.program, compiles(where.device))))
    assert chosen.cost == pytest.approx(priced, rel=1e-3) and priced > 0
    computed = predict(chosen.program, where).causes_ms["compute"] / 1e3  # here with what the host takes to issue it
    assert computed == pytest.approx(priced) if where.device.get("host.launch") == 0 else computed >= priced
    assert sum(costs.seconds(op) for ops in PlacedProgram(chosen.program, where).work.values() for op in ops) == pytest.approx(priced)


def test_attention_has_its_own_rate_in_the_ilp_too() -> None:
    program = self_attention(Mesh(dp=1), 8, 2048, 2048, n_heads=16, p=0.0, tp=None)
    (node,) = program.find_all("attention")
    device, prices = cluster("H100").device, OnCluster(cluster("H100"), Mesh(dp=1))
    (op,) = Work(program, True).of(node)
    assert isinstance(op, MemoryBound) and op.flops > 0
    assert prices.work([op], node) == pytest.approx(op.flops / (device.peak(op.dtype) * device.get("attention.forward")), rel=1e-3)


def test_pointwise_ops_in_a_row_are_one_kernel_where_steps_are_compiled() -> None:
    wide = tensor("f32", 256, 1024)
    program = trace(lambda x, y: w.gelu(x + y) * y, Mesh(tp=1), x=wide, y=wide)
    apart, chained = records(program), records(program, chained=True)
    size = 256 * 1024 * 4
    assert [op.bytes for op in apart if isinstance(op, MemoryBound)] == [3 * size, 2 * size, 3 * size]
    assert [op.bytes for op in chained if isinstance(op, MemoryBound)] == [2 * size, 0, 2 * size]
    assert sum(op.launches for op in chained) == 1 and sum(op.math for op in chained if isinstance(op, MemoryBound)) == 256 * 1024
    assert compiles(cluster("H100").device) and not compiles(cluster("x86-2").device)


def test_what_is_joined_is_copied_unless_it_is_only_sent() -> None:
    flat = tensor("f32", 64)
    joined = trace(lambda x, y: w.concat((x, y), 0) * 2.0, Mesh(dp=2), x=flat, y=flat)
    assert [op.name for op in records(joined)] == ["concat", "mul"]
    pending = tensor("f32", 64, dp=P("sum"))
    sent = trace(lambda x, y: w.all_reduce(w.concat((x, y), 0), "dp"), Mesh(dp=2), x=pending, y=pending)
    assert [type(op) for op in records(sent)] == [Collective]
