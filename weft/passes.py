"""THE list: every pass from a captured training step to the programs that ranks run, in order, each with its name and reason.

`parallelize` runs this list and nothing else; `weft show MODEL --plan WORDS --passes` prints it with the nodes before and after each.
A step of one program and a step in stages or micro-batches go through the same list; each pass says what it does to either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from weft.core import native
from weft.core.errors import PlanError
from weft.core.layout import S
from weft.core.program import Program
from weft.core.role import Role
from weft.frontend.capture import Captured
from weft.frontend.capture.micro import Micro
from weft.plan.named import input_layouts
from weft.plan.pins import Pin, resolve
from weft.plan.place import Placements, PlacingOptions, place
from weft.plan.sent_alone import imbalanced, sent_alone
from weft.plan.spec import Spec
from weft.plan.split import Stage, chosen_ends, numbered, split
from weft.rewrite.updates import by_definition, by_rows
from weft.runtime import hosts
from weft.runtime.comm import message_bytes
from weft.runtime.replay import is_accelerator
from weft.transform.any_plan import any_plan
from weft.transform.async_tp import async_tp
from weft.transform.balanced_samples import balance_samples
from weft.transform.chunks import in_chunks
from weft.transform.gathers import gather_for_backward
from weft.transform.low import heads, low_precision
from weft.transform.noise import measured
from weft.transform.pipeline import PlacedPipeline, place_pipeline
from weft.transform.recompute import recomputed, recomputed_stage, regions_of
from weft.transform.ring import ring
from weft.transform.skip_nan import guarded
from weft.transform.stage_contents import FoundStages
from weft.transform.updates import BUCKET, bucketed, fused_update

HOST = torch.device("cpu")


class Follows(Protocol):
    """What a plan says beyond its spec; `program` where it says how every tensor is laid out, which is `as_run` where it was chosen as it runs."""

    @property
    def program(self) -> Program | None: ...
    @property
    def as_run(self) -> bool: ...
    def step(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]: ...
    def part(self, captured: Captured) -> tuple[Captured, tuple[str, ...]]: ...
    def found(self, captured: Captured) -> FoundStages: ...
    def again(self, captured: Captured) -> Captured: ...
    def input_layouts(self, captured: Captured, spec: Spec) -> Mapping[str, Placements]: ...
    def placed(self, captured: Captured, pins: Sequence[Pin]) -> Program | None: ...


@dataclass(frozen=True)
class Stages:
    """A step split into stages: as they were split, as they run with what they recompute, and how inputs are laid out."""

    plain: tuple[Stage, ...]
    run: tuple[Stage, ...]
    placements: Mapping[str, Placements]
    options: PlacingOptions


@dataclass(frozen=True)
class Draft:
    """A training step on its way: what is asked of it, and what has been made of it so far."""

    captured: Captured | None  # none before a micro-batch that is captured by itself
    spec: Spec
    plan: Follows | None = None
    pins: tuple[Pin, ...] = ()
    samples: Mapping[str, int] = field(default_factory=dict)  # the dim of a batch's tensor that counts samples, where it is not the first
    noise: bool = False
    guard: bool = False
    imbalance: float = 1.0  # of experts, for prices: picks of the busiest rank over those of an average one
    low: str = ""  # kind of 8-bit matmuls, of transform.low.LOW
    any_plan: bool = False  # sums in one order under all plans
    device: torch.device = HOST
    derive: Callable[[], Micro] | None = None  # gives the step of one micro-batch, where the plan has stages or several of them
    micro: Micro | None = None
    source: Captured | None = None  # the step that is placed, which the placed program is checked against
    moves: tuple[str, ...] = ()  # of rules, in words
    stages: Stages | None = None
    pipeline: PlacedPipeline | None = None
    program: Program | None = None
    trail: tuple[tuple[str, int, int], ...] = field(default=(), repr=False)  # passes, and nodes before and after each

    @property
    def as_run(self) -> bool:
        return self.plan is not None and self.plan.as_run

    @property
    def step(self) -> Captured:
        assert self.captured is not None
        return self.captured

    @property
    def nodes(self) -> int:
        if self.pipeline is not None:
            return sum(len(p.nodes) for s in self.pipeline.stages for p in s.phases) + len(self.pipeline.update.nodes)
        if self.stages is not None:
            return sum(len(s.step.nodes) for s in self.stages.run)
        program = self.program or (self.captured.program if self.captured is not None else None)
        return len(program.nodes) if program is not None else 0


@dataclass(frozen=True)
class Pass:
    name: str
    why: str
    run: Callable[[Draft], Draft]


# -- what each does ------------------------------------------------------------------------------------------------------------


def _micro_batch(d: Draft) -> Draft:
    if d.derive is None:
        return d
    micro = d.derive()
    return replace(d, micro=micro, captured=micro.captured, spec=replace(d.spec, micro=micro.parts))


def _guard(d: Draft) -> Draft:
    return replace(d, captured=guarded(d.step)) if d.guard and d.micro is None else d  # of stages the update is, once it is made


def _recompute(d: Draft) -> Draft:
    if d.micro is not None:
        return d  # every stage its own, once they are split
    again = d.plan.again(d.step) if d.plan is not None else recomputed(d.step, regions_of(d.step, d.spec.again))
    return replace(d, captured=again)


def _rules(d: Draft) -> Draft:
    if d.plan is None:
        return replace(d, source=d.step)
    source, moves = d.plan.step(d.step) if d.micro is None else d.plan.part(d.step)
    return replace(d, captured=source, source=source, moves=moves)


def _stages(d: Draft) -> Draft:
    """State of pinned parameters follows them; inputs are laid out as the plan has them. Where the step is split and what is recomputed is as the plan
    says or, where it leaves that open, for balance and as its words say."""
    if d.micro is None:
        return d
    spec, captured, pinned = d.spec, d.step, _pinned(d)
    placements, options = input_layouts(captured.program, spec, captured.states, pinned)
    exact = {n: p for n, p in d.plan.input_layouts(captured, spec).items() if n not in pinned} if d.plan is not None else {}
    found = d.plan.found(captured) if d.plan is not None else FoundStages()
    known = found.splits is not None and len(found.splits) + 1 == spec.virtual_stages
    ends = found.splits if known else chosen_ends(captured, spec.virtual_stages)
    regions = regions_of(captured, spec.again) if found.recomputed is None else found.recomputed
    stages = numbered(split(captured, spec.virtual_stages, ends, regions), spec.pipeline.places(spec.pp, spec.chunks))
    run = tuple(recomputed_stage(s, spec.pipeline.defers_weights) for s in stages)
    return replace(d, stages=Stages(stages, run, {**placements, **exact}, options))


def _sparse(d: Draft) -> Draft:
    """Noise is estimated from sums of full gradients, and micro-batches add them up; a plan's program has its own updates."""
    kept = d.stages is not None or d.noise or d.any_plan or (d.plan is not None and d.plan.program is not None)
    source = d.source or d.step
    return replace(d, source=source) if kept else replace(d, source=source, captured=replace(d.step, program=by_rows(d.step.program)))


