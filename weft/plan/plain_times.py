"""Seconds of the blocks of a model with their ops one after another, from which the search bounds a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.cost.price import Costs
from weft.cost.work import Collective, Op
from weft.plan.spec import MIXED, OFFLOADED, RECOMPUTE
from weft.plan.workload import Block, Workload, split_weight


@dataclass(frozen=True)
class OpTimes:
    """Ops of a block one after another: forward, backward by what is recomputed, and the part of it that may be deferred."""

    forward: float
    backward: Mapping[str, float]
    weight: float

    @staticmethod
    def of(block: Block, costs: Costs) -> OpTimes:
        forward, back = _total(block.forward, costs), block.backward("none")
        again = {how: _total(block.rerun(how), costs) for how in (*RECOMPUTE, *OFFLOADED, MIXED)}  # of a mix nothing is known yet
        plain = _total(back, costs)
        return OpTimes(forward, {k: plain + v for k, v in again.items()}, _total(split_weight(back)[1], costs))

    @staticmethod
    def mean(kinds: Sequence[tuple[OpTimes, int]]) -> OpTimes:
        """Of so many of each."""
        if len(kinds) == 1:
            return kinds[0][0]
        total = sum(n for _, n in kinds)
        back = {how: sum(t.backward[how] * n for t, n in kinds) / total for how in kinds[0][0].backward}
        return OpTimes(sum(t.forward * n for t, n in kinds) / total, back, sum(t.weight * n for t, n in kinds) / total)


@dataclass(frozen=True)
class PlainTimes:
    """The first block, a layer of the average kind, and the last block, without what is sent between copies."""

    first: OpTimes
    layer: OpTimes
    last: OpTimes

    @staticmethod
    def of(work: Workload, costs: Costs) -> PlainTimes:
        kinds = [(OpTimes.of(b, costs), n) for b, n in work.kinds]
        return PlainTimes(OpTimes.of(work.first, costs), OpTimes.mean(kinds), OpTimes.of(work.last, costs))


def _total(ops: Iterable[Op], costs: Costs) -> float:
    """Ops one after another; what is overlapped is waited for after the next that computes."""
    seconds = overlapped = 0.0
    for op in ops:
        own = costs.seconds(op)
        if isinstance(op, Collective):
            overlapped, seconds = (max(overlapped, own), seconds) if op.hidden else (overlapped, seconds + own)
        else:
            seconds, overlapped = seconds + max(own, overlapped), 0.0
    return seconds
