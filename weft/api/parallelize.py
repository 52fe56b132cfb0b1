"""`weft.parallelize(model, loss, optimizer, example, plan)`: a plain torch training step, run on all ranks under a plan.

The model is captured as one program, placed on the mesh, lowered to this rank's code, and given this rank's part of the state.
The user's optimizer keeps its role as the holder of learning rates, so schedulers work as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft import passes
from weft.api import auto, planfile
from weft.api.check_step import Case, Verdict, check_against_torch
from weft.api.eager import How, Moment
from weft.api.memory_limit import require_memory
from weft.api.options import ANY_PLAN, Options, Settings, device_for, require_ranks, spec_of
from weft.api.pipeline_plans import PipelinePlans
from weft.api.rank_sync import broadcast_initial_state
from weft.api.retracing import Variants
from weft.api.safety import seen_by_first, verified
from weft.api.step import Step
from weft.api.weights import begin_with
from weft.core.errors import PlanError
from weft.core.garbage import seldom_collected
from weft.core.program import Program
from weft.frontend.capture import Captured, capture
from weft.frontend.capture.micro import batch_dims_of, most_parts
from weft.frontend.capture.model import require_optimizer, require_torchs, uncompiled
from weft.frontend.capture.optimizers import forget_updates
from weft.frontend.capture.restored import as_before
from weft.passes import Draft
from weft.plan.pins import dtensor_pins, parse_pin
from weft.plan.plan import Plan
from weft.plan.space import bytes_of
from weft.plan.spec import Spec
from weft.runtime import hosts
from weft.runtime.traced import warm_up
from weft.transform.any_plan import require_any_plan
from weft.transform.recompute import recomputed, regions_of

Loss = Callable[[nn.Module, Any], Tensor]


def parallelize(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Any,
    plan: str | Path | Spec | Plan | DeviceMesh = "dp1",
    *,
    device: str | torch.device | None = None,
    options: Options | None = None,
    **settings: Unpack[Settings],
) -> Step:
    """Make a training step of `model` that runs on all processes under a plan: `step(batch)` does forward, backward and update.

    Before this returns, the step is compared with plain PyTorch on `example`, and the plan's program with it (`check=False` leaves it out).
    In micro-batches (`pp`, `micro`, `accumulate`) the step has the loss and gradients of the full batch, or is refused.

    Args:
        model: Any module, unwrapped. One on the meta device gets its values from `weights=`, or from its own initialisation under `seed=`.
        loss: A function `loss(model, batch)` that returns a scalar.
        optimizer: A `torch.optim.Optimizer` over `model.parameters()`.
        example: One global batch: a tensor, or tensors in dicts, lists or dataclasses, samples first.
        plan: A string of degrees that multiply to the number of processes ("dp2,tp2,zero1"), a `Spec`, a `Plan` or the file of one, a
            `DeviceMesh` with dims named pp, dp (or fsdp, which is ZeRO-3), cp, ep, tp, or "auto": the fastest plan predicted for this machine.
        device: Where to run. Default: where the parameters are, or this rank's accelerator under NCCL.
        options: Everything else, as an `Options`.
        settings: Fields of `Options` by name: `clip=1.0, precision=torch.bfloat16, record="run/"`.

    Returns:
        The step. `step(batch)` returns the loss of the global batch, on every rank. `step.checkpoints(folder)`, `step.eval(batch)`,
        `step.sync_model()` and `step.save_pretrained(folder)` are collective: every rank calls them.

    Raises:
        PlanError: The plan is for another number of processes, cannot be followed exactly, or does not fit.
        CaptureError: The model, loss or optimizer cannot be reproduced exactly; the message names the op and your line.

    Example:
        step = weft.parallelize(model, loss, optimizer, batch, plan="dp2,zero3")
        for batch in loader:
            value = step(batch)
    """
    require_torchs(model, optimizer)
    require_optimizer(model, optimizer)
    model = uncompiled(model)
    asked = Options.of(options, settings)
    where = device_for(model, device)
    hosts.meet(where)
    if isinstance(plan, DeviceMesh):
        plan = spec_of(plan)
    file = None if plan == "auto" else planfile.follow(plan)
    named = None if file is None else _for_these(file.spec, memory=asked.memory, others=asked.others)
    pins = asked.pins
    if file is not None and named is not None:
        pins = (*named.pins, *pins)
        if (named.recompute or file.contents) and not asked.noise:
            named = _by_parts(named, asked.accumulate)
    forget_updates(optimizer)
    begin_with(model, asked.weights, asked.seed)
    asked = replace(asked, pins=tuple(pins))
    same = {name: getattr(asked, name) for name in ("clip", "precision", "accumulate", "seed", "pins", "on_nan")}
    run = broadcast_initial_state(model, optimizer, example, where, plan=str(named or plan), **same)
    made = _StepRequest(model, loss, optimizer, example, where, asked, named, file, Variants(model, loss, optimizer, example, run))
    with seldom_collected():
        step = made.step()
    step.set_safety(asked.on_nan, asked.deterministic)
    if asked.record is not None or asked.progress:
        step.record(asked.record, progress=asked.progress is not False)
    return step


@dataclass
class _StepRequest:
    """What one call of `parallelize` asks for, and the steps that are made of it: the first, and more when Python has changed."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    example: Any
    device: torch.device
    asked: Options
    named: Spec | None  # none until one is chosen
    file: planfile.Followed | None
    variants: Variants

    @cached_property
    def constraints(self) -> auto.PlanRequest:
        return auto.PlanRequest(tuple(map(parse_pin, self.asked.pins)), self.asked.noise, bytes_of(self.asked.memory) if self.asked.memory else 0.0)

    @property
    def any_plan(self) -> bool:
        """Whether no plan may change bits."""
        return self.asked.deterministic == ANY_PLAN

    def step(self) -> Step:
        warm_up(self.device)
        if self.any_plan and self.named is not None:
            require_any_plan(self.named)
        if self.named is not None and self.named.virtual_stages * self.named.micro_batches > 1:
            return self._line()
        moment = Moment.now()
        captured = self.variants.observed(lambda reads: self._captured(self.example, self.asked.accumulate, reads=reads, given=self.variants.given))
        verdict = self._checked(captured, self.example, moment)
        draft, self.file = self._begun(captured), self.file and self.file.guarded() if self.asked.guard else self.file
        decision = None
        if self.named is None:
            others = {n: dtensor_pins(self.model, x) for n, x in (self.asked.others or {}).items()}
            decision = auto.agree(draft.step, self.device, self.constraints, others, self._lines())
            self.named = decision.named
            if self.any_plan:
                require_any_plan(self.named)
        if self.named.virtual_stages * self.named.micro_batches > 1:
            step = self._line()
        else:
            step = self._one(draft, decision, self.example)
            step.verified = verdict
            self.variants.adopt(step, self.retrace)
        step.decision = decision
        return step

    # -- in one program ------------------------------------------------------------------------------------------------------------

    def retrace(self, batch: Any, known: Callable[[Captured], bool], **settings: Any) -> Step | None:
        """The step of what Python says now; none where its program is known. A batch of another size may be fewer micro-batches."""
        moment = Moment.now()
        parts = self.asked.accumulate
        fewer = parts > 1 and not self.asked.allow_micro_mean
        captured = self._captured(batch, most_parts(batch_dims_of(batch)[0], parts) if fewer else parts, **settings)
        draft = self._begun(captured)
        if known(draft.step):
            return None
        step = self._one(draft, None, batch)
        step.unjudged = lambda example: self._checked(captured, example, moment)
        return step

    def _captured(self, batch: Any, parts: int, **settings: Any) -> Captured:
        options_of_parts = {"accumulate": parts, "allow_micro_mean": self.asked.allow_micro_mean}
        return capture(self.model, batch, self.loss, self.optimizer, **options_of_parts, **self.asked.how, **settings)

    def _checked(self, captured: Captured, example: Any, moment: Moment) -> Verdict | None:
        if not self.asked.check:
            return None
        case = Case(self.model, self.loss, self.optimizer, self._how, self.device, moment)
        with as_before(captured.reads):
            return seen_by_first(lambda: check_against_torch(captured, case, example))  # type: ignore[no-any-return]

    @property
    def _how(self) -> How:
        return How(parts=self.asked.accumulate if self.asked.allow_micro_mean else 1, **self.asked.how)

    def _begun(self, captured: Captured) -> Draft:
        """The step as far as it is the same under every plan."""
        asked = Draft(captured, self.named or Spec(), pins=self.constraints.pins, noise=self.asked.noise, guard=self.asked.guard, device=self.device)
        return passes.run(asked, until="guard")

    def _one(self, draft: Draft, decision: auto.Decision | None, batch: Any) -> Step:
        """A step of one program: what whoever chose the plan makes of the captured one, placed, and proved to be it."""
        named, traced = cast(Spec, self.named), draft.step.program
        draft = replace(draft, spec=named, plan=self.file, decided=None if self.any_plan else decision, any_plan=self.any_plan)
        draft = passes.run(draft, after="guard", until="recompute")
        captured, placed = draft.step, passes.run(draft, after="recompute", until="noise")
        draft = passes.run(placed, after="noise")
        source, program = cast(Captured, draft.source).program, cast(Program, draft.program)
        if self.any_plan and (draft.moves or (self.file is not None and self.file.program is not None)):
            raise PlanError(
                f'deterministic="{ANY_PLAN}" with a plan that rewrites the step', needed="a plan string",
                found=f"{len(draft.moves)} rewrites", try_=f'plan="{named}"',
            )  # fmt: skip
        require_memory(program, named, self.example, self.device, lambda other: self._priced(traced, captured, other))
        report = verified(source, program, lambda: captured.inputs(batch)) if self.asked.check else None
        program = cast(Program, passes.run(replace(placed, low=self.asked.low), after="noise").program) if self.asked.low else program
        step = Step(captured, program, named, self.model, self.loss, self.optimizer, self.device, self.asked.seed)
        step.report, step.source, step.moves, step.traced = report, source, draft.moves, traced
        step.how, step.checked = self._how, self.asked.check
        return step

    def _priced(self, traced: Program, captured: Captured, other: Spec) -> Program:
        """The step under another plan, as far as memory goes."""
        again = recomputed(replace(captured, program=traced), regions_of(captured, other.again))
        return auto.prepare(again, other, self.constraints, self.device)

    # -- in micro-batches ------------------------------------------------------------------------------------------------------------

    def _line(self) -> Step:
        return self.variants.adopt(
            self.variants.observed(lambda reads: self.in_parts(self.example, reads=reads, given=self.variants.given)), self.in_parts
        )

    def in_parts(self, batch: Any, known: Callable[[Captured], bool] | None = None, **settings: Any) -> Step | None:
        """The step of a plan in micro-batches; none where its program is known."""
        from weft.api.pipelined import pipelined

        named = cast(Spec, self.named)
        if self.asked.noise:
            raise PlanError(
                f"{named} runs micro-batches, which leave the noise scale unmeasured",
                needed="noise=False", found="noise=True", try_="a plan without pp and micro",
            )  # fmt: skip
        return pipelined(
            self.model, self.loss, self.optimizer, batch, named, self.device, self.asked, followed=self.file, known=known, **settings
        )  # fmt: skip

    def _lines(self) -> PipelinePlans | None:
        """Plans in micro-batches; none where it cannot be told what a micro-batch is."""
        from weft.api.pipelined import micro_steps

        try:
            samples, _ = batch_dims_of(self.example)
        except PlanError:
            return None
        steps = micro_steps(self.model, self.example, self.loss, self.optimizer, **self.asked.how, mean=self.asked.allow_micro_mean)
        return PipelinePlans(steps, samples, self.asked.accumulate if self.asked.accumulate > 1 else 0)


def _by_parts(named: Spec, accumulate: int) -> Spec:
    """A plan that runs something again, its micro-batches one after another: in one program of them all, the block that repeats is the model."""
    return named if named.micro or accumulate == 1 else replace(named, micro=accumulate)


def _for_these(named: Spec, **choices: Any) -> Spec:
    """A plan for as many processes as there are; what only a choice between plans can follow is refused."""
    require_ranks(named, "weft.parallelize")
    for name, value in choices.items():
        if value:
            raise PlanError(f"{name}= is for a choice between plans", needed='plan="auto"', found=str(named), try_=f"leave out {name}=")
    return named
