"""A training step in micro-batches, laid out over the ranks and predicted: what `plan="auto"` offers next to plans of one pass.

Two ideas keep the offers few. Recomputing only costs time, so it is offered for plans that do not fit without. More micro-batches
hold less and take longer, so the fewest that fit are the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from weft import passes
from weft.api.planfile import Followed
from weft.api.runner import routes
from weft.cluster.spec import Cluster
from weft.core.errors import CaptureError, PlanError
from weft.cost.staged import StagedStep
from weft.frontend.capture.micro import Micro
from weft.passes import Draft
from weft.plan.pins import Pin
from weft.plan.space import divisors
from weft.plan.spec import Spec
from weft.transform.pipeline import PlacedPipeline
from weft.transform.stage_contents import stage_contents_of

if TYPE_CHECKING:
    from weft.cost.timeline import Seen
from weft.plan.schedules import SCHEDULES

MOST = 4  # micro-batches for every stage, where the batch has so many


def staged(line: PlacedPipeline, plan: Spec, where: Cluster) -> StagedStep:
    """Stages run in the order of a plan, as they are predicted."""
    order = plan.pipeline.orders(plan.pp, plan.micro_batches, plan.chunks)
    return StagedStep(line.stages, line.update, order, routes(line.stages), where)


@dataclass
class PipelinePlans:
    """Plans of one step in micro-batches. `capture` gives the step of one of so many; `fixed` says how many there must be."""

    capture: Callable[[int], Micro]
    samples: int
    fixed: int = 0
    _found: dict[int, Micro | PlanError | CaptureError] = field(default_factory=dict)

    def step(self, micro: int) -> Micro:
        if micro not in self._found:
            try:
                self._found[micro] = self.capture(micro)
            except (PlanError, CaptureError) as e:
                self._found[micro] = e
        found = self._found[micro]
        if isinstance(found, CaptureError):
            raise PlanError(found.message, needed=found.needed, found=found.found, where=found.where)
        if isinstance(found, PlanError):
            raise found
        return found

    def predicted(self, plan: Spec, where: Cluster, pins: Sequence[Pin] = (), imbalance: float = 1.0) -> Seen:
        return self.built(plan, where, pins, imbalance)[1]

    def built(self, plan: Spec, where: Cluster, pins: Sequence[Pin] = (), imbalance: float = 1.0) -> tuple[PlacedPipeline, Seen]:
        """The stages of a plan, and what is predicted of them."""
        followed = Followed(f"the plan {plan}", plan, contents=stage_contents_of(plan))
        draft = passes.run(Draft(None, plan, followed, pins=tuple(pins), imbalance=imbalance, derive=lambda: self.step(plan.micro_batches)))
        line = cast(PlacedPipeline, draft.pipeline)
        return line, staged(line, plan, where).seen

    def numbers(self, copies: int) -> list[int]:
        """Numbers of micro-batches that leave every replica an integer number of samples, the fewest first."""
        own = self.samples // copies if self.samples % copies == 0 else 1
        return [n for n in divisors(own) if n > 1 and self.fixed in (0, n)]

    def stages(self, world: int, inside: Callable[[int], Iterable[Spec]]) -> Iterator[Spec]:
        """Every split of the processes into stages, each with every plan for the processes of one, in about four micro-batches for every stage."""
        for pp in divisors(world)[1:]:
            for named in inside(world // pp):
                some = [n for n in self.numbers(named.dp * named.ep) if n <= MOST * pp]
                if some and not named.sp:
                    yield replace(named, pp=pp, micro=some[-1])

    def halved(self, plan: Spec) -> list[Spec]:
        """The same stages in half as many micro-batches, as long as no stage is always idle."""
        half = plan.micro_batches // 2
        return [replace(plan, micro=half)] if half in self.numbers(plan.dp * plan.ep) and half >= plan.pp else []

    def orders(self, plan: Spec) -> list[Spec]:
        """The same stages in other orders."""
        others = [s.name for s in SCHEDULES.values() if s.name != plan.schedule and s.may_take(plan.pp, plan.micro_batches)]
        return [replace(plan, schedule=name) for name in others]
