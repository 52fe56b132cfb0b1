"""`plan="auto"`: of the pool of plans for these processes the fastest that fits is taken. Rank 0 plans and tells the others, so that all run one program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from weft.api.pipeline_plans import PipelinePlans
from weft.api.planfile import Followed
from weft.api.pool import Option, Others, PlanRequest, Pool, fill, with_doubles
from weft.cluster.here import here
from weft.cluster.spec import Cluster
from weft.core.errors import PlanError
from weft.core.text import parse
from weft.frontend.capture import Captured
from weft.plan.rewritten import moves_of
from weft.plan.spec import Spec
from weft.runtime.agree import from_first, rank, world


@dataclass(frozen=True)
class Decision:
    """What was chosen, where, and next to what; `words` say its mesh. `text` is the program itself, the same on every rank; of a
    plan in micro-batches, which has several, it is empty, and `words` say everything. `moves` are those of a step that rules rewrote."""

    plan: str
    words: str
    cluster: str
    options: tuple[Option, ...]
    text: str
    moves: Sequence[Mapping[str, Any]] | None = None

    @staticmethod
    def of(pool: Pool) -> Decision:
        best = pool.fitting[0]
        named, program = pool.programs[best.plan]
        options = tuple(pool.summary_of(o) for o in pool.options.values())
        moves = [m.data() for m in pool.moves[best.plan]] if best.plan in pool.moves else None
        return Decision(best.plan, str(named), pool.where.text, options, program.text if program is not None else "", moves)

    @property
    def named(self) -> Spec:
        return Spec.parse(self.words)

    @cached_property
    def followed(self) -> Followed | None:
        """The plan as a step follows it: the very program that was priced; none of a plan in micro-batches."""
        spec = replace(self.named, moves=moves_of({"moves": self.moves}))
        return Followed("the plan that was chosen", spec, parse(self.text), as_run=True) if self.text else None

    @property
    def chosen(self) -> Option:
        return next(o for o in self.options if o.plan == self.plan)

    def __str__(self) -> str:
        """The choice, the next best with what it costs and why, and what cannot be had."""
        best = self.chosen
        lines = [f"{self.plan} on {self.cluster}: {best.ms:,.1f} ms a step and {best.gb:.3g} GB on a rank are predicted"]
        fit = sorted((o for o in self.options if not o.reason and o is not best), key=lambda o: o.ms)
        lines += [f"  {o.plan}: {o.ms - best.ms:+,.1f} ms, {o.gb - best.gb:+.3g} GB ({_why(best, o)})" for o in fit]
        return "\n".join([*lines, *(f"  {o.plan}: not possible, {o.reason}" for o in self.options if o.reason)])


def _why(best: Option, other: Option) -> str:
    """What the other does longer."""
    grown = sorted(((ms - best.causes.get(k, 0.0), k) for k, ms in other.causes.items()), reverse=True)
    return ", ".join(f"{k} {ms:+,.1f} ms" for ms, k in grown[:2] if ms > 0.005) or "nothing takes longer"


def agree(
    captured: Captured,
    device: torch.device,
    request: PlanRequest = PlanRequest(),
    others: Others | None = None,
    lines: PipelinePlans | None = None,
    by_name: bool = False,
) -> Decision:
    """The decision of rank 0, on every rank; if it finds none, its reason is raised on every rank."""
    if not dist.is_initialized():
        return decide(captured, here(1, device), request, others, lines, by_name)
    decision, failed = "", None
    if rank() == 0:
        try:
            decision = json.dumps(asdict(decide(captured, here(world(), device), request, others, lines, by_name)))
        except Exception as e:  # the others wait to be told
            decision, failed = json.dumps({"error": str(e)}), e
    data = json.loads(from_first(decision, device=device if device.type != "cpu" else None))
    if "error" in data:
        raise failed or PlanError("rank 0 found no plan", found=data["error"])
    return Decision(**{**data, "options": tuple(Option(**o) for o in data["options"])})


def decide(
    captured: Captured,
    where: Cluster,
    request: PlanRequest = PlanRequest(),
    others: Others | None = None,
    lines: PipelinePlans | None = None,
    by_name: bool = False,
) -> Decision:
    """The fastest plan that fits and grants the request; `others` are a user's own tensor-parallel plans by name, `lines` plans in micro-batches.

    `by_name` leaves out what only the program itself can say: layouts of the solver, and rules."""
    return Decision.of(fill(Pool(captured, with_doubles(where), request, lines), others, by_name))
