"""Tensor parallelism is found in what was captured: by columns and rows, and inside a projection that several readers share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft import S
from weft.core.layout import Mesh
from weft.core.node import Node
from weft.core.program import Program
from weft.frontend.capture import capture
from weft.frontend.trace import f64, trace
from weft.ops.fill import full
from weft.ops.reduce import sum_
from weft.ops.shape import item, optimization_barrier
from weft.plan.named import input_layouts, stacked, tensor_shards
from weft.plan.place import place
from weft.plan.spec import Spec

HEADS, WIDTH = 4, 16


class Attention(nn.Module):
    """Queries, keys and values of one product, taken apart as two families of models do."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.qkv, self.out = by, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if self.by == "view":
            q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, n, -1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def parameters(program: Program) -> dict[str, Node]:
    return {n: w for n, w in program.input_names.items() if n.startswith("param.")}


@pytest.mark.parametrize("by", ["view", "split"])
def test_a_shared_projection_is_cut_inside_each_of_its_parts(by: str) -> None:
    model, x = Attention(by).double(), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    program = capture(model, x, loss, gradients=True).program
    cuts = tensor_shards(program, program.output_names["loss"], parameters(program), 2)
    assert cuts == {"param.qkv.weight": S(0, within=WIDTH), "param.qkv.bias": S(0, within=WIDTH), "param.out.weight": S(1)}

    named = Spec(tp=2)
    placed = place(program, named.mesh, *input_layouts(program, named, {}))
    given = {f"param.{n}": p.detach() for n, p in model.named_parameters()} | {n: x for n in program.input_names if n.startswith("batch")}
    found = weft.interp.run(placed, given)
    wanted = loss(model, x)
    wanted.backward()
    torch.testing.assert_close(found["loss"], wanted.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[f"d.param.{name}"], p.grad)
    assert placed.find_all("attention")[0].args[0].layout.where_sharded("tp") is not None


def test_what_cannot_be_cut_evenly_stays_whole() -> None:
    model, x = Attention("view"), torch.randn(2, 6, WIDTH)
    program = capture(model, x, loss).program
    assert tensor_shards(program, program.output_names["loss"], parameters(program), 3) == {}


@pytest.mark.parametrize("by", ["view", "split"])
def test_weights_that_are_computed_with_in_fewer_bits_are_cut_as_they_are_kept(by: str) -> None:
    model, x = Attention(by), torch.randn(2, 6, WIDTH)
    full, half = (capture(model, x, loss, gradients=True, precision=p).program for p in (None, torch.bfloat16))
    assert any(n.op.is_cast for n in half.nodes)
    wanted, found = (tensor_shards(p, p.output_names["loss"], parameters(p), 2) for p in (full, half))
    assert wanted == found != {}


def test_so_are_experts() -> None:
    model, x = nn.ParameterDict({"up": torch.randn(4, WIDTH, 8)}), torch.randn(4, 6, WIDTH)
    program = capture(model, x, lambda m, x: (x @ m["up"]).square().mean(), precision=torch.bfloat16).program
    weight = program.input_names["param.up"]
    assert stacked(program, weight, 2) and program.users[weight] and all(u.op.is_cast for u in program.users[weight])


class Gated(nn.Module):
    """A projection that is summed along tp, a gate that reads it flat, and a sum that reads it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x))
        gate = self.gate(y.view(-1, WIDTH)).square().sum(-1)
        return y + gate.view(*x.shape[:-1], 1)


def test_a_sum_that_is_read_in_two_shapes_is_done_once() -> None:
    named, x = Spec(tp=2), torch.randn(2, 6, WIDTH)
    program = capture(Gated(), x, loss).program
    placed = place(program, named.mesh, *input_layouts(program, named, {}))
    assert [n.shape for n in placed.find_all("all_reduce")] == [(2, 6, WIDTH)]


def test_what_waits_for_a_sum_does_not_read_it() -> None:
    """A barrier leaves sums where they are done without it."""

    def sums(waits: bool) -> list[tuple[int, ...]]:
        def f(x: Node, w: Node) -> Node:
            y, scale = x @ w, full((), 2.0, x.mesh, x.dtype)
            scale = item(optimization_barrier(scale, y), index=0) if waits else scale
            return sum_(y * 3.0, dims=0) * scale

        program = trace(f, Mesh(tp=1), x=f64(6, WIDTH), w=f64(WIDTH, 4))
        placed = place(program, Mesh(tp=2), {"x": {"tp": S(1)}, "w": {"tp": S(0)}})
        return [n.shape for n in placed.find_all("all_reduce")]

    assert sums(waits=True) == sums(waits=False) == [(4,)]


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_shards_along_dp_and_cp_and_dp_exchanges_shards_of_cp(zero: int) -> None:
    """Every rank keeps a quarter of the state; what goes between the outer ranks is a half, the shard of the inner ones."""
    model, x = Attention("view"), torch.randn(4, 6, WIDTH)
    captured = capture(model, x, loss, torch.optim.AdamW(model.parameters()))
    named = Spec(dp=2, cp=2, zero=zero)
    placed = place(captured.program, named.mesh, *input_layouts(captured.program, named, captured.states))
    kept = [*captured.states, *(parameters(placed) if zero == 3 else ())]
    for node in (n for n in map(placed.input_names.__getitem__, kept) if n.ndim):
        assert node.layout.local_shape({"dp": 1, "cp": 1})[0] == node.shape[0] // 4
    along = [n for n in placed.nodes if n.attr("axis") == "dp" and n.ndim]
    sums, gathers = ([n for n in along if n.op.name == name] for name in ("reduce_scatter", "all_gather"))
    assert len(sums) >= 4 <= len(gathers)
    assert all(n.args[0].layout.where_sharded("cp") is not None for n in sums)
    assert all(n.layout.where_sharded("cp") is not None for n in gathers)


def test_zero_shards_along_one_of_dp_and_cp_what_is_too_short_for_both() -> None:
    model, x = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), torch.randn(4, 6, 2)
    captured = capture(model, x, loss, torch.optim.AdamW(model.parameters()))
    named = Spec(dp=2, cp=2, zero=1)
    layouts, _ = input_layouts(captured.program, named, captured.states)
    found = {of: dict(layouts[state]) for state, of in captured.states.items() if captured.program.input_names[state].ndim}
    assert found == {of: {"dp": S(0)} for of in found}
