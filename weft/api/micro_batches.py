"""What a step in micro-batches runs before its update: forward and backward passes, over the stages of a pipeline or, with `micro` alone, on
every rank by itself. The state is the step's own, laid out as its update has it; between two updates each rank runs its stages by the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from weft import interp, passes
from weft.api.compiled import Compiled
from weft.api.runner import Runner, Values
from weft.api.safety import verified
from weft.core.layout import Layout, S
from weft.core.node import Type
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.batches import named_batch
from weft.frontend.capture.micro import PART, Micro, micro_batch
from weft.ops.comm import reshard
from weft.ops.source import input_node
from weft.passes import Draft, Stages
from weft.plan.named import input_layouts
from weft.plan.place import Placements, place
from weft.plan.schedules import Action
from weft.plan.spec import Spec
from weft.plan.split import LOSS_SUM, program_of, split_like
from weft.runtime.agree import require_same
from weft.runtime.board import doing
from weft.runtime.messages import Messages
from weft.transform.pipeline import PlacedPipeline, PlacedStage, place_stage, spread, update

if TYPE_CHECKING:
    from weft.rewrite.check import Report


class MicroBatches:
    """Forward and backward passes of all micro-batches; `like` is the compiled update behind them."""

    def __init__(self, draft: Draft, like: Compiled) -> None:
        self.draft, self.plan, self.like = draft, draft.spec, like
        self.micro, self.pipeline, self.split = cast(Micro, draft.micro), cast(PlacedPipeline, draft.pipeline), cast(Stages, draft.stages)
        require_same(f"pipeline {self.plan}", self.pipeline.text)
        self.messages = Messages(self.plan.mesh.groups("pp"), like.device) if self.plan.pp > 1 else None
        order = self.plan.pipeline.orders(self.plan.pp, self.plan.micro_batches, self.plan.chunks)
        self.runner = Runner(self.pipeline.stages, order, like, self.messages, carried=self.alone)
        self.spread = self.spreader(self.pipeline.stages)
        self.batch_types = self._full_batch_types()
        self.first = None if self.micro.first is None else self._before(self.micro.first)

    @property
    def alone(self) -> bool:
        """Whether micro-batches go by themselves: the step is not derived from the full batch's."""
        return self.micro.full is None

    @property
    def samples(self) -> int:
        """Of a full batch."""
        dims = self.micro.dims or dict.fromkeys(self.batch_types, 0)
        return next((t.shape[dims[n]] for n, t in self.batch_types.items() if t.shape and n in dims), 1)

    def under_plan(self, plan: Spec) -> PlacedPipeline:
        """The same step under another plan of the same mesh: laid out, split and recomputed in the same way, where it has as many stages."""
        return cast(PlacedPipeline, passes.run(replace(self.draft, spec=plan), after="rules").pipeline)

    def _full_batch_types(self) -> dict[str, Type]:
        """How a full batch is laid out: every micro-batch as the stages hold it, one behind the other."""
        programs = [self.draft.step.program, *([self.micro.first] if self.micro.first is not None else ())]
        found: dict[str, Type] = {}
        for p, times in zip(programs, (self.micro.parts, 1), strict=False):
            for name, n in p.inputs_for(Role.BATCH).items():
                if name not in found:
                    dim = self.micro.dims.get(name)
                    shape = tuple(size * (times if d == dim else 1) for d, size in enumerate(n.shape))
                    found[name] = Type(n.dtype, Layout.of(self.plan.mesh, shape, self._places(name, shape, dim)))
        return found

    def _places(self, name: str, shape: tuple[int, ...], dim: int | None) -> Placements:
        """Placements of a tensor of a micro-batch, in the full tensor."""
        each = {axis: p for axis, p in self.split.placements.get(name, {}).items() if axis in self.plan.mesh.axes}
        size = shape[dim] // self.micro.parts if dim is not None else 0
        return {a: S(dim, size) if isinstance(p, S) and p.dim == dim and p.within is None else p for a, p in each.items()}  # type: ignore[arg-type]

    def _before(self, first: Program) -> Compiled:
        """What is computed of the full batch before its micro-batches, by all ranks together."""
        placements = {n: t.layout.placements for n, t in self.batch_types.items() if n in first.input_names}
        return Compiled(place(first, self.plan.mesh, placements), self.like.device_mesh, self.like.device)

    def spreader(self, stages: tuple[PlacedStage, ...]) -> Compiled | None:
        program = spread(self.pipeline, stages, self.like.program)
        return None if program is None else Compiled(program, self.like.device_mesh, self.like.device)

    # -- running ---------------------------------------------------------------------------------------------------------------

    def run(self, given: Mapping[str, Tensor], state: Values, seed: int) -> Values:
        """All micro-batches: sums of gradients and losses. Buffers in `state` become what the passes leave in them."""
        self._buffers = {n: x for n, x in state.items() if n.startswith("buffer.")}
        values = readable(self.spread, state)
        first = self.first({**values, **given, **self.seeds(0, seed)}) if self.first is not None else {}
        ahead = {n: x for n, x in first.items() if n in self.draft.step.program.inputs_for(Role.AHEAD)}
        parts = self._micro_batches(given)
        with doing(f"the stages of {self.draft.step.program.name}"):
            sums, buffers = self.runner.run(values, lambda k: {**parts[k], **ahead, **self.seeds(k, seed)}, self.micro.summed)
        state |= {n: x for n, x in {**buffers, **first}.items() if n in state}
        return sums

    def take_back(self, state: Values) -> None:
        """After a step that was skipped: its buffers as they were before."""
        state |= self._buffers

    def seeds(self, k: int, seed: int) -> Values:
        """The seed of the step, and which micro-batch it is; for micro-batches by themselves, another seed for each."""
        numbers = {"seed": seed * self.micro.parts + k if self.alone else seed, PART: k}
        return {n: torch.tensor(x, device=self.like.device) for n, x in numbers.items()}

    def _micro_batches(self, given: Mapping[str, Tensor]) -> list[Values]:
        """The inputs of every micro-batch, of this rank's part of the batch."""
        k = self.micro.parts
        parts = {n: x.chunk(k, self.micro.dims[n]) if n in self.micro.dims else [x] * k for n, x in given.items()}
        return [{n: xs[j] for n, xs in parts.items()} for j in range(k)]

    # -- trust -----------------------------------------------------------------------------------------------------------------

    def verify(self) -> Report | None:
        """What runs first, every stage and the update against what one device would run; the report of the last."""
        if self.first is not None and self.micro.first is not None:
            verified(self.micro.first, self.first.program)
        reports = [verified(*stage.unsplit) for stage in self.pipeline.stages]
        return [*reports, verified(self.pipeline.single, self.pipeline.update)][-1]

    def one_by_one(self, captured: Captured, batch: Any, values: Values, change: Callable[[Tensor], Tensor], seed: int) -> Values:
        """By the interpreter: the mean over the micro-batches, one after another, and the update."""
        p, k = captured.program, self.micro.parts
        kept = {n: x for n, x in p.outputs if n == "loss" or n.startswith("buffer.")}
        one = program_of("one", {**kept, **{f"d.{n}": g for n, g in captured.gradients.items()}}, p, {})
        sums: Values = {}
        for j in range(k):
            part = {n: change(x).to(self.like.device) for n, x in named_batch(micro_batch(batch, j, k)).items()}
            inputs = {**values, **part, **self.seeds(j, seed)}
            out = interp.run_global(one, {n: inputs[n] for n in one.input_names})
            values |= {n: x for n, x in out.items() if n.startswith("buffer.")}
            sums = {n: sums[n] + x if j else x for n, x in out.items() if not n.startswith("buffer.")}
        terms = {f"{n}.0": x for n, x in sums.items() if n != "loss"} | {LOSS_SUM: sums["loss"]}
        last = update(captured, {n: [f"d.{n}.0"] for n in captured.gradients}, lambda _: None)
        return interp.run_global(last, {n: {**values, **terms}[n] for n in last.input_names})


