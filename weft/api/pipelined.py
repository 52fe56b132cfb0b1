"""A training step in micro-batches, over the stages of a pipeline or, with `micro` alone, on every rank by itself.

The state is that of the update program, which every rank has; between two updates each rank runs its stages by the schedule.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from weft import interp, passes
from weft.api.check_step import Case, Verdict, check_against_torch
from weft.api.compiled import Compiled
from weft.api.data import Rows
from weft.api.eager import How, Moment
from weft.api.options import Options
from weft.api.retracing import MOST
from weft.api.runner import Runner, Values
from weft.api.safety import seen_by_first, verified
from weft.api.step import Step
from weft.core.errors import PlanError
from weft.core.layout import Layout, S
from weft.core.node import Type, user_level
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.batches import named_batch
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.micro import PART, Micro, batch_dims_of, in_micro_batches, micro_batch, require_gradients, require_parts
from weft.frontend.capture.restored import as_before, evaluating
from weft.ops.comm import reshard
from weft.ops.source import input_node
from weft.passes import Draft, Follows, Stages, place_stages, split_stages
from weft.plan.named import input_layouts
from weft.plan.pins import parse_pin
from weft.plan.place import Placements, place
from weft.plan.schedules import Action
from weft.plan.spec import Spec
from weft.plan.split import LOSS_SUM, program_of, split_like
from weft.runtime.agree import rank, require_same
from weft.runtime.board import doing
from weft.runtime.messages import Messages
from weft.transform.pipeline import PlacedPipeline, PlacedStage, place_stage, spread, update

if TYPE_CHECKING:
    from weft.api.record_pipeline import PipelineRecorder
    from weft.rewrite.check import Report

Loss = Callable[[nn.Module, Any], Tensor]


def pipelined(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Any,
    plan: Spec,
    device: torch.device,
    asked: Options,
    *,
    followed: Follows | None = None,
    known: Callable[[Captured], bool] | None = None,
    **settings: Any,
) -> PipelinedStep | None:
    """The step of a plan in micro-batches; what is `asked` may say how many where the plan does not, `followed` what it says beyond its words;
    `settings` go to the capture. Of a step that was made before, `known` tells programs that need not be made again."""
    accumulate, how = asked.accumulate, How(**asked.how)
    if accumulate > 1 and plan.micro not in (0, accumulate):
        raise PlanError(
            f"{plan} and accumulate={accumulate} differ", needed="one number of micro-batches", found=f"{plan.micro} and {accumulate}"
        )
    plan = replace(plan, micro=accumulate if accumulate > 1 else plan.micro)
    moment = Moment.now()
    steps = micro_steps(model, example, loss, optimizer, mean=asked.allow_micro_mean, **asked.how, **settings)
    take = partial(steps, plan.micro_batches) if known is None and plan.micro else partial(_fewer, plan, steps, example)
    draft = passes.run(
        Draft(None, plan, followed, pins=tuple(map(parse_pin, asked.pins)), guard=asked.guard, low=asked.low, device=device, derive=take),
        until="micro-batch",
    )
    micro, captured = cast(Micro, draft.micro), draft.captured
    if known is not None and known(captured):
        return None
    case = Case(model, loss, optimizer, how, device, moment)

    def look(batch: Any) -> Verdict | None:
        with as_before(captured.reads):
            return _checked(micro, case, batch)

    verdict = look(example) if asked.check and known is None else None
    draft = passes.run(draft, after="micro-batch")
    step = PipelinedStep(replace(micro, captured=draft.step), draft, model, loss, optimizer, asked.seed)
    step.captured, step.traced, step.moves, step.verified, step.how = captured, captured.program, draft.moves, verdict, how
    step.unjudged, step.checked = look if asked.check and known is not None else None, asked.check
    if asked.check:
        step.report = step.verify()
    return step


def _fewer(plan: Spec, steps: Callable[[int], Micro], example: Any) -> Micro:
    """The step in as many micro-batches as the plan has, or in fewer: where it gives none, and for a batch of another size than the example.

    Where samples cannot be distinguished, or the loss is no sum over them, the full batch goes through the stages at once."""
    try:
        samples, _ = batch_dims_of(example)
        most = next((n for n in range(plan.micro_batches, 0, -1) if samples % n == 0 and plan.pipeline.may_take(plan.pp, n)), plan.micro_batches)
        return steps(most)
    except PlanError as e:
        if not plan.pipeline.may_take(plan.pp, 1):
            raise
        full = steps(1)
        if plan.pp > 1 and rank() == 0:
            warnings.warn(
                f"{plan}: the full batch goes through the stages at once, which wait for each other ({e.message}: {e.found})", stacklevel=user_level()
            )
        return full


def micro_steps(
    model: nn.Module, example: Any, loss: Loss, optimizer: torch.optim.Optimizer, *, mean: bool = False, **settings: Any
) -> Callable[[int], Micro]:
    """Gives the step of one of so many micro-batches, derived from the full batch's or, for the mean over them, captured by itself."""
    full = functools.cache(lambda: capture(model, example, loss, optimizer, **settings))

    def one(parts: int) -> Micro:
        if parts == 1:
            return in_micro_batches(full(), 1, {})
        samples, dims = batch_dims_of(example)
        require_parts(samples, parts)
        if mean:
            return _alone(model, example, parts, dims, loss, optimizer, settings)
        return _derived(full(), parts, dims, example)

    return one


