"""A captured program against torch on one device: the loss, every gradient, and what was written into buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft import interp
from weft.frontend.capture import Captured, capture


def run(captured: Captured, batch: Any, **more: Any) -> dict[str, Tensor]:
    values = {k: v.clone() for k, v in captured.inputs(batch, **more).items()}
    return interp.run_global(captured.program, values)


def torch_grads(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    grads = {f"d.param.{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), grads


def same_as_torch(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, tolerance: float = 1e-5, **how: Any) -> Captured:
    """Capture, interpret, compare; the model is left as it was."""
    captured = capture(model, batch, loss, gradients=True, **how)
    got = run(captured, batch)
    mirror = copy.deepcopy(model)
    value, grads = torch_grads(mirror, loss, batch)
    torch.testing.assert_close(got["loss"], value, atol=tolerance, rtol=tolerance)
    assert {k for k in got if k.startswith("d.")} == set(grads)
    for name, want in grads.items():
        close(got[name], want, tolerance, name)
    for name, buffer in mirror.named_buffers():
        if f"buffer.{name}" in got:
            torch.testing.assert_close(got[f"buffer.{name}"], buffer, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    return captured


def close(got: Tensor, want: Tensor, tolerance: float, name: str) -> None:
    """Within the tolerance of the tensor's own size."""
    scale = max(1.0, want.abs().max().item())
    assert (got - want).abs().max().item() <= tolerance * scale, f"{name}: off by {(got - want).abs().max().item():.3g} of {scale:.3g}"


def same_function(f: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-5) -> Captured:
    """A function of tensors, as a module without parameters but with inputs that want gradients."""

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.ParameterList([nn.Parameter(x) for x in inputs if x.is_floating_point()])

        def forward(self, *whole: Tensor) -> Any:
            floats, others = iter(self.given), iter(whole)
            return f(*(next(floats) if x.is_floating_point() else next(others) for x in inputs))

    def total(model: nn.Module, batch: Any) -> Tensor:
        out = model(*batch)
        parts = out if isinstance(out, (tuple, list)) else [out]
        weighed = [(p * torch.arange(p.numel(), dtype=p.dtype).view(p.shape).cos()).sum() for p in parts if p.is_floating_point()]
        return torch.stack(weighed).sum() if weighed else model.given[0].sum() * 0 + sum(p.double().sum() for p in parts).float()

    return same_as_torch(Of(), total, tuple(x for x in inputs if not x.is_floating_point()), tolerance)


def ops(captured: Captured) -> dict[str, int]:
    """How many nodes of each op the program has."""
    found: dict[str, int] = {}
    for n in captured.program.nodes:
        found[n.op.name] = found.get(n.op.name, 0) + 1
    return found
