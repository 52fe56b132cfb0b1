"""Gradients are programs: right against torch, in the layouts they are born in, with the communication one would write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft import interp
from weft.autodiff import dual_layout, grad, vjp
from weft.core.errors import NotDifferentiable
from weft.core.layout import Layout, Mesh, O, P, S
from weft.core.node import Type, dtype_of
from weft.core.program import Program, new_program
from weft.frontend.trace import f64, i64, trace
from weft.ops import comm
from weft.ops.attention import attention
from weft.ops.fill import stop_gradient
from weft.ops.norm import layer_norm
from weft.ops.order import argmax, topk
from weft.ops.pointwise import cast, gelu, square, tanh
from weft.ops.reduce import mean, sum_
from weft.testing.fuzz import check_gradient
from weft.testing.programs import random_program
from weft.testing.values import draw_inputs

TP, DP, BOTH = Mesh(tp=2), Mesh(dp=3), Mesh(dp=2, tp=2)


def loss_of(fn: Callable[..., Any], mesh: Mesh, **inputs: Any) -> Program:
    return trace(lambda **xs: {"loss": fn(**xs)}, mesh, **inputs)


def agrees(p: Program, fn: Callable[..., torch.Tensor]) -> Program:
    """grad(p), rank by rank, against torch's gradient of fn."""
    g = grad(p)
    inputs = draw_inputs(p)
    leaves = {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in inputs.items()}
    wanted = torch.autograd.grad(fn(**leaves), [v for v in leaves.values() if v.requires_grad])
    got = interp.run(g, inputs)
    for name, want in zip([k for k, v in leaves.items() if v.requires_grad], wanted, strict=True):
        torch.testing.assert_close(got[f"d.{name}"], want, rtol=1e-8, atol=1e-8)
    return g


def sum_of(p: Program, name: str) -> Program:
    """The sum of one output, as a loss."""
    return new_program("sum", p.mesh, p.inputs, {"loss": sum_(p.output_names[name])})


def test_a_data_parallel_gradient_is_born_pending() -> None:
    p = loss_of(lambda x, w: comm.all_reduce(sum_(square(x @ w)), axis="dp"), DP, x=f64(5, 4, dp=S(0)), w=f64(4, 2))
    g = agrees(p, lambda x, w: (x @ w).square().sum())
    assert g.output_names["d.w"].type.on("dp") == P()
    assert g.output_names["d.x"].type.on("dp") == S(0)


def test_reduce_brings_gradients_to_their_inputs_layout() -> None:
    p = loss_of(lambda x, w: comm.all_reduce(sum_(square(x @ w)), axis="dp"), DP, x=f64(5, 4, dp=S(0)), w=f64(4, 2))
    g = grad(p, reduce=True)
    assert g.output_names["d.w"].type == p.input_names["w"].type
    assert len(g.find_all("all_reduce")) == len(p.find_all("all_reduce")) + 1


def test_megatron_mlp() -> None:
    """Column then row: one sum forward, and the input's gradient pending, for one sum backward."""

    def fn(x: Any, w: Any, v: Any) -> Any:
        return sum_(square(comm.all_reduce(gelu(x @ w) @ v, axis="tp")))

    p = loss_of(fn, TP, x=f64(3, 4), w=f64(4, 5, tp=S(1)), v=f64(5, 4, tp=S(0)))
    g = agrees(p, lambda x, w, v: (torch.nn.functional.gelu(x @ w) @ v).square().sum())
    assert g.output_names["d.x"].type.on("tp") == P()
    assert g.output_names["d.w"].type.on("tp") == S(1)
    assert len(g.find_all("all_reduce")) == 1


def test_sequence_parallelism_comes_from_the_forward() -> None:
    """The gradient of all_gather is reduce_scatter for a pending cotangent."""

    def fn(x: Any, w: Any) -> Any:
        return comm.all_reduce(sum_(square(comm.all_gather(x, axis="tp") @ w)), axis="tp")

    p = loss_of(fn, TP, x=f64(6, 4, tp=S(0)), w=f64(4, 5, tp=S(1)))
    g = agrees(p, lambda x, w: (x @ w).square().sum())
    assert g.output_names["d.x"].op.name == "reduce_scatter"


def test_the_gradient_of_a_gather_of_a_whole_cotangent_is_a_slice() -> None:
    p = loss_of(lambda x, w: sum_(square(comm.all_gather(x, axis="tp") @ w)), TP, x=f64(6, 4, tp=S(0)), w=f64(4, 5))
    assert agrees(p, lambda x, w: (x @ w).square().sum()).output_names["d.x"].op.name == "slice"


def test_the_gradient_of_a_scatter_is_a_gather() -> None:
    p = loss_of(lambda x: comm.all_reduce(sum_(square(comm.reduce_scatter(x, axis="tp", dim=0))), axis="tp"), TP, x=f64(6, tp=P()))
    assert agrees(p, lambda x: x.square().sum()).output_names["d.x"].op.name == "all_gather"


