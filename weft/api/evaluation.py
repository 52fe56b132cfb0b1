"""The loss of a step's model in evaluation mode: a program for batches of one shape and for what Python says, placed as the step is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from weft.api.check_module import LossCase
from weft.api.check_step import check_against_torch, check_current_state
from weft.api.compiled import Compiled
from weft.api.data import Shapes
from weft.api.eager import How
from weft.api.micro_batches import ForwardStages
from weft.api.safety import seen_by_first
from weft.core.layout import R
from weft.core.node import Type
from weft.core.role import Role
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.restored import as_before, evaluating
from weft.plan.place import place

if TYPE_CHECKING:
    from weft.api.step import Step


class Evaluation:
    """One program of the loss alone; nothing of the step changes when it runs."""

    def __init__(self, step: Step, batch: Any, brought: Shapes) -> None:
        self.step, self.brought = step, brought
        with evaluating(step.model):
            reads = Reads(step.model, step.loss, batch)
            reads.answers = step.forms.asked() if step.forms is not None else None
            self.captured = capture(step.model, batch, step.loss, reads=reads)
            reads.undo()
            _check(step, self.captured, batch)
        self.reads = reads.in_any_mode()
        self.lasts = not (reads.left or reads.drew)  # whether the program serves other batches too
        self.run: Compiled | ForwardStages
        if step.micro_batches is not None:
            self.run = ForwardStages(step.micro_batches, self.captured)
            self.types = self.run.types
        else:
            self.run = self._compiled()
            self.types = {n: node.type for n, node in self.run.program.input_names.items()}

    def _compiled(self) -> Compiled:
        """State where the step has it, and a batch sharded as the step's, if it is of the same shape or comes in parts."""
        step, program = self.step, self.captured.program
        types = {n: step.layout_of(n) for n in step.state_names if n in program.input_names and n not in self.captured.constants}
        types |= {n: t for n, t in step._batch_types.items() if n in program.input_names and self.brought.full[n] == t.shape}
        placements = self.brought.parts | {n: {a: p for a, p in t.layout.placements.items() if p != R} for n, t in types.items()}
        return Compiled(place(program, step.program.mesh, placements), device=step.compiled.device)

    @property
    def batch_types(self) -> dict[str, Type]:
        inputs = self.captured.program.inputs_for(Role.BATCH)
        return {n: t for n, t in self.types.items() if n in inputs}

    def is_for(self, batch: Any, brought: Shapes) -> bool:
        return self.brought == brought and self.reads.hold(batch)

    def __call__(self, batch: Any) -> Tensor:
        step, inputs = self.step, self.captured.program.input_names
        given = step._batch(batch, self.batch_types)
        constants = {n: x for n, x in self.reads.tensors_now(self.captured.constants).items() if n in self.types}
        local = {n: step.compiled.part(x, self.types[n].layout) for n, x in constants.items()}
        seed = torch.full((), step.seed + step.steps, dtype=torch.int64, device=step.compiled.device)
        values = {**step.local_state, **given, "seed": seed, **local}
        return self.run({n: x for n, x in values.items() if n in inputs})["loss"]


def _check(step: Step, captured: Captured, batch: Any) -> None:
    """Compare the loss in evaluation mode with torch's."""
    if not step.checked:
        return
    case = LossCase(step.model, step.loss, None, How(), step.compiled.device)
    with as_before(captured.reads):
        if any(q.of_state for q in cast(Reads, captured.reads).asked):
            given = {n: step.full(n) for n in captured.program.input_names if n in step.state_names and n not in captured.constants}
            seen_by_first(lambda: check_current_state(captured, case, batch, given))
        else:
            seen_by_first(lambda: check_against_torch(captured, case, batch))
