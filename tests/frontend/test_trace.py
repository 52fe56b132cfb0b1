"""The language: a function on values becomes a program; what it cannot mean is refused on the line that says it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft import interp
from weft.core.errors import InvalidProgram, LayoutError, TypeMismatch, WeftError
from weft.core.layout import Mesh, P, S
from weft.core.node import Node, op_named
from weft.frontend.trace import bf16, f32, f64, i64, tensor, trace
from weft.ops import comm
from weft.ops.pointwise import sqrt
from weft.ops.reduce import sum_

MESH = Mesh(dp=2)


def adam(g: Any, w: Any, m: Any, v: Any, t: Any) -> dict[str, Any]:
    g = comm.all_reduce(g, axis="dp")
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    m_hat, v_hat = m / (1.0 - 0.9**t), v / (1.0 - 0.999**t)
    return {"w": w - 0.01 * m_hat / (sqrt(v_hat) + 1e-8), "m": m, "v": v}


def test_adam_is_torch_adam() -> None:
    p = trace(adam, MESH, g=f64(5, dp=P()), w=f64(5), m=f64(5), v=f64(5), t=f64())
    assert p.name == "adam"
    assert p.state == (("w", "w"), ("m", "m"), ("v", "v"))
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    values = {"w": w.detach().clone(), "m": torch.zeros(5, dtype=torch.float64), "v": torch.zeros(5, dtype=torch.float64)}
    theirs = torch.optim.Adam([w], lr=0.01)
    for t in range(1, 4):
        w.grad = torch.randn(5, dtype=torch.float64)
        theirs.step()
        values |= interp.run(p, {**values, "g": w.grad, "t": torch.tensor(float(t), dtype=torch.float64)})
    torch.testing.assert_close(values["w"], w.detach())


def test_inputs_are_what_they_are_said_to_be() -> None:
    p = trace(lambda x: x, Mesh(dp=2, tp=2), x=f32(4, 6, dp=S(0), tp=P()))
    assert str(p.inputs[0].type) == "f32[4, 6] dp:S(0) tp:P"
    for spec, name in ((f32(2), "f32"), (f64(2), "f64"), (bf16(2), "bf16"), (i64(2), "i64"), (tensor("bool", 2), "bool")):
        assert str(trace(lambda x: x, MESH, x=spec).inputs[0].type).startswith(name)


def test_nested_inputs_and_outputs_have_dotted_names() -> None:
    p = trace(lambda ws, c: {"sum": [w + c["b"] for w in ws]}, MESH, ws=[f64(2), f64(2)], c={"b": f64(2)})
    assert list(p.input_names) == ["ws.0", "ws.1", "c.b"]
    assert list(p.output_names) == ["sum.0", "sum.1"]


def test_one_value_is_called_out() -> None:
    assert list(trace(lambda x: x + 1.0, MESH, x=f64(2)).output_names) == ["out"]


def test_a_tuple_is_numbered() -> None:
    assert list(trace(lambda x: (x + 1.0, x), MESH, x=f64(2)).output_names) == ["0", "1"]


def test_a_lambda_is_called_program() -> None:
    assert trace(lambda x: x, MESH, x=f64(2)).name == "program"
    assert trace(lambda x: x, MESH, name="named", x=f64(2)).name == "named"


def test_state_may_be_said() -> None:
    p = trace(lambda x: {"y": x + 1.0}, MESH, state={"y": "x"}, x=f64(2))
    assert p.state == (("y", "x"),)
    assert trace(lambda x: {"x": sum_(x)}, MESH, x=f64(2)).state == ()


def test_operators() -> None:
    """Every operator, with a number on either side."""

    def every(x: Node, y: Node) -> list[Any]:
        return [x + y, 2.0 + x, x - y, 2.0 - x, x * y, 2.0 * x, x / y, 2.0 / x, x**2.0, 2.0**x, -x, x @ y, x > y, x >= 1.0, x < y, x <= 0.5]

    p = trace(every, MESH, x=f64(3, 3), y=f64(3, 3))
    x, y = torch.rand(2, 3, 3, dtype=torch.float64) + 0.5
    got = interp.run_global(p, {"x": x, "y": y})
    for name, expected in zip(got, every(x, y), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(got[name], expected)


def test_a_type_error_points_at_the_users_line() -> None:
    def wrong(x: Node, y: Node) -> Any:
        z = x * 2.0
        return z + y

    with pytest.raises(TypeMismatch, match="add does not fit") as e:
        trace(wrong, MESH, x=f64(4, dp=S(0)), y=f64(4))
    assert e.value.where == f"test_trace.py, line {wrong.__code__.co_firstlineno + 2}"


def test_every_node_knows_its_line() -> None:
    def fn(x: Node) -> Any:
        y = x * 2.0
        return y + 1.0

    p = trace(fn, MESH, x=f64(4))
    first = fn.__code__.co_firstlineno
    assert [p.lines[p.find(op)] for op in ("mul", "add")] == [f"test_trace.py, line {first + k}" for k in (1, 2)]


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match="the mesh has no axis 'tp'"):
        trace(lambda x: x, MESH, x=f64(4, tp=S(0)))


def test_an_input_that_is_not_described() -> None:
    with pytest.raises(WeftError, match="input 'x' is not described") as e:
        trace(lambda x: x, MESH, x=3)
    assert e.value.needed == "tensor(dtype, *shape, axis=placement)"


def test_an_output_that_is_no_value() -> None:
    with pytest.raises(InvalidProgram, match="output 'y' is no value"):
        trace(lambda x: {"y": 3}, MESH, x=f64(2))


def test_no_outputs() -> None:
    with pytest.raises(InvalidProgram, match="has no outputs"):
        trace(lambda x: {}, MESH, x=f64(2))


def test_state_that_does_not_fit() -> None:
    with pytest.raises(InvalidProgram, match="state x=y would change its type"):
        trace(lambda x: {"y": sum_(x)}, MESH, state={"y": "x"}, x=f64(2))


def test_operands_are_counted() -> None:
    one, two = "1 operands", "2 operands"
    for bad, needed in ((lambda x: op_named("exp")(), one), (lambda x: op_named("add")(x), two), (lambda x: sqrt(x, x), one)):
        with pytest.raises(TypeMismatch) as e:
            trace(bad, MESH, x=f64(2))
        assert e.value.needed == needed


def test_operands_go_by_position() -> None:
    with pytest.raises(TypeMismatch, match="sqrt was given x= as an attribute"):
        trace(sqrt, MESH, x=f64(2))
