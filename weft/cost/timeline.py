"""Tasks on streams, run in order: a task starts when its stream is free and all it waits for has ended.

A stream is a resource used by one task at a time: the host that issues, a device that computes, a link that carries.
Two collectives on one link therefore take turns, which moves as many bytes as sharing it would.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Task:
    """`after` are indices of earlier or later tasks; `cause` says what the time is for."""

    name: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    cause: str = "compute"


@dataclass(frozen=True)
class Timeline:
    """When each task ran."""

    tasks: tuple[Task, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.end, default=0.0)

    def on(self, stream: str) -> list[int]:
        return [i for i, task in enumerate(self.tasks) if task.stream == stream]

    def busy(self, stream: str) -> float:
        return sum(self.tasks[i].seconds for i in self.on(stream))

    def scaled(self, by: float) -> Timeline:
        """The same, so many times longer."""
        tasks = tuple(replace(t, seconds=t.seconds * by) for t in self.tasks)
        return Timeline(tasks, tuple(t * by for t in self.start), tuple(t * by for t in self.end))

    def chrome(self, process: int = 0, title: str = "step") -> dict[str, Any]:
        """The timeline as Chrome and Perfetto read it: microseconds, one row per stream."""
        rows = {stream: n for n, stream in enumerate(dict.fromkeys(t.stream for t in self.tasks))}
        names: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}]
        names += [{"ph": "M", "name": "thread_name", "pid": process, "tid": n, "args": {"name": stream}} for stream, n in rows.items()]
        events = [
            {
                "ph": "X", "name": task.name, "cat": task.cause, "pid": process, "tid": rows[task.stream],
                "ts": self.start[i] * 1e6, "dur": task.seconds * 1e6, "args": {"cause": task.cause},
            }
            for i, task in enumerate(self.tasks) if task.seconds > 0
        ]  # fmt: skip
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}


@dataclass(frozen=True)
class Seen:
    """One step, predicted or measured. `causes_ms` by what the time was for, `memory` as (seconds, bytes held)."""

    step_ms: float
    memory_gb: float
    causes_ms: Mapping[str, float] = field(default_factory=dict)
    line: Timeline = field(default_factory=lambda: Timeline((), (), ()))
    memory: Sequence[tuple[float, float]] = ()

    def lasting(self, ms: float) -> Seen:
        """The same step, stretched or shortened evenly to so many milliseconds."""
        by = ms / self.step_ms
        causes, memory = {k: v * by for k, v in self.causes_ms.items()}, [(t * by, b) for t, b in self.memory]
        return Seen(ms, self.memory_gb, causes, self.line.scaled(by), memory)


def run(tasks: Iterable[Task]) -> Timeline:
    """Run tasks, each stream in the order given. A cycle is refused with the tasks that wait."""
    tasks = tuple(tasks)
    start, end = [0.0] * len(tasks), [0.0] * len(tasks)
    waits = [len(task.after) for task in tasks]
    freed: dict[int, list[int]] = defaultdict(list)
    queues: dict[str, deque[int]] = defaultdict(deque)
    for i, task in enumerate(tasks):
        queues[task.stream].append(i)
        for j in task.after:
            freed[j].append(i)
    clock: dict[str, float] = dict.fromkeys(queues, 0.0)
    ready, left = list(queues), len(tasks)
    while ready:
        stream = ready.pop()
        queue = queues[stream]
        while queue and waits[queue[0]] == 0:
            i = queue.popleft()
            start[i] = max(clock[stream], max((end[j] for j in tasks[i].after), default=0.0))
            clock[stream] = end[i] = start[i] + tasks[i].seconds
            left -= 1
            for j in freed[i]:
                waits[j] -= 1
                if waits[j] == 0 and tasks[j].stream != stream:
                    ready.append(tasks[j].stream)
    if left:
        stuck = [tasks[queue[0]].name for queue in queues.values() if queue]
        raise PlanError("the tasks of the step form a cycle", needed="an order every stream can follow", found=", ".join(stuck[:6]))
    return Timeline(tasks, tuple(start), tuple(end))
