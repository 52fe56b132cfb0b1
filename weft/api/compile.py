"""`weft.compile`: a program, or a model under a plan, as a callable on this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft import interp
from weft.api.compiled import Compiled
from weft.core.errors import PlanError
from weft.core.program import Program
from weft.frontend.capture import capture
from weft.frontend.capture.step import named_batch
from weft.plan.named import Named, input_layouts
from weft.plan.place import place


def compile(what: Program | nn.Module, plan: str = "dp1", example: Any = None, *, device: str | torch.device = "cpu") -> Any:
    """A program as a function on local tensors by name; a model, for inference, as a function on whole batches."""
    if isinstance(what, Program):
        return Compiled(what, device=device)
    if example is None:
        raise PlanError("a model is compiled for batches of one shape", needed="example=, such a batch", found="none")
    return Inference(what, plan, example, torch.device(device))


class Inference:
    """A model's forward pass under a plan; weights are held as the plan says, results are whole on every rank."""

    def __init__(self, model: nn.Module, plan: str, example: Any, device: torch.device) -> None:
        self.captured = capture(model, example)
        named = Named.parse(plan)
        if named.pp > 1 or named.micro or named.recompute:
            raise PlanError("inference runs a batch whole", needed="a plan without pp, micro and recompute", found=plan)
        layouts, options = input_layouts(self.captured.program, named, {})
        self.program = place(self.captured.program, named.mesh, layouts, options)
        self.compiled = Compiled(self.program, device=device)
        values = {**self.captured.parameters, **self.captured.buffers, **self.captured.constants}
        self._weights = {n: self._local(n, v.detach()) for n, v in values.items() if n in self.program.input_names}

    def _local(self, name: str, value: Tensor) -> Tensor:
        layout = self.program.input_names[name].layout
        return interp.take_local(value, layout, self.compiled.coords).to(self.compiled.device).contiguous()

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        given = {n: self._local(n, x) for n, x in named_batch(batch).items() if n in self.program.input_names}
        return self.compiled({**self._weights, **given})  # type: ignore[no-any-return]
