"""A step that does no harm where its loss is NaN or Inf."""

from __future__ import annotations

from dataclasses import replace

from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.ops.pointwise import isfinite, logical_and, where


def guarded(captured: Captured) -> Captured:
    """The step that leaves all state as it was where the loss, or the norm of the gradient, is NaN or Inf."""
    return replace(captured, program=skip_nan(captured.program))


def skip_nan(p: Program) -> Program:
    """The same of its program, or of that as it is placed."""
    ok = isfinite(p.output_names["loss"])
    if "grad_norm" in p.output_names:
        ok = logical_and(ok, isfinite(p.output_names["grad_norm"]))
    state = dict(p.state)
    outputs = {name: where(ok, n, p.input_names[state[name]]) if name in state else n for name, n in p.outputs}
    return new_program(p.name, p.mesh, p.inputs, outputs, state=p.state, lines=p.lines)
