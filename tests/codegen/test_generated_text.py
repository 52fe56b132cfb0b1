"""Code that is written for odd numbers, shapes and depths: judged by one step of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import lang as w
from weft.api.compiled import Compiled
from weft.autodiff import grad
from weft.codegen.expr import const
from weft.codegen.peepholes import peepholes_of
from weft.codegen.text import CPP, Writer, python
from weft.codegen.to_cpu import number
from weft.core.layout import Mesh
from weft.core.text import parse
from weft.frontend.trace import f64, trace
from weft.runtime.host_numbers import host_function
from weft.testing.torch_modules import draw, run_script


class Formula(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...] = (4, 6)) -> None:
        super().__init__()
        self.w, self.f = nn.Parameter(draw(shape, "whole", 3)), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.w, x)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "clamp to infinity": lambda w, x: (w * x).clamp(0.0, math.inf).sum(),
    "norm of minus infinity": lambda w, x: torch.linalg.vector_norm(w * x, -math.inf, -1).sum(),
    "masked with infinity": lambda w, x: torch.softmax((w * x).masked_fill(x > 1, -math.inf), -1).square().sum(),
    "not a number": lambda w, x: torch.where(x > 0, w * x, torch.nan).nan_to_num(0.5, math.inf, -math.inf).sum(),
    "cosine_similarity": lambda w, x: F.cosine_similarity(w, x, dim=-1).sum(),
    "einsum to a number": lambda w, x: torch.einsum("ab,ab->", w, x),
    "a negative base": lambda w, x: (-2.0 * torch.pow(torch.tensor(-2.0, dtype=torch.float64), x.round()) * w).sum(),
    "a number times a product": lambda w, x: torch.einsum("ab,->ab", w, torch.tensor(2.0, dtype=torch.float64)).sum(),
    "a number stacked": lambda w, x: torch.stack([w.sum(), torch.tensor(-0.0, dtype=torch.float64)]).square().sum(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_without_a_literal_and_numbers_for_tensors(name: str) -> None:
    run_script(lambda: Formula(FORMULAS[name]), lambda: {"x": draw((4, 6), "whole", 4)}, "SGD(params, lr=1.0)", ("dp2", "tp2"))


def test_every_setting_is_valid_python() -> None:
    odd = (1.5, math.inf, (-math.inf, [None]), {"a": math.nan}, ("one",), (), "inf", torch.float32)
    back = eval(python(odd), {"torch": torch})
    assert repr(back) == repr(odd)


def test_every_number_is_valid_cpp() -> None:
    writer = Writer(CPP, number, lambda text, dtype: text)
    texts = [writer.text(const(x)) for x in (math.inf, -math.inf, math.nan, -0.0, 2.0, 0.5, 1e30)]
    assert texts == ["real(INFINITY)", "real(-INFINITY)", "real(NAN)", "real(-0.0)", "2", "real(0.5)", "real(1e+30)"]


def test_the_host_overflows_as_tensors_do() -> None:
    run = host_function("lambda a, b: ((a / b), np.exp(a), np.sqrt(b - a), (1.0 / np.sqrt(b)), np.maximum(a, b / b))")
    told = run(a=1000.0, b=0.0)
    assert told[:2] == (math.inf, math.inf) and told[3] == math.inf and math.isnan(told[2]) and math.isnan(told[4])


def test_settings_with_infinities_are_read_back() -> None:
    p = trace(lambda x: {"y": w.clamp(x, 0.0, math.inf)}, Mesh(dp=1), name="clamped", x=f64(3))
    assert parse(p.text).text == p.text


# -- depth ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "sum", "pieces"])
def test_a_program_may_be_deeper_than_python_recurses(name: str) -> None:
    n = 1100

    def deep(x: Tensor) -> dict[str, Tensor]:
        y = x
        if name == "chain":
            for k in range(n):
                y = w.sin(y) if k % 2 else y * 1.0001
            return {"loss": w.sum(y)}
        terms = [x * float(k) for k in range(n)] if name == "sum" else [w.pad(w.narrow(x, 0, k, k + 1), 0, k, n - k - 1) for k in range(n)]
        for term in terms:
            y = y + term
        return {"loss": w.sum(y * y)}

    shape = (n,) if name == "pieces" else (3,)
    p = grad(trace(deep, Mesh(dp=1), name="deep", x=f64(*shape)))
    x = torch.linspace(0.1, 1.0, shape[0], dtype=torch.float64)
    got = Compiled(p)({"x": x})
    leaf = x.clone().requires_grad_()
    y = leaf
    for k in range(n):
        y = (y.sin() if k % 2 else y * 1.0001) if name == "chain" else y + leaf * float(k) if name == "sum" else y
    loss = y.sum() if name == "chain" else ((2 * leaf if name == "pieces" else y) ** 2).sum()
    torch.testing.assert_close(got["loss"], loss.detach())
    torch.testing.assert_close(got["d.x"], torch.autograd.grad(loss, leaf)[0])


def test_pieces_laid_side_by_side_are_one_call() -> None:
    def joined(x: Tensor) -> dict[str, Tensor]:
        parts = [w.pad(w.narrow(x, 0, k, k + 1) * 2.0, 0, k, 3 - k) for k in range(4)]
        return {"y": (parts[2] + parts[0]) + (parts[3] + parts[1]), "z": w.pad(w.narrow(x, 0, 0, 2), 0, 0, 2) + w.pad(w.narrow(x, 0, 0, 3), 0, 1, 0)}

    p = trace(joined, Mesh(dp=1), name="joined", x=f64(4))
    texts = [f.text(lambda n: n.op.name) for f in peepholes_of(p, (), {}, False, "cpu")]
    assert texts == ["torch.cat([mul, mul, mul, mul], 0)"]



def test_a_number_beside_a_tensor_is_written_as_one() -> None:
    """A compiler multiplies for x ** 3.0 and calls pow for a tensor of 3.0, also where the gradient takes a power less."""
    for power, backward in ((3.0, "torch.square("), (4.0, "** 3.0"), (2.5, "** 1.5")):
        program = grad(trace(lambda x, power=power: w.sum(x**power * 0.5 + x), Mesh(), x=f64(5)), wrt=["x"])
        text = Compiled(program).code.text
        assert f"** {power}" in text and backward in text and "torch.full" not in text.replace("torch.full((), 1.0", "")
        x = torch.randn(5, dtype=torch.float64).abs().requires_grad_()
        (x**power * 0.5 + x).sum().backward()
        torch.testing.assert_close(Compiled(program)({"x": x.detach()})["d.x"], x.grad)
