"""What vertex functions may be made of: torch itself on the same rows is the judge, for values and for gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import dynamic
from weft.core.errors import StructureError

torch.manual_seed(0)
TABLE, SCALE = nn.Parameter(torch.randn(7, 6, dtype=torch.float64)), torch.randn(6, dtype=torch.float64).requires_grad_()
NORM = nn.LayerNorm(6).double()


class Stepped(torch.autograd.Function):
    """Steps whose gradient is that of what they round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3.0


def attended(x: Tensor) -> Tensor:
    q = x.reshape(-1, 2, 3, 1)
    return F.scaled_dot_product_attention(q, q * 2.0, q + 1.0).flatten(1)


def written_into(x: Tensor) -> Tensor:
    out = x.clone()
    out[:, 1:3] = x[:, 3:5] * 2.0
    return out


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a table, by what is pulled": lambda x: F.embedding((x[:, 0].abs() * 3).long().clamp(max=6), TABLE) * x,
    "attention inside a row": attended,
    "layer norm": lambda x: F.gelu(NORM(x)),
    "a tensor that is no parameter": lambda x: torch.softmax(x * SCALE, 1),
    "numbers written out": lambda x: x @ torch.tensor([[1.0, -2.0]] * 6, dtype=torch.float64),
    "an autograd function": lambda x: Stepped.apply(x * 2.0) * x,
    "a write into a part": written_into,
    "parts of which one is not used": lambda x: torch.sigmoid(x.chunk(3, dim=1)[0] + x.chunk(3, dim=1)[2]),
    "an op without an entry": lambda x: torch.logcumsumexp(x, 1),
    "vmap": lambda x: torch.vmap(lambda row: row.cumsum(0) * SCALE)(x),
    "einsum": lambda x: torch.einsum("nab,cb->nca", x.reshape(-1, 2, 3), TABLE[:4, :3]).flatten(1),
}


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("what", FUNCTIONS)
def test_a_function_of_rows_is_what_torch_makes_of_them(what: str, fuse: bool) -> None:
    function, x = FUNCTIONS[what], torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    model = dynamic.Model(lambda v: v.push(y=function(v.pull("x"))), {}, fuse=fuse)
    inputs = [x, TABLE, SCALE, *NORM.parameters()]
    ours, theirs = model(dynamic.chains([1] * 5), x), function(x)
    weight = torch.randn_like(theirs)
    assert torch.allclose(ours, theirs, atol=1e-12)
    for mine, judge in zip(*(torch.autograd.grad(y, inputs, weight, allow_unused=True) for y in (ours, theirs)), strict=True):
        assert torch.allclose(x.new_zeros(()) if mine is None else mine, x.new_zeros(()) if judge is None else judge, atol=1e-12)


def test_a_mean_over_vertices_is_refused_where_it_is_written() -> None:
    with pytest.raises(
        StructureError, match=r"(?s)mixes vertices: 'y' of one depends on the others.*found   (sum|mean) over the rows of all vertices"
    ):
        dynamic.Model(lambda v: v.push(y=v.pull("x") - v.pull("x").mean(0)), {})(dynamic.chains([1]), torch.randn(1, 3))


def test_a_program_is_for_inputs_like_those_it_was_written_for() -> None:
    model = dynamic.Model(lambda v: v.push(y=v.pull("x") * 2.0), {})
    written = dynamic.program(model, torch.randn(4, 3))
    with pytest.raises(
        StructureError, match=r"(?s)is a program for other inputs.*needed  'x' with rows of \[3\], torch.float32.*found   \[5\]"
    ):
        dynamic.Model(written, {})(dynamic.chains([1]), torch.randn(1, 5))


def test_batches_that_name_their_types_in_another_order_share_no_template() -> None:
    def a(v: dynamic.Vertex) -> None:
        h = torch.tanh(v.pull("x") + v.gather("h", reduce="sum"))
        v.scatter(h=h), v.push(h=h)

    def b(v: dynamic.Vertex) -> None:
        h = v.pull("x") * 3.0 - v.gather("h", reduce="sum")
        v.scatter(h=h), v.push(h=h)

    model = dynamic.Model({"a": a, "b": b}, {"h": 2}, replay=True)
    for order in (("a", "b"), ("b", "a")):
        build, x, roots = dynamic.Builder(), torch.randn(4, 2), []
        for i, (low, high) in enumerate((order, order[::-1])):
            build.sample()
            build.add([build.add([], row=2 * i, kind=low)], row=2 * i + 1, kind=high)
            leaf = torch.tanh(x[2 * i]) if low == "a" else x[2 * i] * 3.0
            roots.append(torch.tanh(x[2 * i + 1] + leaf) if high == "a" else x[2 * i + 1] * 3.0 - leaf)
        assert torch.allclose(model(build.done(), x), torch.stack(roots), atol=1e-6)


def test_a_prepared_schedule_goes_to_another_process() -> None:
    model, x = dynamic.Model(lambda v: v.push(y=v.pull("x") * 2.0), {}), torch.randn(3, 2)
    schedule = pickle.loads(pickle.dumps(model.prepare(dynamic.chains([1, 1, 1]), x)))
    assert torch.equal(model(schedule, x), x * 2.0)
