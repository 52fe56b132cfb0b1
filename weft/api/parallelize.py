"""`weft.parallelize(model, loss, optimizer, example, plan)`: a plain torch training step, run on all ranks under a plan.

The model is captured as one program, placed on the mesh, lowered to this rank's code, and given this rank's part of the state.
The user's optimizer keeps its role as the holder of learning rates, so schedulers work as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft import passes
from weft.api import auto, planfile, pool
from weft.api.check_step import Case, Verdict, check_against_torch
from weft.api.eager import How, Moment
from weft.api.memory_limit import require_memory
from weft.api.micro_steps import micro_steps, of_plan_or_fewer
from weft.api.options import ANY_PLAN, AnyPlan, Options, Settings, device_for, require_ranks, spec_of
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
from weft.frontend.capture.micro import Micro, batch_dims_of, micro_batch, most_parts
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
    asked = Options.of(options, settings)
    made = _StepRequest.of(model, loss, optimizer, example, plan, device, asked)
    with seldom_collected():
        step = made.step()
    step.set_safety(asked.on_nan, asked.deterministic)
    if asked.record is not None or asked.progress:
        step.record(asked.record, progress=asked.progress is not False)
    return step


@dataclass(frozen=True)
class _Begun:
    """A step as it was captured, as far as it is made the same way under every plan, and what compares it with torch."""

    captured: Captured
    draft: Draft
    compare: Callable[[Any], Verdict | None]


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

    @staticmethod
    def of(
        model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, example: Any, plan: AnyPlan, device: str | torch.device | None, asked: Options
    ) -> _StepRequest:
        """What is asked for, in words that were checked; all ranks begin with the values of the first."""
        model, where = uncompiled(model), device_for(model, device)
        hosts.meet(where)
        plan = spec_of(plan) if isinstance(plan, DeviceMesh) else plan
        file = None if plan == "auto" else planfile.follow(plan)
        named = None if file is None else _for_these(file.spec, memory=asked.memory, others=asked.others)
        asked = replace(asked, pins=(*(named.pins if named is not None else ()), *asked.pins))
        if file is not None and named is not None and (named.recompute or file.contents) and not asked.noise:
            named = _by_parts(named, asked.accumulate)
        forget_updates(optimizer)
        begin_with(model, asked.weights, asked.seed)
        same = {name: getattr(asked, name) for name in ("clip", "precision", "accumulate", "seed", "pins", "on_nan")}
        run = broadcast_initial_state(model, optimizer, example, where, plan=str(named or plan), **same)
        return _StepRequest(model, loss, optimizer, example, where, asked, named, file, Variants(model, loss, optimizer, example, run))

    @cached_property
    def constraints(self) -> pool.PlanRequest:
        return pool.PlanRequest(tuple(map(parse_pin, self.asked.pins)), self.asked.noise, bytes_of(self.asked.memory) if self.asked.memory else 0.0)

    @property
    def any_plan(self) -> bool:
        """Whether no plan may change bits."""
        return self.asked.deterministic == ANY_PLAN

    @property
    def several(self) -> bool:
        """Whether the plan has stages or micro-batches."""
        return self.named is not None and self.named.virtual_stages * self.named.micro_batches > 1

    def step(self) -> Step:
        """The first step, under the plan that was named or is chosen."""
        warm_up(self.device)
        self._require_any_plan()
        if self.file is not None and self.asked.guard and not self.several:
            self.file = self.file.guarded()
        begun, verdict = self._first()
        decision = None
        if self.named is None:
            others = {n: dtensor_pins(self.model, x) for n, x in (self.asked.others or {}).items()}
            decision = auto.agree(begun.draft.step, self.device, self.constraints, others, self._lines())
            self.named = decision.named
            self._require_any_plan()
            if self.several:
                begun, verdict = self._first()
        chosen = decision.followed if decision is not None and not self.any_plan else self.file
        step = self._finished(begun, chosen, self.example)
        step.verified, step.decision = verdict, decision
        return self.variants.adopt(step, self.again)

    def _first(self) -> tuple[_Begun, Verdict | None]:
        begun = self.variants.observed(lambda reads: self._begun(self.example, first=True, reads=reads, given=self.variants.given))
        return begun, begun.compare(self.example)

    def again(self, batch: Any, known: Callable[[Captured], bool], **settings: Any) -> Step | None:
        """The step of what Python says now; none where its program is known. A batch of another size may be fewer micro-batches."""
        begun = self._begun(batch, first=False, **settings)
        if known(begun.draft.step):
            return None
        step = self._finished(begun, self.file, batch)
        step.unjudged = begun.compare if self.asked.check else None
        return step

    def _begun(self, batch: Any, first: bool, **settings: Any) -> _Begun:
        moment, spec = Moment.now(), self.named or Spec()
        draft = Draft(None, spec, pins=self.constraints.pins, noise=self.asked.noise, guard=self.asked.guard, device=self.device)
        if self.several:
            spec = self._in_parts(spec)
            steps = micro_steps(self.model, batch, self.loss, self.optimizer, mean=self.asked.allow_micro_mean, **self.asked.how, **settings)
            exact = first and spec.micro
            draft = replace(draft, spec=spec, derive=partial(steps, spec.micro_batches) if exact else partial(of_plan_or_fewer, spec, steps, batch))
        else:
            parts = self.asked.accumulate
            if not first and parts > 1 and not self.asked.allow_micro_mean:
                parts = most_parts(batch_dims_of(batch)[0], parts)
            of_parts = {"accumulate": parts, "allow_micro_mean": self.asked.allow_micro_mean}
            draft = replace(draft, captured=capture(self.model, batch, self.loss, self.optimizer, **of_parts, **self.asked.how, **settings))
        draft = passes.run(draft, until="micro-batch")
        compare = partial(self._checked, draft.step, draft.micro, moment)
        return _Begun(draft.step, passes.run(draft, after="micro-batch", until="guard"), compare)

    def _in_parts(self, spec: Spec) -> Spec:
        """The plan with as many micro-batches as were asked for."""
        accumulate = self.asked.accumulate
        if self.asked.noise:
            raise PlanError(
                f"{spec} runs micro-batches, which leave the noise scale unmeasured",
                needed="noise=False", found="noise=True", try_="a plan without pp and micro",
            )  # fmt: skip
        if accumulate > 1 and spec.micro not in (0, accumulate):
            raise PlanError(f"{spec} and accumulate={accumulate} differ", needed="one number of micro-batches", found=f"{spec.micro} and {accumulate}")
        return replace(spec, micro=accumulate if accumulate > 1 else spec.micro)

    def _checked(self, captured: Captured, micro: Micro | None, moment: Moment, example: Any) -> Verdict | None:
        """The full batch's step against torch or, where micro-batches go by themselves, that of the first."""
        if not self.asked.check:
            return None
        case, of_parts = Case(self.model, self.loss, self.optimizer, self._how, self.device, moment), micro
        if of_parts is not None and of_parts.full is not None:
            captured = of_parts.full
        elif of_parts is not None:
            case, example = replace(case, loss=lambda m, b: self.loss(m, b) / of_parts.parts), micro_batch(example, 0, of_parts.parts)
        with as_before(captured.reads):
            return seen_by_first(lambda: check_against_torch(captured, case, example))  # type: ignore[no-any-return]

    @property
    def _how(self) -> How:
        return How(parts=self.asked.accumulate if self.asked.allow_micro_mean and not self.several else 1, **self.asked.how)

    def _finished(self, begun: _Begun, followed: planfile.Followed | None, batch: Any) -> Step:
        """The captured step as its plan wants it, placed, and proved to be it."""
        spec, traced = begun.draft.spec if self.several else cast(Spec, self.named), begun.draft.step.program
        draft = replace(begun.draft, spec=spec, plan=followed, any_plan=self.any_plan)
        draft = passes.run(draft, after="guard", until="recompute")
        captured, placed = draft.step, passes.run(draft, after="recompute", until="noise")
        draft, report = passes.run(placed, after="noise"), None
        if self.any_plan and (draft.moves or (followed is not None and followed.program is not None)):
            raise PlanError(
                f'deterministic="{ANY_PLAN}" with a plan that rewrites the step', needed="a plan string",
                found=f"{len(draft.moves)} rewrites", try_=f'plan="{spec}"',
            )  # fmt: skip
        if draft.program is not None:
            require_memory(draft.program, spec, self.example, self.device, lambda other: self._priced(traced, captured, other))
            if self.asked.check:
                report = verified(cast(Captured, draft.source).program, draft.program, lambda: captured.inputs(batch))
        draft = passes.run(replace(placed, low=self.asked.low), after="noise") if self.asked.low else draft
        step = Step(captured, draft, self.model, self.loss, self.optimizer, self.asked.seed)
        if self.asked.check and step.micro_batches is not None:
            report = step.micro_batches.verify()
        step.report, step.traced = report, traced
        step.how, step.checked = self._how, self.asked.check
        return step

    def _require_any_plan(self) -> None:
        if self.any_plan and self.named is not None:
            require_any_plan(self.named)

    def _priced(self, traced: Program, captured: Captured, other: Spec) -> Program:
        """The step under another plan, as far as memory goes."""
        again = recomputed(replace(captured, program=traced), regions_of(captured, other.again))
        return pool.prepare(again, other, self.constraints, self.device)

    def _lines(self) -> PipelinePlans | None:
        """Plans in micro-batches; none where it cannot be told what a micro-batch is."""
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
