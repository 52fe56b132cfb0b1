"""One pass of one stage over one micro-batch: its ops issued by the host, run by the device, carried by the links.

Ops start in order: when the host has issued them, the one before has ended, and their link is free. Layers repeat, so a few
are walked through and the rest is a multiple of the last one's period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.plan.cost import Costs
from weft.plan.workload import Block, Collective, Op, split_weight

ENOUGH = 4  # layers after which the period has settled


@dataclass(frozen=True)
class Phase:
    """Seconds of a pass, and for what: `compute`, `host`, each axis waited for; `hidden` ran beside compute."""

    seconds: float
    causes: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Phase) -> Phase:
        return _combine(self, 1.0, other, 1.0)


def minus(a: Phase, b: Phase) -> Phase:
    """What a takes longer than b; nothing where it does not."""
    return _combine(a, 1.0, b, -1.0) if a.seconds > b.seconds else Phase(0.0)


def _combine(a: Phase, x: float, b: Phase, y: float) -> Phase:
    def mix(p: Mapping[str, float], q: Mapping[str, float]) -> dict[str, float]:
        return {k: x * p.get(k, 0.0) + y * q.get(k, 0.0) for k in {**p, **q}}

    return Phase(x * a.seconds + y * b.seconds, mix(a.causes, b.causes), mix(a.hidden, b.hidden))


@dataclass(frozen=True)
class Part:
    """Consecutive equal layers, or the first or last block alone."""

    block: Block
    count: int


@dataclass(frozen=True)
class Pass:
    """What a pass does besides its ops: `gather` parameters before each layer, `reduce` gradients after it."""

    direction: str  # forward, backward, input (backward without weight gradients), weight
    recompute: str = "none"
    gather: bool = False
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


def phase(costs: Costs, parts: Sequence[Part], how: Pass) -> Phase:
    """Time of a pass over the parts; backward passes take them from the last."""
    parts = list(parts) if how.direction == "forward" else list(reversed(parts))
    if max((p.count for p in parts), default=0) <= ENOUGH:
        return walk(costs, parts, how).phase()
    long = walk(costs, _cut(parts, ENOUGH), how).phase()
    short = walk(costs, _cut(parts, ENOUGH - 1), how).phase()
    repeats = sum(max(0, p.count - ENOUGH) for p in parts) / sum(p.count > ENOUGH for p in parts)
    return _combine(long, 1.0 + repeats, short, -repeats)


def _cut(parts: Sequence[Part], most: int) -> list[Part]:
    return [Part(p.block, min(p.count, most)) for p in parts]


def walk(costs: Costs, parts: Sequence[Part], how: Pass) -> Walk:
    """Every op of the parts, one by one."""
    walker = Walk(costs, how)
    blocks = [p.block for p in parts for _ in range(p.count)]
    for i, block in enumerate(blocks):
        walker.block(block, blocks[i + 1] if i + 1 < len(blocks) else None)
    walker.join()
    return walker


@dataclass
class Walk:
    """Clocks of host, device and links, and what the device waited for. `events` are what ran where and when."""

    costs: Costs
    how: Pass
    now: float = 0.0  # when the chain of ops so far has ended
    host: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    causes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, str, float, float]] = field(default_factory=list)
    beside: list[tuple[str, float]] = field(default_factory=list)
    gathered: float | None = None

    def phase(self) -> Phase:
        last = max([self.now, *self.links.values()])
        if last > self.now:  # reductions that outlast the pass
            self.wait("dp", last)
        return Phase(self.now, dict(self.causes), dict(self.hidden))

    def block(self, block: Block, following: Block | None) -> None:
        if self.how.gather:
            here = self.carry_all(gathers(block, self.how)) if self.gathered is None else self.gathered
            self.gathered = None if following is None else self.carry_all(gathers(following, self.how))
            self.wait("dp", here)
        for op in self.how.ops(block):
            self.op(op)
        if self.how.reduce:
            self.carry_all(reductions(block, self.how))

    def op(self, op: Op) -> None:
        name = op.name or type(op).__name__.lower()
        issue = self.costs.host(op)
        self.events.append((name, "host", self.host, issue))
        self.host += issue
        if isinstance(op, Collective) and op.hidden:
            self.beside.append((op.axis, self.carry(op, op.axis, max(self.host, self.now))))
            return
        self.wait("host", self.host)
        if isinstance(op, Collective):
            self.wait(op.axis, self.carry(op, op.axis, self.now, hides=False))
            return
        seconds = self.costs.seconds(op)
        self.events.append((name, "compute", self.now, seconds))
        self.causes["compute"] += seconds
        self.now += seconds
        self.join()

    def wait(self, cause: str, until: float) -> None:
        if until > self.now:
            self.causes[cause] += until - self.now
            if cause in self.hidden:
                self.hidden[cause] = max(0.0, self.hidden[cause] - (until - self.now))
            self.now = until

    def join(self) -> None:
        """From here on, what ran beside is needed."""
        for axis, end in self.beside:
            self.wait(axis, end)
        self.beside = []

    def carry(self, op: Collective, cause: str, ready: float, hides: bool = True) -> float:
        """Put a collective on its link; when it ends."""
        link = self.costs.link(op.axis)
        start, seconds = max(ready, self.links[link]), self.costs.seconds(op)
        self.links[link] = start + seconds
        self.events.append((op.name or op.kind, link, start, seconds))
        if hides:
            self.hidden[cause] += seconds
        return start + seconds

    def carry_all(self, ops: Iterator[Collective]) -> float:
        """Put parameters or gradients on their way."""
        return max((self.carry(op, "dp", self.now) for op in ops), default=self.now)


def gathers(block: Block, how: Pass) -> Iterator[Collective]:
    """Parameters of a layer from their shards."""
    for params, axis in ((block.params, "data"), (block.expert_params, "edp")):
        if params:
            yield Collective("all_gather", params * how.param_bytes, axis, "gather parameters")


def reductions(block: Block, how: Pass) -> Iterator[Collective]:
    """Gradients of a layer over the copies of its parameters."""
    for params, axis in ((block.params, "data"), (block.expert_params, "edp")):
        if params:
            yield Collective(how.reduce, params * how.grad_bytes, axis, "reduce gradients")