def _alone(
    model: nn.Module, example: Any, parts: int, dims: Mapping[str, int], loss: Loss, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Micro:
    """The step of a micro-batch by itself, its loss an even part of the mean."""
    part = micro_batch(example, 0, parts)
    try:
        captured = capture(model, part, lambda m, b: loss(m, b) / parts, optimizer, **settings)
    except IndexError as e:
        cut = ", ".join(f"{n.removeprefix('batch.')} {list(x.shape)}" for n, x in named_batch(part).items())
        raise PlanError(
            "the model cannot take a micro-batch", needed="every tensor of the batch to be sharded along its samples",
            found=f"{e} with {cut}", try_="a batch whose number of samples no other dim has, or a plan without pp and micro",
        ) from e  # fmt: skip
    require_gradients(captured)
    return Micro(captured, parts, dims)


def _checked(micro: Micro, case: Case, example: Any) -> Verdict | None:
    """The full batch's step against torch or, where micro-batches go by themselves, that of the first."""
    if micro.whole is not None:
        full = micro.whole
        return seen_by_first(lambda: check_against_torch(full, case, example))
    own = case.loss
    case, small = replace(case, loss=lambda m, b: own(m, b) / micro.parts), micro_batch(example, 0, micro.parts)
    return seen_by_first(lambda: check_against_torch(micro.captured, case, small))


def _derived(captured: Captured, parts: int, dims: Mapping[str, int], example: Any) -> Micro:
    """The same; a refusal names the tensors that were not sharded."""
    try:
        return in_micro_batches(captured, parts, dims)
    except PlanError as e:
        left = [f"{n.removeprefix('batch.')} {list(x.shape)}" for n, x in named_batch(example).items() if n not in dims and x.ndim]
        if left:
            e.found = f"{e.found}; {', '.join(left)} of the batch has no dim of its samples and is taken in full"
        raise e.at(None) from None


class PipelinedStep(Step):
    """Forward and backward in micro-batches by a schedule, then one update."""

    lifts = False

    def __init__(self, micro: Micro, draft: Draft, model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.micro, captured, plan, device = micro, micro.captured, draft.spec, draft.device
        self._ahead = captured.program.inputs_for(Role.AHEAD)
        self.line, self.split = cast(PlacedPipeline, draft.laid), cast(Stages, draft.stages)
        self._draft = draft
        super().__init__(captured, self.line.update, plan, model, loss, optimizer, device, seed)
        require_same(f"pipeline {plan}", self.line.text)
        self.messages = Messages(plan.mesh.groups("pp"), device) if plan.pp > 1 else None
        order = plan.pipeline.orders(plan.pp, plan.micro_batches, plan.chunks)
        self.runner = Runner(self.line.stages, order, self.compiled, self.messages, carried=micro.whole is None)
        self._spread = self._spreader(self.line.stages)
        self._batch_types = self._full_batch_types()
        self.samples = next((t.shape[micro.dims.get(n, 0)] for n, t in self._batch_types.items() if t.shape), 1)
        self._first = None if micro.first is None else self._before(micro.first)
        self._evaluations: list[_Evaluation] = []

    def under_plan(self, plan: Spec) -> PlacedPipeline:
        """The same step under another plan of the same mesh: laid out, split and recomputed in the same way, where it has as many stages."""
        found = self._draft.plan.found(self._draft.step) if self._draft.plan is not None else None
        return place_stages(self._draft.step, plan, split_stages(self._draft.step, plan, {}, self.split.held, found), first=self.micro.first)

    def _full_batch_types(self) -> dict[str, Type]:
        """How a full batch is laid out: every micro-batch as the stages hold it, one behind the other."""
        programs = [self.micro.captured.program, *([self.micro.first] if self.micro.first is not None else ())]
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
        each = {axis: p for axis, p in self.split.held.get(name, {}).items() if axis in self.plan.mesh.axes}
        size = shape[dim] // self.micro.parts if dim is not None else 0
        return {a: S(dim, size) if isinstance(p, S) and p.dim == dim and p.within is None else p for a, p in each.items()}  # type: ignore[arg-type]

    def _before(self, first: Program) -> Compiled:
        """What is computed of the full batch before its micro-batches, by all ranks together."""
        placements = {n: t.layout.placements for n, t in self._batch_types.items() if n in first.input_names}
        return Compiled(place(first, self.plan.mesh, placements), self.compiled.device_mesh, self.compiled.device)

    def _spreader(self, stages: tuple[PlacedStage, ...]) -> Compiled | None:
        program = spread(self.line, stages, self.program)
        return None if program is None else Compiled(program, self.compiled.device_mesh, self.compiled.device)

    def _readable(self, spreader: Compiled | None) -> Values:
        """State as this rank's stages read it: its own, and what others keep for it."""
        if spreader is None:
            return dict(self._state)
        given = {n: self._state[n] for n in spreader.program.input_names if n in self._state}
        copies = {n.rsplit(".", 1)[0]: x for n, x in spreader(given).items()}
        return {**self._state, **copies}

    # -- running ---------------------------------------------------------------------------------------------------------------

    def run(self, given: Mapping[str, Tensor], state: Values) -> Values:
        """All micro-batches and the update; `state` is overwritten as far as the update may."""
        self._buffers = {n: x for n, x in state.items() if n.startswith("buffer.")}
        readable = {**self._readable(self._spread), **state}
        first = self._first({**readable, **given, **self._seed(0)}) if self._first is not None else {}
        parts, ahead = self._micro_batches(given), {n: x for n, x in first.items() if n in self._ahead}  # buffers are read as they were
        with doing(f"the stages of {self.captured.program.name}"):
            sums, buffers = self.runner.run(readable, lambda k: {**parts[k], **ahead, **self._seed(k)}, self.micro.summed)
        state |= {n: x for n, x in {**buffers, **first}.items() if n in state}
        return self.compiled({**state, **sums, **self._numbers()})

    def stepped(self, skipped: bool = False) -> None:
        """A step that was skipped leaves buffers as they were, too."""
        super().stepped(skipped)
        self._state |= self._buffers if skipped else {}

    def _seed(self, k: int) -> Values:
        """The seed of the step, and which micro-batch it is; for micro-batches by themselves, another seed for each."""
        alone = self.micro.whole is None
        numbers = {"seed": (self.seed + self.steps) * self.micro.parts + k if alone else self.seed + self.steps, PART: k}
        return {n: torch.tensor(x, device=self.compiled.device) for n, x in numbers.items()}

    def _micro_batches(self, given: Mapping[str, Tensor]) -> list[Values]:
        """The inputs of every micro-batch, of this rank's part of the batch."""
        k = self.micro.parts
        parts = {n: x.chunk(k, self.micro.dims[n]) if n in self.micro.dims else [x] * k for n, x in given.items()}
        return [{n: xs[j] for n, xs in parts.items()} for j in range(k)]

    def rows(self, samples: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> Rows:
        """All rows of every batch of a data set: a pipeline takes full batches."""
        return Rows(samples, self.samples, torch.arange, shuffle=shuffle, seed=seed, start=self.steps, drop_last=drop_last)

    def record(self, folder: str | None, *, cluster: str = "", progress: bool = True) -> PipelineRecorder:
        """Watch the steps from here on: print how training goes, and write a run for `weft report` into the folder."""
        from weft.api.record_pipeline import PipelineRecorder

        self.recorder = PipelineRecorder(self, folder, cluster, progress)
        return self.recorder

    def eval(self, batch: Any) -> Tensor:
        """The loss alone, in evaluation mode; nothing changes."""
        self.take_written()
        found = next((e for e in self._evaluations if e.shapes == _shapes(batch) and e.reads.hold(batch)), None)
        if found is None:
            found = _Evaluation(self, batch)
            self._evaluations = [*self._evaluations[-MOST:], found]
        return found(batch)

    # -- trust -----------------------------------------------------------------------------------------------------------------

    def verify(self) -> Report | None:
        """What runs first, every stage and the update against what one device would run; the report of the last."""
        if self._first is not None and self.micro.first is not None:
            verified(self.micro.first, self._first.program)
        reports = [verified(*stage.unsplit) for stage in self.line.stages]
        return [*reports, verified(self.line.single, self.line.update)][-1]

    @property
    def _full_step(self) -> Captured | None:
        return self.micro.whole

    def _inputs(self, batch: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Values:
        return super()._inputs(batch, change) | self._seed(0)

    def _on_one_device(self, batch: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Mapping[str, Tensor]:
        """The captured step of the full batch, or micro-batch by micro-batch, by the interpreter, from changed inputs."""
        if self.micro.whole is not None:
            return super()._on_one_device(batch, change)
        return self._by_themselves(batch, self._inputs(batch, change), change)

    def _by_themselves(self, batch: Any, values: Values, change: Callable[[Tensor], Tensor]) -> Values:
        """The mean over the micro-batches, one after another, and the update."""
        p, k = self.captured.program, self.micro.parts
        kept = {n: x for n, x in p.outputs if n == "loss" or n.startswith("buffer.")}
        one = program_of("one", {**kept, **{f"d.{n}": g for n, g in self.captured.gradients.items()}}, p, {})
        sums: Values = {}
        for j in range(k):
            part = {n: change(x).to(self.compiled.device) for n, x in named_batch(micro_batch(batch, j, k)).items()}
            inputs = {**values, **part, **self._seed(j)}
            out = interp.run_global(one, {n: inputs[n] for n in one.input_names})
            values |= {n: x for n, x in out.items() if n.startswith("buffer.")}
            sums = {n: sums[n] + x if j else x for n, x in out.items() if not n.startswith("buffer.")}
        terms = {f"{n}.0": x for n, x in sums.items() if n != "loss"} | {LOSS_SUM: sums["loss"]}
        last = update(self.captured, {n: [f"d.{n}.0"] for n in self.captured.gradients}, lambda _: None)
        return interp.run_global(last, {n: {**values, **terms}[n] for n in last.input_names})


def _batch_types(stages: tuple[PlacedStage, ...]) -> dict[str, Type]:
    """How micro-batches are laid out, whichever stages read them."""
    found: dict[str, Type] = {}
    for s in stages:
        for p in s.phases:
            found |= {n: Type(x.dtype, _without_pp(x.type)) for n, x in p.inputs_for(Role.BATCH).items()}
    return found


def _without_pp(type_: Type) -> Any:
    return type_.layout.release("pp") if "pp" in type_.mesh.axes else type_.layout


class _Evaluation:
    """The forward pass alone through the same stages, of a full batch at once."""

    def __init__(self, step: PipelinedStep, batch: Any) -> None:
        self.step, self.shapes = step, _shapes(batch)
        with evaluating(step.model):
            self.reads = Reads(step.model, step.loss, batch)
            self.captured = capture(step.model, batch, step.loss, reads=self.reads)
            self.reads.undo()
            step.check_loss(self.captured, batch)
        self.reads.in_any_mode()
        plan, program = step.plan, self.captured.program
        placements, options = input_layouts(program, plan, {})
        placements |= {n: places for n, places in step.split.held.items() if n in program.input_names and program.input_names[n].role is not Role.BATCH}
        borders: dict[str, Any] = {}
        stages = split_like(self.captured, step.split.cut)
        self.stages = tuple(sorted((place_stage(s, plan, placements, options, borders) for s in stages), key=lambda s: s.number))
        order = tuple(tuple(Action("forward", c, 0) for c in range(plan.chunks)) for _ in range(plan.pp))
        self.runner = Runner(self.stages, order, step.compiled, step.messages)
        self.spread = step._spreader(self.stages)
        self.types = _batch_types(self.stages)
        self.last = Compiled(_full_loss(self.stages), step.compiled.device_mesh, step.compiled.device)

    def __call__(self, batch: Any) -> Tensor:
        coords, device = self.step.compiled.coords, self.step.compiled.device
        given = named_batch(batch)
        inputs = {n: interp.take_local(given[n], t.layout, coords).to(device) for n, t in self.types.items()}
        state = self.step._readable(self.spread)
        state |= {n: x.to(device) for n, x in self.reads.tensors_now(self.captured.constants).items()}
        sums, _ = self.runner.run(state, lambda _: inputs)
        return self.last(sums)["loss"]


def _shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    return {n: tuple(x.shape) for n, x in named_batch(batch).items()}


def _full_loss(stages: tuple[PlacedStage, ...]) -> Program:
    """The loss of the last stage, in full on every rank."""
    loss = next(s.phases[0].output_names["loss"] for s in stages if "loss" in s.phases[0].output_names)
    given = input_node(LOSS_SUM, loss.type)
    return new_program("loss", loss.mesh, [given], {"loss": reshard(given, Layout.of(loss.mesh, ()))})
