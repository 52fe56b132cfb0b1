"""A training step in micro-batches, over the stages of a pipeline or, with `micro` alone, on every rank by itself.

The state is that of the update program, which every rank has; between two updates each rank runs its stages by the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from weft import interp
from weft.api.compiled import Compiled
from weft.api.data import Rows
from weft.api.eager import How, Moment
from weft.api.judge import Case, judge, moved
from weft.api.lines import Laid, laid
from weft.api.parallelize import Step, gathered
from weft.api.runner import Runner, Values
from weft.api.trust import exactly, guarded, seen_by_first, verified
from weft.core.errors import PlanError, RuntimeFault
from weft.core.layout import Layout
from weft.core.node import Type
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.step import named_batch
from weft.ops.comm import reshard
from weft.ops.source import input_node
from weft.plan.line import Line, Placed, place_stage, spread
from weft.plan.named import Named, input_layouts
from weft.plan.pieces import Found
from weft.plan.pins import parse_pin, resolve
from weft.plan.pipeline import Action, orders
from weft.plan.place import Placements
from weft.plan.split import LOSS_SUM, program_of, split_like
from weft.plan.update import update
from weft.runtime.agree import require_same
from weft.runtime.board import doing
from weft.runtime.messages import Messages

if TYPE_CHECKING:
    from weft.api.record_line import LineRecorder
    from weft.rewrite.check import Report

Loss = Callable[[nn.Module, Any], Tensor]


def pipelined(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Any,
    plan: Named,
    device: torch.device,
    seed: int,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    precision: torch.dtype | None = None,
    pins: Sequence[str] = (),
    held: Callable[[Captured, Named], Mapping[str, Placements]] | None = None,
    found: Callable[[Captured], Found] | None = None,
    part: Callable[[Captured], tuple[Captured, tuple[str, ...]]] | None = None,
    guard: bool = False,
    check: bool = True,
) -> PipelinedStep:
    """The step of a plan in micro-batches; `accumulate` says how many where the plan does not, `held` how inputs are held, `found` how
    stages are made, `part` how rules rewrite the step."""
    if accumulate > 1 and plan.micro not in (0, accumulate):
        raise PlanError(
            f"{plan} and accumulate={accumulate} differ", needed="one number of micro-batches", found=f"{plan.micro} and {accumulate}"
        )
    plan = replace(plan, micro=accumulate if accumulate > 1 else plan.micro)
    moment = Moment.now()
    captured = captured_part(model, example, plan.micro_batches, loss, optimizer, clip=clip, precision=precision)
    if not captured.gradients:
        raise PlanError(
            f"{plan} needs gradients that follow from the forward pass",
            needed="a model without autograd functions of its own",
            found="one that was traced together with its backward pass",
            try_="a plan without pp and micro",
        )
    judged = None
    if check:
        case = Case(model, loss, optimizer, How(clip, 1, precision), device, moment)
        small = micro_batch(example, 0, plan.micro_batches)
        judged = seen_by_first(lambda: judge(captured, case, small, lambda x: capture(model, x, loss, optimizer, clip=clip, precision=precision)))
    source, moves = part(captured) if part is not None else (captured, ())
    shapes = {n: tuple(x.shape) for n, x in captured.parameters.items()}
    pinned = resolve(map(parse_pin, pins), shapes, plan.mesh.sizes)
    exact = {} if held is None else {n: p for n, p in held(source, plan).items() if n not in pinned}
    step = PipelinedStep(source, plan, model, loss, optimizer, device, seed, pinned, exact, guard, found and found(source))
    step.captured, step.moves, step.judged = captured, moves, judged
    step.samples = samples_of(example)
    step.dims = {n: x.shape.index(step.samples) for n, x in named_batch(example).items() if x.ndim}
    if check:
        step.report = _verified(step.line)
    return step


def captured_part(model: nn.Module, example: Any, parts: int, *how: Any, **settings: Any) -> Captured:
    """The step of one micro-batch; a model that cannot take one is refused in words."""
    part = micro_batch(example, 0, parts)
    try:
        return capture(model, part, *how, **settings)
    except IndexError as e:
        cut = ", ".join(f"{n.removeprefix('batch.')} {list(x.shape)}" for n, x in named_batch(part).items())
        raise PlanError(
            "the model cannot take a micro-batch", needed="every tensor of the batch to be cut along its samples",
            found=f"{e} with {cut}", try_="a batch whose number of samples no other dim has, or a plan without pp and micro",
        ) from e  # fmt: skip


def _verified(line: Line) -> Report | None:
    """Every stage and the update against what one device would run; the report of the last."""
    reports = [verified(*stage.whole) for stage in line.stages]
    return [*reports, verified(line.single, line.update)][-1]


def micro_batch(batch: Any, k: int, parts: int) -> Any:
    """One of equal parts of a batch, each tensor cut along its samples; numbers go to every part."""
    samples = samples_of(batch)
    if samples % parts:
        fits = max(n for n in range(1, samples + 1) if samples % n == 0 and n <= parts)
        raise PlanError(
            f"a batch of {samples} is not {parts} equal micro-batches",
            needed=f"a multiple of {parts}",
            found=str(samples),
            try_=f"micro{fits}",
        )
    return tree_map_only(Tensor, lambda x: x.chunk(parts, x.shape.index(samples))[k] if x.ndim else x, batch)


def samples_of(batch: Any) -> int:
    """How many samples a batch has: the length of every tensor's first dim or, where these differ, the one length that all have."""
    shapes = [tuple(x.shape) for x in named_batch(batch).values() if x.ndim]
    firsts = {shape[0] for shape in shapes}
    alike = firsts if len(firsts) == 1 else set(shapes[0]).intersection(*shapes[1:])
    sure = len(alike) == 1 and (len(firsts) == 1 or all(shape.count(next(iter(alike))) == 1 for shape in shapes))
    if not sure:
        raise PlanError(
            "it cannot be told along which dims the batch has its samples", needed="one length that every tensor of it has, once",
            found=", ".join(str(list(shape)) for shape in shapes), try_="another number of samples, or a plan without pp and micro",
        )  # fmt: skip
    return next(iter(alike))


