"""One pass of one stage over one micro-batch, layer by layer. Layers repeat, so they are walked through until one takes as the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.cost.price import Costs
from weft.cost.timeline import Task
from weft.cost.walk import Phase, Walk
from weft.cost.work import Collective, MemoryBound, Op
from weft.plan.workload import Block, split_weight


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
    summed_bytes: float = 0.0  # touched for each gradient that is added to those of earlier micro-batches

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
    return walk(costs, parts if how.direction == "forward" else parts[::-1], how).phase()


def walk(costs: Costs, parts: Sequence[LayerRun], how: Pass, events: list[tuple[Task, float]] | None = None) -> LayerWalk:
    """Every op of the parts, one by one; they are put among the events, if asked for."""
    walker = LayerWalk(costs, how=how, events=events)
    for i, part in enumerate(parts):
        later = [p.block for p in parts[i + 1 :] if p.count]
        walker.run(part, next(iter(later), None), next((b for b in later if b.hosted(how.recompute)), None))
    walker.join()
    return walker


Clocks = tuple[dict[str, float], dict[str, float], dict[str, float]]  # ends, causes, hidden


def settled(first: Clocks, second: Clocks, third: Clocks) -> bool:
    """Whether the last layer moved every clock as the one before did, and none will overtake the device's or be overtaken by it."""
    a, b, c = first[0], second[0], third[0]
    if a.keys() != c.keys():
        return False
    pace, tolerance = c["now"] - b["now"], 1e-9 * c["now"]
    for key, end in c.items():
        step = end - b[key]
        if abs(step - (b[key] - a[key])) > tolerance:
            return False
        if end > c["now"] + tolerance and step < pace - tolerance or end < c["now"] - tolerance and step > pace + tolerance:
            return False
    return True


@dataclass
class LayerWalk(Walk):
    """A walk through layers, each gathered, and brought back from the host, while the one before is at work."""

    how: Pass = Pass("forward")
    gathered: float | None = None
    fetched: float | None = None  # what the host kept of the next layer of which it keeps something
    begun: bool = False  # with layers that repeat

    def run(self, part: LayerRun, following: Block | None, fetched: Block | None) -> None:
        """Equal layers: once two in a row took the same and no clock will overtake another, those between them and the last are as many times
        that much."""
        left, steps = part.count, [self.clocks()]
        while left > 0:
            self.block(part.block, *((part.block, part.block) if left > 1 else (following, fetched)))
            left, steps = left - 1, [*steps[-2:], self.clocks()]
            if left > 1 and self.events is None and len(steps) == 3 and settled(*steps):
                self.repeat(steps[1], left - 1)
                left = 1

    def clocks(self) -> Clocks:
        """When the device, the host and each link are done, and what was waited for so far."""
        ends = {"now": self.now, "host": self.host, "sending": self.sending, **{f"link {k}": v for k, v in self.links.items()}}
        ends |= {name: end for name, end in (("gathered", self.gathered), ("fetched", self.fetched)) if end is not None}
        return ends, dict(self.causes), dict(self.hidden)

    def repeat(self, before: Clocks, times: int) -> None:
        """As if what was done since `before` were done so many times more."""
        ends, causes, hidden = before
        self.now, now = self.now + times * (self.now - ends["now"]), self.now
        self.host += times * (self.host - ends["host"])
        self.sending += times * (self.sending - ends["sending"])
        self.under_way = [(axis, end + self.now - now) for axis, end in self.under_way]
        if self.gathered is not None:
            self.gathered += times * (self.gathered - ends["gathered"])
        if self.fetched is not None:
            self.fetched += times * (self.fetched - ends["fetched"])
        for found, was in ((self.links, {k: ends.get(f"link {k}", 0.0) for k in self.links}), (self.causes, causes), (self.hidden, hidden)):
            for key in found:
                found[key] += times * (found[key] - was.get(key, 0.0))

    def block(self, block: Block, following: Block | None, fetched: Block | None) -> None:
        """`fetched` is the next layer of which the host keeps something."""
        if self.how.gather:
            here = self.send_all(gathers(block, self.how)) if self.gathered is None else self.gathered
            self.gathered = None if following is None else self.send_all(gathers(following, self.how))
            self.wait("dp", here)
        if self.how.direction in ("backward", "input") and block.kept:
            self.fetch(block.hosted(self.how.recompute), fetched)
        for op in self.how.ops(block):
            self.op(op)
        if self.how.direction == "forward" and following is not None and following.kept:  # of the last layer nothing is sent: it is needed at once
            self.send(block.hosted(self.how.recompute))
        if self.how.summed_bytes and any(block.learnt):
            self.op(MemoryBound("sum gradients", sum(block.learnt) * self.how.summed_bytes))
        self.meet_host()
        if self.how.reduce:
            self.send_all(reductions(block, self.how))

    def send(self, size: float) -> None:
        if size:
            self.op(MemoryBound("to_host", 2 * size))
            self.copy("to_host", size, self.now)

    def fetch(self, size: float, later: Block | None) -> None:
        """Wait for what the host kept of a layer; then, or with the first layer, what it kept of a later one begins to come back."""
        here, first = self.fetched, not self.begun
        if size and here is not None:
            self.wait("host", here)
            self.op(MemoryBound("from_host", 2 * size))
        self.begun = True
        if first or size:
            self.fetched = None if later is None else self.copy("from_host", later.hosted(self.how.recompute), self.now)

    def send_all(self, ops: Iterator[Collective]) -> float:
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
