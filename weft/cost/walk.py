"""Ops one after another: issued by the host, run by the device, carried by the links.

Ops start in order: when the host has issued them, the one before has ended, and their link is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.cost.price import Costs
from weft.cost.timeline import Task, Timeline
from weft.cost.work import Collective, Op

HOST = ("to_host", "from_host")  # the two ways of the link to the host


@dataclass(frozen=True)
class Phase:
    """Seconds of a pass, and for what: `compute`, `host`, each axis waited for; `hidden` ran overlapped with compute."""

    seconds: float
    causes: Mapping[str, float] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Phase) -> Phase:
        return combine(self, 1.0, other, 1.0)


def minus(a: Phase, b: Phase) -> Phase:
    """What a takes longer than b; nothing where it does not."""
    return combine(a, 1.0, b, -1.0) if a.seconds > b.seconds else Phase(0.0)


def combine(a: Phase, x: float, b: Phase, y: float) -> Phase:
    def mix(p: Mapping[str, float], q: Mapping[str, float]) -> dict[str, float]:
        return {k: x * p.get(k, 0.0) + y * q.get(k, 0.0) for k in {**p, **q}}

    return Phase(x * a.seconds + y * b.seconds, mix(a.causes, b.causes), mix(a.hidden, b.hidden))


@dataclass
class Walk:
    """Clocks of host, device and links, and what the device waited for."""

    costs: Costs
    now: float = 0.0  # when the chain of ops so far has ended
    host: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    causes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[Task, float]] | None = field(default_factory=list)  # what ran, and from when on; None where nobody asks
    under_way: list[tuple[str, float]] = field(default_factory=list)
    sending: float = 0.0  # when the last kernel that sends has ended; copy engines send what is hidden behind a matmul of tp

    @property
    def line(self) -> Timeline:
        """What ran where and when."""
        made = sorted((e for e in self.events or () if e[0].seconds > 0), key=lambda e: e[1])
        return Timeline(tuple(t for t, _ in made), tuple(b for _, b in made), tuple(b + t.seconds for t, b in made))

    def phase(self) -> Phase:
        last = max([self.now, *(end for name, end in self.links.items() if name not in HOST)])
        if last > self.now:  # reductions that outlast the pass
            self.wait("dp", last)
        if self.links.get("to_host", 0.0) > self.now:  # nobody waits for the last copy, but the next pass for the link
            self.wait("host", self.hidden["host"])
        return Phase(self.now, dict(self.causes), dict(self.hidden))

    def op(self, op: Op) -> None:
        name = op.name or type(op).__name__.lower()
        self.issue(name, op)
        if isinstance(op, Collective) and op.hidden:
            end = self.carry(op, op.axis, max(self.host, self.now))
            self.under_way += [] if op.concurrent else [(op.axis, end)]
            return
        self.wait("host", self.host)
        if isinstance(op, Collective):
            self.wait(op.axis, self.carry(op, op.axis, self.now, hides=False))
            self.meet_host()
            return
        seconds = self.with_links_busy(self.costs.seconds(op))
        self.note(name, "compute", seconds, "compute", self.now)
        self.causes["compute"] += seconds
        self.now += seconds
        self.join()

    def with_links_busy(self, seconds: float) -> float:
        """What compute takes while collectives are under way, whose kernels have a share of the device: seconds / (1 - share) until they end."""
        share = self.costs.device.get("link.units", 0.0) / self.costs.device.get("units")
        return seconds + share * min(max(0.0, self.sending - self.now), seconds / (1 - share))

    def note(self, name: str, stream: str, seconds: float, cause: str, start: float) -> None:
        if self.events is not None:
            self.events.append((Task(name, stream, seconds, cause=cause), start))

    def copy(self, name: str, size: float, ready: float) -> float:
        """Put a copy to or from the host's memory overlapped with all else, each way one after another; when it ends."""
        start, seconds = max(ready, self.now, self.links[name]), size / self.costs.device.host_bandwidth
        self.links[name] = start + seconds
        self.note(name, name, seconds, "host", start)
        self.hidden["host"] += seconds
        return start + seconds

    def issue(self, name: str, op: Op) -> None:
        seconds = self.costs.host(op)
        self.note(name, "host", seconds, "host", self.host)
        self.host += seconds

    def wait(self, cause: str, until: float) -> None:
        if until > self.now:
            self.causes[cause] += until - self.now
            if cause in self.hidden:
                self.hidden[cause] = max(0.0, self.hidden[cause] - (until - self.now))
            self.now = until

    def meet_host(self) -> None:
        """A host that waits for collectives and for the end of each layer issues no more until then."""
        if self.costs.device.get("host.waits", 0.0):
            self.host = max(self.host, self.now)

    def join(self) -> None:
        """From here on, what was overlapped is needed."""
        for axis, end in self.under_way:
            self.wait(axis, end)
        self.under_way = []

    def carry(self, op: Collective, cause: str, ready: float, hides: bool = True) -> float:
        """Put a collective on its link; when it ends."""
        link = self.costs.link(op.axis)
        start, seconds = max(ready, self.links[link]), self.costs.seconds(op)
        self.links[link] = start + seconds
        if not (op.hidden and op.axis == "tp"):
            self.sending = max(self.sending, start + seconds)
        self.note(op.name or op.kind, link, seconds, op.axis, start)
        if hides:
            self.hidden[cause] += seconds
        return start + seconds