class PipelinedStep(Step):
    """Forward and backward in micro-batches by a schedule, then one update."""

    samples: int  # of a global batch
    dims: Mapping[str, int]  # along which each tensor of a batch has its samples

    def __init__(
        self,
        captured: Captured,
        plan: Named,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        seed: int,
        pinned: Mapping[str, Placements] | None = None,
        exact: Mapping[str, Placements] | None = None,
        guard: bool = False,
        found: Found | None = None,
    ) -> None:
        made = laid(captured, plan, pinned or {}, exact, guarded if guard else None, found)
        self.line, self.stages, self.held, self.options = made.line, made.stages, made.held, made.options
        self._made_of = captured, found
        super().__init__(captured, self.line.update, plan, model, loss, optimizer, device, seed)
        require_same(f"pipeline {plan}", self.line.text)
        self.messages = Messages(plan.mesh.groups("pp"), device) if plan.pp > 1 else None
        order = orders(plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
        self.runner = Runner(self.line.stages, order, self.compiled, self.messages)
        self._spread = self._spreader(self.line.stages)
        self._batch_types = _batch_types(self.line.stages)
        self._evaluate: _Evaluation | None = None

    def laid(self, plan: Named) -> Laid:
        """The same step under another plan of the same mesh: held, cut and run again alike, where it has as many stages."""
        captured, found = self._made_of
        return laid(captured, plan, {}, self.held, found=found)

    def _spreader(self, stages: tuple[Placed, ...]) -> Compiled | None:
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

    def __call__(self, batch: Any) -> Tensor:
        """One step on a global batch, or on this rank's part of one; gives the loss of the global batch."""
        before, skipped = {n: x for n, x in self._state.items() if n.startswith("buffer.")}, self.skipped
        run = self._step if self.recorder is None else self.recorder.call
        with exactly(self.deterministic):
            out = run(batch, self._state)
        for name, inp in self.program.state:
            if inp in self._state:
                self._state[inp] = out[name]
        self.steps += 1
        self.grad_norm = out.get("grad_norm")
        self.losses.see(out["loss"], self.grad_norm, self.steps, named_batch(batch))
        self._state |= before if self.skipped > skipped else {}
        return out["loss"]

    def _step(self, batch: Any, state: Values) -> Values:
        """All micro-batches and the update; `state` is overwritten as far as the update may."""
        parts = self._micro_batches(batch)
        readable = {**self._readable(self._spread), **state}
        with doing(f"the stages of {self.captured.program.name}"):
            sums = self.runner.run(readable, lambda k: {**parts[k], **self._seed(k)})
        state |= {n: readable[n] for n in state if n.startswith("buffer.")}
        return self.compiled({**state, **sums, **self._numbers()})

    def _seed(self, k: int) -> Values:
        """Another seed for every micro-batch of every step."""
        return {"seed": torch.tensor((self.seed + self.steps) * self.plan.micro_batches + k, device=self.compiled.device)}

    def _micro_batches(self, batch: Any) -> list[Values]:
        """The inputs of every micro-batch on this rank: parts of a global batch, or of this rank's part of one."""
        given, k = named_batch(batch), self.plan.micro_batches
        parts: list[Values] = [{} for _ in range(k)]
        for name, type_ in self._batch_types.items():
            if name not in given:
                raise RuntimeFault(
                    f"the batch has no {name.removeprefix('batch.')!r}", needed=", ".join(self._batch_types), found=", ".join(given)
                )
            for part, x in zip(parts, self._parts(name, given[name], type_, k), strict=True):
                part[name] = x.to(self.compiled.device)
        return parts

    def _parts(self, name: str, x: Tensor, type_: Type, k: int) -> list[Tensor]:
        if not type_.shape:
            return [x] * k
        local = type_.layout.local_shape(self.compiled.coords)
        d = self.dims[name]
        whole, mine = ((*shape[:d], k * shape[d], *shape[d + 1 :]) for shape in (type_.shape, local))
        if tuple(x.shape) == whole:
            return [interp.take_local(part, type_.layout, self.compiled.coords) for part in x.chunk(k, d)]
        if tuple(x.shape) == mine:
            return list(x.chunk(k, d))
        raise RuntimeFault(
            f"batch {name.removeprefix('batch.')!r}", needed=f"{list(whole)}, or this rank's {list(mine)}", found=str(list(x.shape))
        )

    def rows(self, samples: int, *, shuffle: bool = True, seed: int = 0) -> Rows:
        """All rows of every batch of a data set: a pipeline takes batches whole."""
        return Rows(samples, self.samples, torch.arange(self.samples), shuffle=shuffle, seed=seed, start=self.steps)

    def record(self, folder: str | None, *, cluster: str = "", progress: bool = True) -> LineRecorder:
        """Watch the steps from here on: print how training goes, and write a run for `weft report` into the folder."""
        from weft.api.record_line import LineRecorder

        self.recorder = LineRecorder(self, folder, cluster, progress)
        return self.recorder

    def eval(self, batch: Any) -> Tensor:
        """The loss alone, in evaluation mode; nothing changes."""
        if self._evaluate is None:
            self._evaluate = _Evaluation(self, batch)
        return self._evaluate(batch)

    # -- trust -----------------------------------------------------------------------------------------------------------------

    def check(self, batch: Any, tolerance: float = 1e-4) -> float:
        """The largest relative difference between this step and the same micro-batches on one device; nothing changes."""
        want = self._on_one_device(batch)
        got = self._step(batch, {n: x.clone() for n, x in self._state.items()})
        found = {name: gathered(node.layout, got.get(name), self.compiled) for name, node in self.program.outputs}
        return self._close(found, want, tolerance, lambda: self._on_one_device(batch, moved))

    def _on_one_device(self, batch: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Values:
        """The captured step, micro-batch by micro-batch, and the update, by the interpreter, from changed inputs."""
        p, k = self.captured.program, self.plan.micro_batches
        grads = {f"d.{n}": g for n, g in self.captured.gradients.items()}
        kept = {n: x for n, x in p.outputs if n == "loss" or n.startswith("buffer.")}
        one = program_of("one", {**kept, **grads}, p, {})
        values = {n: change(self.full(n)) for n in self.state_names} | self._numbers()
        sums: Values = {}
        for j in range(k):
            part = {n: change(x) for n, x in named_batch(micro_batch(batch, j, k)).items()}
            inputs = {**values, **part, **self._seed(j)}
            out = interp.run_global(one, {n: inputs[n].to(self.compiled.device) for n in one.input_names})
            values |= {n: x for n, x in out.items() if n.startswith("buffer.")}
            sums = {n: sums[n] + x if j else x for n, x in out.items() if not n.startswith("buffer.")}
        terms = {f"{n}.0": x / k for n, x in sums.items() if n != "loss"} | {LOSS_SUM: sums["loss"]}
        last = update(self.captured, {n: [f"d.{n}.0"] for n in self.captured.gradients}, k, lambda _: None)
        return interp.run_global(last, {n: {**values, **terms}[n] for n in last.input_names})


def _batch_types(stages: tuple[Placed, ...]) -> dict[str, Type]:
    """How micro-batches are held, whichever stages read them."""
    found: dict[str, Type] = {}
    for s in stages:
        for p in s.turns:
            found |= {n: Type(x.dtype, _without_pp(x.type)) for n, x in p.input_names.items() if n.startswith("batch.")}
    return found


def _without_pp(type_: Type) -> Any:
    return type_.layout.release("pp") if "pp" in type_.mesh.axes else type_.layout


class _Evaluation:
    """The forward pass alone through the same stages, of a whole batch at once."""

    def __init__(self, step: PipelinedStep, batch: Any) -> None:
        self.step, training = step, step.model.training
        step.model.eval()
        try:
            self.captured = capture(step.model, batch, step.loss)
        finally:
            step.model.train(training)
        plan, program = step.plan, self.captured.program
        held, options = input_layouts(program, plan, {})
        held |= {n: places for n, places in step.held.items() if n in program.input_names and not n.startswith("batch.")}
        laid: dict[str, Any] = {}
        stages = split_like(self.captured, step.stages)
        self.stages = tuple(place_stage(s, plan, held, options, laid) for s in stages)
        order = tuple(tuple(Action("forward", c, 0) for c in range(plan.chunks)) for _ in range(plan.pp))
        self.runner = Runner(self.stages, order, step.compiled, step.messages)
        self.spread = step._spreader(self.stages)
        self.types = _batch_types(self.stages)
        self.last = Compiled(_settled(self.stages), step.compiled.device_mesh, step.compiled.device)

    def __call__(self, batch: Any) -> Tensor:
        coords, device = self.step.compiled.coords, self.step.compiled.device
        given = named_batch(batch)
        inputs = {n: interp.take_local(given[n], t.layout, coords).to(device) for n, t in self.types.items()}
        state = self.step._readable(self.spread)
        state |= {n: x.to(device) for n, x in self.captured.constants.items()}
        sums = self.runner.run(state, lambda _: inputs)
        return self.last(sums)["loss"]


def _settled(stages: tuple[Placed, ...]) -> Program:
    """The loss of the last stage, whole on every rank."""
    loss = stages[-1].turns[0].output_names["loss"]
    given = input_node(LOSS_SUM, loss.type)
    return new_program("loss", loss.mesh, [given], {"loss": reshard(given, Layout.of(loss.mesh, ()))})
