"""Units to stages of a pipeline, with what is recomputed chosen stage by stage.

Let c_i(a, b) be the seconds of one micro-batch on stage i with units a..b-1, the least amount of work recomputed included that makes it
fit: early stages keep more micro-batches in flight, so they run more again and take fewer units.
`partition` gives the stages whose slowest is fastest. Within a stage units are recomputed in the order of seconds per byte saved. The order
of passes is then simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from bench._graph.units import Unit
from weft.cluster import collectives
from weft.cluster.spec import Cluster
from weft.cost.memory import needed
from weft.cost.pipeline import neighbours, passes, repeated
from weft.cost.timeline import Task, Timeline, run
from weft.plan.partition import partition
from weft.plan.schedules import PLAIN, SCHEDULES

NONE, FULL, MIXED = "none", "full", "mixed"


@dataclass(frozen=True)
class UnitStage:
    """Units of one stage as one, which of them are recomputed, and the bytes it needs."""

    first: int
    last: int
    total: Unit
    again: tuple[int, ...]
    more: float  # seconds that recomputing adds to the backward
    memory: float

    @property
    def seconds(self) -> float:
        return self.total.forward + self.total.backward + self.more


@dataclass(frozen=True)
class Staged:
    """Stages, the order of their passes, and what the step takes."""

    stages: tuple[UnitStage, ...]
    schedule: str
    seconds: float

    @property
    def memory(self) -> float:
        return max(s.memory for s in self.stages)


@dataclass(frozen=True)
class Stager:
    """Splits one program's units. `memory` bytes of a device, `rounds` micro-batches, `recompute` none, full or mixed."""

    units: Sequence[Unit]
    memory: float
    rounds: int
    recompute: str = MIXED
    schedule: str = PLAIN

    def split(self, count: int) -> tuple[UnitStage, ...] | None:
        """The stages whose slowest is fastest; None where nothing fits."""
        alive = SCHEDULES[self.schedule].in_flight(count, self.rounds)

        def cost(i: int, a: int, b: int) -> float | None:
            made = self.stage(a, b, alive[i])
            return None if made is None else made.seconds

        ends = partition(len(self.units), count, cost)
        if ends is None:
            return None
        found = (self.stage(a, b, n) for (a, b), n in zip(itertools.pairwise((0, *ends)), alive, strict=True))
        return tuple(s for s in found if s is not None)

    def stage(self, a: int, b: int, alive: int) -> UnitStage | None:
        """Units a..b-1 with as little recomputed as fits."""
        key = a, b, alive
        if key not in self._known:
            self._known[key] = self._stage(a, b, alive)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], UnitStage | None]:
        return {}

    def _stage(self, a: int, b: int, alive: int) -> UnitStage | None:
        units = self.units[a:b]
        total = units[0]
        for u in units[1:]:
            total = total + u
        held = total.state + (total.grads if self.rounds > 1 else 0.0) + 2 * total.work
        enters = [self.units[i - 1].sent if i else 0.0 for i in range(a, b)]
        kept = [u.saved for u in units]
        options = sorted(range(len(units)), key=lambda i: units[i].forward / max(1.0, kept[i] - enters[i]))
        again: list[int] = list(range(len(units))) if self.recompute == FULL else []
        while True:
            chosen = set(again)
            bytes_ = held + alive * sum(enters[i] if i in chosen else kept[i] for i in range(len(units)))
            bytes_ += max((kept[i] for i in chosen), default=0.0)
            if needed(bytes_) <= self.memory:
                break
            left = [i for i in options if i not in chosen]
            if not left or self.recompute != MIXED:
                return None
            again.append(left[0])
        more = sum(units[i].forward for i in chosen)
        return UnitStage(a, b, total, tuple(sorted(a + i for i in chosen)), more, needed(bytes_))


def pipelined(stages: Sequence[UnitStage], cluster: Cluster, rounds: int, schedule: str, beside: bool) -> float:
    """Seconds of a step."""
    return repeated(lambda n: timeline(stages, cluster, n, schedule, beside), len(stages), rounds)


def timeline(stages: Sequence[UnitStage], cluster: Cluster, rounds: int, schedule: str, beside: bool) -> Timeline:
    """Every pass of every stage in time, what is sent between them, and each stage's gradients and update after its last."""
    count, how = len(stages), SCHEDULES[schedule]
    sends = [collectives.send_seconds(cluster, st.total.sent, cluster.devices // count) for st in stages]

    def seconds(s: int, kind: str) -> float:
        total, weight = stages[s].total, stages[s].total.weight if how.defers_weights else 0.0
        return {"forward": total.forward, "backward": total.backward + stages[s].more - weight, "weight": weight}[kind]

    made = passes(how.orders(count, rounds), seconds, neighbours(range(count), count, sends.__getitem__), beside)
    return run([*made, *(Task("gradients and update", f"stage {s}", st.total.once, (), "optimizer") for s, st in enumerate(stages))])