def test_through_a_root_and_a_send() -> None:
    mesh = Mesh(pp=3)
    p = loss_of(lambda x: comm.broadcast(sum_(square(comm.send(x, axis="pp", to=2))), axis="pp"), mesh, x=f64(4, pp=O(0)))
    g = agrees(p, lambda x: x.square().sum())
    assert g.output_names["d.x"].type.on("pp") == O(0)


def test_a_value_read_twice() -> None:
    agrees(loss_of(lambda x: sum_(square(x) * tanh(x) + x), DP, x=f64(4)), lambda x: (x.square() * x.tanh() + x).sum())


def test_a_value_read_whole_and_in_slices() -> None:
    """Cotangents in two layouts are brought together before they are added."""

    def fn(x: Any) -> Any:
        return sum_(square(x)) + comm.all_reduce(sum_(tanh(comm.slice_(x, axis="dp", dim=0))), axis="dp")

    agrees(loss_of(fn, DP, x=f64(7)), lambda x: x.square().sum() + x.tanh().sum())


def test_several_values_of_one_op() -> None:
    def fn(x: Any) -> Any:
        best, _ = topk(x, 2, 1)
        return sum_(square(best))

    agrees(loss_of(fn, Mesh(dp=1), x=f64(3, 5)), lambda x: x.topk(2, 1).values.square().sum())


def test_two_axes() -> None:
    def fn(x: Any, w: Any, n: Any) -> Any:
        y = layer_norm(comm.all_reduce(x @ w, axis="tp"), n)
        return comm.all_reduce(mean(square(y * 3.0)), axis="dp")

    p = loss_of(fn, BOTH, x=f64(5, 4, dp=S(0), tp=S(1)), w=f64(4, 3, tp=S(0)), n=f64(3))
    g = agrees(p, lambda x, w, n: (torch.nn.functional.layer_norm(x @ w, (3,), n) * 3).square().mean())
    assert g.output_names["d.w"].type.on("dp") == P()


def test_an_input_that_does_not_matter() -> None:
    g = grad(loss_of(lambda x, y: sum_(x) + 0.0 * sum_(stop_gradient(y)), DP, x=f64(3), y=f64(2)))
    assert torch.equal(interp.run(g, draw_inputs(g))["d.y"], torch.zeros(2, dtype=torch.float64))


def test_only_what_is_asked_for() -> None:
    p = loss_of(lambda x, w: sum_(x * w), DP, x=f64(3), w=f64(3))
    assert [n for n, _ in grad(p, wrt=["w"]).outputs] == ["loss", "d.w"]


def test_integers_get_no_gradient() -> None:
    p = trace(lambda x, i: {"loss": sum_(x), "i": i}, DP, x=f64(3), i=i64(2))
    assert [n for n, _ in grad(p, of="loss").outputs] == ["loss", "i", "d.x"]


def test_a_gradient_of_a_gradient() -> None:
    p = loss_of(lambda x: sum_(x * x * x), DP, x=f64(3))
    again = grad(sum_of(grad(p), "d.x"))
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(interp.run(again, {"x": x})["d.x"], 6 * x)


def test_vjp_takes_cotangents_of_every_output() -> None:
    p = trace(lambda x: {"a": x * 2.0, "b": square(x)}, DP, x=f64(4, dp=S(0)))
    back = vjp(p)
    assert list(back.input_names) == ["x", "ct.a", "ct.b"]
    x, a, b = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(interp.run(back, {"x": x, "ct.a": a, "ct.b": b})["d.x"], 2 * a + 2 * x * b)


def test_the_layout_of_a_cotangent() -> None:
    """Cut where the value is cut, whole where it is pending, at the root where it is at the root."""
    mesh = Mesh(a=2, b=2, c=2)
    t = Type(dtype_of("f64"), Layout.of(mesh, (4,), {"a": S(0), "b": P(), "c": O(1)}))
    assert str(dual_layout(t)) == "[4] a:S(0) b:R c:O(1)"


def test_the_gradient_of_what_is_no_number() -> None:
    with pytest.raises(NotDifferentiable, match="needs a number") as e:
        grad(trace(lambda x: x * 2.0, DP, x=f64(3)))
    assert e.value.needed == "a floating-point output of shape []"


def test_which_output() -> None:
    p = trace(lambda x: {"a": sum_(x), "b": sum_(square(x))}, DP, x=f64(3))
    with pytest.raises(NotDifferentiable, match="has 2 outputs"):
        grad(p)
    assert "d.x" in grad(p, of="b").output_names


def test_an_op_without_a_gradient() -> None:
    p = grad(loss_of(lambda x: sum_(square(attention(x, x, x)[0])), DP, x=f64(1, 1, 3, 2)))
    with pytest.raises(NotDifferentiable, match="attention_backward has no gradient"):
        grad(sum_of(p, "d.x"))


def test_whole_numbers_end_the_way_back() -> None:
    """An index has no gradient, so none goes through what it was chosen by."""

    def fn(x: Any) -> Any:
        return sum_(x * cast(argmax(x, 0), dtype="f64"))

    agrees(loss_of(fn, DP, x=f64(3)), lambda x: (x * x.argmax().double()).sum())


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    sample = random_program(random.Random(f"gradient {seed}"))
    check_gradient(sample.program, sample.program, sample.inputs())