class ForwardStages:
    """The forward pass of a captured loss through the same stages, of a full batch at once."""

    def __init__(self, parts: MicroBatches, captured: Captured) -> None:
        plan, program, like = parts.plan, captured.program, parts.like
        placements, options = input_layouts(program, plan, {})
        own = {n for n, x in program.input_names.items() if x.role is not Role.BATCH and n not in captured.constants}
        placements |= {n: places for n, places in parts.split.placements.items() if n in own}
        borders: dict[str, Any] = {}
        stages = split_like(captured, parts.split.plain)
        placed = tuple(sorted((place_stage(s, plan, placements, options, borders) for s in stages), key=lambda s: s.number))
        order = tuple(tuple(Action("forward", c, 0) for c in range(plan.chunks)) for _ in range(plan.pp))
        self.runner = Runner(placed, order, like, parts.messages)
        self.spread = parts.spreader(placed)
        self.types = {n: Type(x.dtype, _without_pp(x.type)) for s in placed for n, x in s.phases[0].input_names.items()}
        self.last = Compiled(_full_loss(placed), like.device_mesh, like.device)

    def __call__(self, values: Values) -> Values:
        sums, _ = self.runner.run(readable(self.spread, values), lambda _: {})
        return self.last(sums)


def readable(spreader: Compiled | None, state: Values) -> Values:
    """State as this rank's stages read it: its own, and what others keep for it."""
    if spreader is None:
        return dict(state)
    given = {n: state[n] for n in spreader.program.input_names if n in state}
    copies = {n.rsplit(".", 1)[0]: x for n, x in spreader(given).items()}
    return {**state, **copies}


def _without_pp(type_: Type) -> Any:
    return type_.layout.release("pp") if "pp" in type_.mesh.axes else type_.layout


def _full_loss(stages: tuple[PlacedStage, ...]) -> Program:
    """The loss of the last stage, in full on every rank."""
    loss = next(s.phases[0].output_names["loss"] for s in stages if "loss" in s.phases[0].output_names)
    given = input_node(LOSS_SUM, loss.type)
    return new_program("loss", loss.mesh, [given], {"loss": reshard(given, Layout.of(loss.mesh, ()))})