def _place(d: Draft) -> Draft:
    if d.stages is not None and d.micro is not None:
        made = d.stages
        return replace(d, pipeline=place_pipeline(d.step, made.run, d.spec, made.placements, made.options, guarded if d.guard else None, d.micro.first))
    followed = d.plan.placed(d.step, d.pins) if d.plan is not None else None
    if followed is not None:
        return replace(d, program=followed)
    dealt: dict[str, Placements] = {name: {"dp": S(dim)} for name, dim in d.samples.items()} if d.spec.dp > 1 else {}
    layouts, options = input_layouts((d.source or d.step).program, d.spec, d.step.states, {**_pinned(d), **dealt})
    options = replace(options, in_order=d.any_plan)
    return replace(d, program=by_definition(place(d.step.program, d.spec.mesh, layouts, options)))


def _pinned(d: Draft) -> dict[str, Placements]:
    shapes = {n: node.shape for n, node in d.step.program.inputs_for(Role.PARAMETER).items()}
    return resolve(d.pins, shapes, d.spec.mesh.sizes)


def _balance_samples(d: Draft) -> Draft:
    return d if d.as_run else _with_phases(d, balance_samples)


def _noise(d: Draft) -> Draft:
    return _with(d, measured) if d.noise else d


def _experts(d: Draft) -> Draft:
    return _with_phases(_reached(d), lambda p: imbalanced(p, d.imbalance)) if d.imbalance > 1 else _reached(d)


def _reached(d: Draft) -> Draft:
    """Tokens brought to experts in chunks, or each to the ranks of the experts it picked."""
    word = "async-ep" if d.spec.async_ep else "ragged-ep" if d.spec.ragged_ep else ""
    if not word:
        return d
    if d.spec.async_ep:
        made = _with_phases(d, lambda p: in_chunks(p, "ep"))
        done = [p.outputs for p in _programs(made)] != [p.outputs for p in _programs(d)]
    else:  # in stages they are marked before these are split into passes
        made = d if d.pipeline is not None else _with_phases(d, lambda p: sent_alone(p, "ep"))
        done = any(n.attr("sent") for p in _programs(made) for n in p.nodes)
    if not done:
        raise _idle(word, "experts whose tokens are gathered along ep, an even number on every rank")
    return made


def _idle(word: str, needed: str) -> PlanError:
    return PlanError(f"{word} has nothing to do", needed=needed, found="none in the step", try_=f"leave out {word}")


def _programs(d: Draft) -> list[Program]:
    """The placed program, or that of every turn of every stage."""
    if d.pipeline is not None:
        return [p for s in d.pipeline.stages for p in s.phases]
    return [d.program] if d.program is not None else []


def _low_precision(d: Draft) -> Draft:
    spared = heads(d.step.program) if d.low else ()
    return _with_phases(d, lambda p: low_precision(p, spared, d.low)) if d.low else d


def _with_phases(d: Draft, change: Callable[[Program], Program]) -> Draft:
    """The placed program changed, or that of every turn of every stage."""
    if d.pipeline is not None:
        stages = tuple(replace(s, phases=tuple(map(change, s.phases))) for s in d.pipeline.stages)
        return replace(d, pipeline=replace(d.pipeline, stages=stages))
    return replace(d, program=change(d.program)) if d.program is not None else d


