"""A step in micro-batches over the stages of a pipeline, predicted: each pass takes its program's own time, passes come in the order the ranks
take them up, messages are sent meanwhile, gradients are added to those of earlier micro-batches, and the update follows the last.

Of the memory of a rank: its state throughout; of every micro-batch under way what its later passes read; sums of gradients from the
first on; and what the pass at work makes beyond that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from weft.cluster.spec import Cluster
from weft.core.node import Type
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.memory import peak_bytes
from weft.cost.pipeline import Pass, kept_over, passes
from weft.cost.price import device_seconds
from weft.cost.simulate import predict, root_of, send_seconds
from weft.cost.timeline import Seen, Task, Timeline, run
from weft.cost.work import MemoryBound
from weft.ops.registry import nbytes

Routes = Mapping[tuple[int, str], Mapping[int, Sequence[str]]]  # (stage, kind of pass) to the stages that read of it, and what
PASSES = ("forward", "backward", "weight")  # the phases of a stage


class StagePrograms(Protocol):
    """The programs of a stage, one for each kind of pass, and what crosses its borders."""

    @property
    def number(self) -> int: ...
    @property
    def phases(self) -> Sequence[Program]: ...
    @property
    def types(self) -> Mapping[str, Type]: ...


@dataclass(frozen=True, eq=False)
class StagedStep:
    """The step on a cluster: programs of the stages and of the update. `routes` say who reads what."""

    stages: Sequence[StagePrograms]
    update: Program
    orders: Sequence[Sequence[Pass]]
    routes: Routes
    cluster: Cluster

    @property
    def ranks(self) -> int:
        return len(self.orders)

    def phase(self, stage: StagePrograms, kind: str) -> Program | None:
        at = PASSES.index(kind)
        return stage.phases[at] if at < len(stage.phases) else None

    @cached_property
    def seconds(self) -> dict[tuple[int, str], float]:
        phases = {(s.number, kind): self.phase(s, kind) for s in self.stages for kind in PASSES}
        seconds = {key: 0.0 if p is None else predict(p, self.cluster).step_ms / 1e3 for key, p in phases.items()}
        for s in self.stages:
            seconds[s.number, PASSES[len(s.phases) - 1]] += self.sum_seconds(s)
        return seconds

    def sum_seconds(self, stage: StagePrograms) -> float:
        """To add a micro-batch's gradients to those of earlier ones; the first, which has none before it, takes its share."""
        size, count, micro = self.gradients(stage), len(self.gradient_types(stage)), 1 + max(m for order in self.orders for *_, m in order)
        return device_seconds(self.cluster.device, MemoryBound("sum gradients", 3 * size, count)) * (micro - 1) / micro if size else 0.0

    @cached_property
    def updates(self) -> list[Seen]:
        """What follows the last micro-batch, on every rank of the pipeline."""
        return [predict(self.update, self.cluster, rank if self.ranks > 1 else None) for rank in range(self.ranks)]

    # --- in time

    @cached_property
    def timeline(self) -> Timeline:
        def sent(g: int, kind: str) -> dict[int, float]:
            sizes = {dst: sum(nbytes(self.stages[dst].types[n]) for n in names) for dst, names in self.routes[g, kind].items()}
            return {dst: send_seconds(self.cluster, size, self.ranks) for dst, size in sizes.items()}

        made = passes(self.orders, lambda g, kind: self.seconds[g, kind], sent)
        ends = itertools.accumulate(len(order) for order in self.orders)
        done = tuple(end - 1 for end, order in zip(ends, self.orders, strict=True) if order)
        return run([*made, *(Task("update", f"stage {r}", u.step_ms / 1e3, done, "optimizer") for r, u in enumerate(self.updates))])

    @cached_property
    def busiest(self) -> int:
        """The stage that works longest, whose time is split by cause."""
        return max(range(self.ranks), key=lambda r: self.timeline.busy(f"stage {r}"))

    @property
    def causes(self) -> dict[str, float]:
        line, causes = self.timeline, dict[str, float]()
        for k, ms in self.updates[self.busiest].causes_ms.items():
            why = "optimizer" if k == "compute" else k
            causes[why] = causes.get(why, 0.0) + ms / 1e3
        for i in line.on(f"stage {self.busiest}"):
            if line.tasks[i].cause in PASSES:
                causes[line.tasks[i].cause] = causes.get(line.tasks[i].cause, 0.0) + line.tasks[i].seconds
        return {**causes, "bubble": max(0.0, line.seconds - sum(causes.values()))}

    # --- in memory

    def state(self, rank: int) -> float:
        """Bytes of parameters, buffers and optimizer state."""
        stored = (n for name, n in self.update.input_names.items() if not name.startswith("d.") and n.types[0].shape)
        return float(sum(nbytes(n.type) for n in stored if root_of(n) in (None, rank)))

    def kept(self, stage: StagePrograms) -> float:
        """Bytes of one micro-batch that later passes of a stage read."""
        stored = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
        later = {n: x for p in stage.phases[1:] for n, x in p.input_names.items() if x.role not in stored}
        return float(sum(nbytes(x.type) for x in later.values()))

    def gradient_types(self, stage: StagePrograms) -> list[Type]:
        return [x.type for p in stage.phases[1:] for n, x in p.outputs if n.startswith("d.param.")]

    def gradients(self, stage: StagePrograms) -> float:
        return float(sum(map(nbytes, self.gradient_types(stage))))

    @cached_property
    def extra_bytes(self) -> dict[tuple[int, str], float]:
        """Bytes that a pass holds at most in addition to its inputs."""
        phases = {(s.number, kind): self.phase(s, kind) for s in self.stages for kind in PASSES}
        return {key: 0.0 if p is None else max(0.0, peak_bytes(p) - sum(nbytes(n.type) for n in p.inputs)) for key, p in phases.items()}

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """(seconds, bytes) over the step, on one rank of the pipeline."""
        line, order = self.timeline, self.orders[rank]
        state = now = self.state(rank)
        points, gradients = [(0.0, now)], dict[int, float]()
        kept = [self.kept(s) if len(s.phases) > 1 else 0.0 for s in self.stages[rank :: self.ranks]]
        for i, (kind, chunk, _), waits in kept_over(line, rank, order, kept):
            stage = self.stages[chunk * self.ranks + rank]
            points.append((line.start[i], now + self.extra_bytes[stage.number, kind]))
            if kind == PASSES[len(stage.phases) - 1]:
                gradients[chunk] = self.gradients(stage)
            now = state + waits + sum(gradients.values())
            points.append((line.end[i], now))
        return [*points, (line.seconds, now)]

    @cached_property
    def fullest(self) -> int:
        return max(range(self.ranks), key=lambda r: max(b for _, b in self.memory(r)))

    @property
    def seen(self) -> Seen:
        memory = self.memory(self.fullest)
        causes = {k: v * 1e3 for k, v in self.causes.items() if v > 0}
        return Seen(self.timeline.seconds * 1e3, max(b for _, b in memory) / 1e9, causes, self.timeline, memory)
