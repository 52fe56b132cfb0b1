"""Which global batch: how many steps a second, times what a step is worth.

A step on B samples, with gradient noise scale N, makes B / (B + N) of the progress that one on endlessly many samples makes: noise
of variance N / B, in units of the gradient, has to be averaged out. So with t(B) the time of the best plan at that batch,

    goodput(B) = B / (B + N) / t(B)

is the progress per second, and N / (B + N) what a sample is worth next to one of a tiny batch. As a function of log B it rises
while steps are cheap and falls once samples are wasted, so it is climbed from B = N, by factors of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.core.errors import PlanError
from weft.plan.baselines import EVERYTHING
from weft.plan.plan import Plan
from weft.plan.planner import Infeasible, Request, is_stack, make_plan
from weft.plan.search import Found, Search

MOST = 40  # doublings of the batch that may be looked at


def progress(batch: float, noise: float) -> float:
    """What a step makes of the progress of one without noise."""
    return batch / (batch + noise)


def efficiency(batch: float, noise: float) -> float:
    """What a sample is worth next to one of a tiny batch."""
    return 1.0 if noise == math.inf else noise / (batch + noise)


def plan_goodput(request: Request, noise: float, say: Callable[[str], None] = lambda _: None) -> Plan | Infeasible:
    """The plan at the batch of most progress per second. `noise` is in samples."""
    if not 0 < noise < math.inf:
        raise PlanError("no noise scale", needed="a number of samples above 0, as `step.noise.scale` gives it", found=str(noise), try_="--noise 500")
    if request.batch:
        raise PlanError("goodput chooses the batch", needed="no --batch", found=f"--batch {request.batch}", try_="--objective time")
    if not is_stack(request.model, request.cluster):
        raise PlanError("goodput is planned of stacks of blocks", needed="such as llama3-8b", found=request.model, try_="--objective time")
    timed = Request(request.model, request.cluster, 0, request.seq, "time", request.limits, imbalance=request.imbalance)
    search = Search(timed.problem(), request.limits)
    unit = _odd(search.cluster.devices)

    times: dict[int, float] = {}

    def cost(k: int) -> float:
        batch = unit << k
        say(f"batch {batch}")
        found = search.of(replace(search.problem, batch=batch)).best(EVERYTHING)
        times[batch] = found.seconds if isinstance(found, Found) else math.inf
        return times[batch] / progress(batch, noise)

    best = climb(max(0, round(math.log2(noise / unit))), cost)
    return _summary(make_plan(replace(timed, batch=unit << best), say), noise, times)


def _odd(n: int) -> int:
    """The odd factor of a number: batches that are its multiples by powers of two divide over all devices."""
    return n // (n & -n)


ENOUGH = 4  # batches in a row that fit nowhere


def climb(start: int, cost: Callable[[int], float]) -> int:
    """Where a function that falls and then rises is lowest, from `start` on."""
    known = {start: cost(start)}
    for step in (1, -1):
        at = min(known, key=lambda k: (known[k], k))
        while 0 <= at + step <= MOST and at + step not in known and list(known.values())[-ENOUGH:] != [math.inf] * ENOUGH:
            known[at + step] = cost(at + step)
            if known[at + step] >= known[at] and known[at] < math.inf:
                break
            at += step
    return min(known, key=lambda k: (known[k], k))


def _summary(made: Plan | Infeasible, noise: float, seconds: Mapping[int, float]) -> Plan | Infeasible:
    if isinstance(made, Infeasible):
        return made
    batch = made.setting.global_batch
    worth = efficiency(batch, noise)
    more: dict[str, Any] = {
        "noise": noise, "efficiency": float(f"{worth:.4g}"),
        "useful_tokens_per_s": float(f"{worth * made.predicted['tokens_per_s']:.6g}"),
        "batches_ms": {str(b): float(f"{s * 1e3:.6g}") for b, s in sorted(seconds.items()) if s < math.inf},
    }  # fmt: skip
    return replace(made, objective="goodput", predicted={**made.predicted, **more})