def _any_plan(d: Draft) -> Draft:
    return _with_phases(d, any_plan) if d.any_plan else d


def _ring(d: Draft) -> Draft:
    return _with(d, lambda p: ring(p, "cp")) if d.spec.ring and d.spec.cp > 1 else d


def _async_tp(d: Draft) -> Draft:
    if not d.spec.async_tp:
        return d
    made = _with_phases(d, lambda p: async_tp(p, "tp")) if d.spec.tp > 1 else d
    if [p.groups for p in _programs(made)] == [p.groups for p in _programs(d)]:
        raise _idle("async-tp", "matmuls whose results are summed along tp, or whose operands are gathered there")
    return made


def _gather_for_backward(d: Draft) -> Draft:
    return _with(d, lambda p: gather_for_backward(p, d.spec.copies)) if d.spec.most_zero == 3 else d


def _fused_update(d: Draft) -> Draft:
    """Between hosts there is no such kernel: every sum is followed by its own update and gather while the next is under way. Nor is there under
    ZeRO-3, which is there to hold few gradients: each is summed and let go as it is made, where one kernel reads all at the end."""
    one = d.spec.most_zero in (1, 2) if is_accelerator(d.device) else native.available() and d.spec.most_zero < 3
    on_one_host = d.spec.dp > 1 and hosts.share(d.spec.mesh.sizes, "dp")
    return _with(d, lambda p: fused_update(p, "dp")) if one and on_one_host and not d.any_plan else d


def _buckets(d: Draft) -> Draft:
    on_one_host = d.spec.dp == 1 or hosts.share(d.spec.mesh.sizes, "dp")
    return _with(d, lambda p: bucketed(p, "dp", BUCKET if on_one_host else message_bytes(d.device))) if d.spec.dp > 1 and not d.any_plan else d


def _with(d: Draft, change: Callable[[Program], Program]) -> Draft:
    """The placed program changed; one that was chosen as it runs is not."""
    return replace(d, program=change(d.program)) if d.program is not None and not d.as_run else d


PASSES = (
    Pass("micro-batch", "the step of one micro-batch is derived from the full batch's, so that gradients add up to that one's", _micro_batch),
    Pass("guard", "a step whose loss is NaN or Inf leaves all state as it was, where that is asked for", _guard),
    Pass("recompute", "what the plan does not keep of the forward pass is recomputed before its backward pass, or is kept by the host", _recompute),
    Pass("rules", "the moves of proved rules that the plan names, or that a choice between plans found", _rules),
    Pass("stages", "the forward pass is split where few values pass; backward passes follow by the chain rule, each recomputing its own", _stages),
    Pass("sparse updates", "tables of which a step reads few rows are updated by these rows alone", _sparse),
    Pass("place", "every tensor gets a layout on the mesh, and collectives stand where layouts change", _place),
    Pass("balance samples", "samples of dynamic models are assigned to ranks by predicted time, so that none waits long for another", _balance_samples),
    Pass("re-gather", "parameters stored in slices are gathered for each pass, so that none stays gathered in between", _gather_for_backward),
    Pass("noise", "the gradient noise scale is measured in the sums there are, where it is asked for", _noise),
    Pass(
        "experts",
        "tokens go to experts in chunks, overlapped with the experts' work on others, or to the ranks they picked alone, where the plan says so",
        _experts,
    ),
    Pass("low precision", "matmuls in 8-bit floats, where that is asked for: the one pass that rounds, after all that is proved equal", _low_precision),
    Pass("any plan", "sums by one tree over global indices, where bits are asked for that no plan changes", _any_plan),
    Pass("async tp", "collectives of tensor parallelism go in chunks, overlapped with the matmuls they belong to, where the plan says so", _async_tp),
    Pass("ring", "keys of context parallelism are gathered in chunks, overlapped with the attention that reads them", _ring),
    Pass("fused update", "sums of gradients, the updates they lead to and the gathers after them are one kernel where peers share memory", _fused_update),
    Pass("buckets", "sums of small gradients are sent in a few messages, in the order the backward pass makes them", _buckets),
)
NAMES = [p.name for p in PASSES]


def run(draft: Draft, after: str = "", until: str = "") -> Draft:
    """The draft after all passes, or those after and up to the named ones."""
    first, last = NAMES.index(after) + 1 if after else 0, NAMES.index(until) + 1 if until else len(PASSES)
    for step in PASSES[first:last]:
        before, draft = draft.nodes, step.run(draft)
        draft = replace(draft, trail=(*draft.trail, (step.name, before, draft.nodes)))
    return draft


def prepare(captured: Captured, spec: Spec, pins: tuple[Pin, ...] = (), noise: bool = False, device: torch.device = HOST) -> Program:
    """A step that is rewritten and recomputes already, as one program under a spec, as it is run on such devices."""
    program = run(Draft(captured, spec, pins=pins, noise=noise, device=device), after="stages").program
    assert program is not None
    return program
