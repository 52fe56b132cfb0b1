"""One pass of one stage over one micro-batch, layer by layer. Layers repeat, so a few are walked through and the rest is a multiple of the
last one's period."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.cost.price import Costs
from weft.cost.timeline import Task
from weft.cost.walk import Phase, Walk, combine
from weft.cost.work import Collective, Op
from weft.plan.workload import Block, split_weight

ENOUGH = 4  # layers after which the period has settled


@dataclass(frozen=True)
class LayerRun:
    """Consecutive equal layers, or the first or last block alone."""

    block: Block
    count: int


@dataclass(frozen=True)
class Pass:
    """What a pass does besides its ops: `gather` parameters before each layer, `reduce` gradients after it."""

    direction: str  # forward, backward, input (backward without weight gradients), weight
    recompute: str = "none"
    gather: bool = False
    frozen: bool = False  # parameters that are not trained are gathered too
    reduce: str = ""  # the collective of gradients, "" for none
    param_bytes: float = 2.0
    grad_bytes: float = 4.0

    def ops(self, block: Block) -> tuple[Op, ...]:
        if self.direction == "forward":
            return block.forward
        back = block.backward(self.recompute)
        if self.direction == "backward":
            return back
        early, late = split_weight(back)
        return early if self.direction == "input" else late


def phase(costs: Costs, parts: Sequence[LayerRun], how: Pass) -> Phase:
    """Time of a pass over the parts; backward passes take them from the last."""
    parts = list(parts) if how.direction == "forward" else list(reversed(parts))
    if max((p.count for p in parts), default=0) <= ENOUGH:
        return walk(costs, parts, how).phase()
    long, short = (walk(costs, _cut(parts, n), how) for n in (ENOUGH, ENOUGH - 1))
    repeats = sum(max(0, p.count - ENOUGH) for p in parts) / sum(p.count > ENOUGH for p in parts)
    lead = (long.now - long.host) + repeats * ((long.now - long.host) - (short.now - short.host))
    if lead < 0:  # of few layers the host may be ahead, and of all of them not
        return walk(costs, parts, how).phase()
    return combine(long.phase(), 1.0 + repeats, short.phase(), -repeats)


def _cut(parts: Sequence[LayerRun], most: int) -> list[LayerRun]:
    return [LayerRun(p.block, min(p.count, most)) for p in parts]


def walk(costs: Costs, parts: Sequence[LayerRun], how: Pass, events: list[tuple[Task, float]] | None = None) -> LayerWalk:
    """Every op of the parts, one by one; they are put among the events, if asked for."""
    walker = LayerWalk(costs, how=how, events=events)
    blocks = [p.block for p in parts for _ in range(p.count)]
    for i, block in enumerate(blocks):
        walker.block(block, blocks[i + 1] if i + 1 < len(blocks) else None)
    walker.join()
    return walker


@dataclass
class LayerWalk(Walk):
    """A walk through layers, each gathered while the one before is at work."""

    how: Pass = Pass("forward")
    gathered: float | None = None

    def block(self, block: Block, following: Block | None) -> None:
        if self.how.gather:
            here = self.carry_all(gathers(block, self.how)) if self.gathered is None else self.gathered
            self.gathered = None if following is None else self.carry_all(gathers(following, self.how))
            self.wait("dp", here)
        for op in self.how.ops(block):
            self.op(op)
        if self.how.reduce:
            self.carry_all(reductions(block, self.how))

    def carry_all(self, ops: Iterator[Collective]) -> float:
        """Put parameters or gradients on their way."""
        return max((self.carry(op, "dp", self.now) for op in ops), default=self.now)


def gathers(block: Block, how: Pass) -> Iterator[Collective]:
    """Parameters of a layer from their shards: all of them where they are sharded, what was trained after an update."""
    for params, axis in zip(block.held if how.frozen else block.learnt, ("data", "edp"), strict=True):
        if params:
            yield Collective("all_gather", params * how.param_bytes, axis, "gather parameters")


def reductions(block: Block, how: Pass) -> Iterator[Collective]:
    """Gradients of a layer over the copies of its parameters."""
    for params, axis in zip(block.learnt, ("data", "edp"), strict=True):
        if params:
            yield Collective(how.reduce, params * how.grad_bytes, axis, "reduce gradients")
