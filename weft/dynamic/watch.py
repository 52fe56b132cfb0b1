"""What training of a dynamic model writes about itself: times of steps, the batched schedule, one step predicted and then traced.

    run = weft.dynamic.Recorder(model, "run/")
    for graphs, x, y in batches:
        with run.step(graphs):
            loss = criterion(model(graphs, x), y); loss.backward(); optimizer.step()
            run.loss = float(loss)
    run.close()                                         # `weft report run/` shows it

The fourth step is traced to learn what a round of each class costs, alpha + beta * rows. The sixth is predicted from its graphs by
these costs, and then traced too.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.cost.timeline import Seen, Task, Timeline
from weft.dynamic.draw import as_data
from weft.dynamic.frame import Frame, Span
from weft.dynamic.model import Model
from weft.dynamic.phases import BACKWARD, FORWARD
from weft.dynamic.policy import POLICIES
from weft.dynamic.schedule import Schedule
from weft.dynamic.structure import Structure
from weft.record.progress import Printer
from weft.record.run import Run, median
from weft.runtime.machine import describe
from weft.runtime.trace import synchronize

LEARNED, TRACED = 3, 5  # steps counted from 0


@dataclass(frozen=True)
class PhaseTime:
    """One phase of one class over some rows."""

    klass: str
    phase: str
    rows: int
    start: float
    seconds: float


@contextmanager
def traced(device: Any) -> Iterator[list[PhaseTime]]:
    """Notes every phase while it lasts. The engine is changed only inside, so it pays nothing while nobody watches."""
    found: list[PhaseTime] = []
    plain, began = Frame.run, time.perf_counter()

    def run(self: Frame, phase: str, span: Span) -> None:
        start = time.perf_counter()
        plain(self, phase, span)
        synchronize(device)
        found.append(PhaseTime(self.name, phase, span[1] - span[0], start - began, time.perf_counter() - start))

    Frame.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Frame.run = plain  # type: ignore[method-assign]


@dataclass(frozen=True)
class Costs:
    """Seconds of a phase of a class: alpha, and beta for each row; and of what lies before, between and after, for each vertex."""

    phases: Mapping[tuple[str, str], tuple[float, float]]
    around: Mapping[str, float]

    @staticmethod
    def of(pieces: Sequence[PhaseTime], step: float, vertices: int) -> Costs:
        by: dict[tuple[str, str], list[PhaseTime]] = {}
        for p in pieces:
            by.setdefault((p.klass, p.phase), []).append(p)
        gaps = {p.phase: p.seconds / max(1, vertices) for p in around(pieces, step)}
        return Costs({key: _line(own) for key, own in by.items()}, gaps)

    def of_schedule(self, schedule: Schedule) -> list[PhaseTime]:
        """The phases of a step, one after the other, as the engine takes them."""
        names = {k: b.name(schedule.structure.kinds) for k, b in schedule.blocks.items()}
        full = {names[k]: b.count for k, b in schedule.blocks.items()}
        rounds = [(names[r.klass], r.stop - r.start) for r in schedule.rounds]
        order = [(name, phase, rows) for phase in ("weights", "eager") for name, rows in full.items()]
        order += [(name, "rounds", rows) for name, rows in rounds]
        order += [(name, phase, rows) for phase in ("late", "before") for name, rows in full.items()]
        order += [(name, "back", rows) for name, rows in reversed(rounds)]
        order += [(name, "after", rows) for name, rows in full.items()]
        out: list[PhaseTime] = []
        now = self.around.get("prepare", 0.0) * schedule.structure.vertices
        for name, phase, rows in order:
            if phase == "before" and (not out or out[-1].phase != "before"):
                now += self.around.get("loss", 0.0) * schedule.structure.vertices
            alpha, beta = self.phases.get((name, phase), (0.0, 0.0))
            out.append(PhaseTime(name, phase, rows, now, alpha + beta * rows))
            now += out[-1].seconds
        return out

    def seconds(self, schedule: Schedule) -> float:
        last = self.of_schedule(schedule)[-1]
        return last.start + last.seconds + self.around.get("update", 0.0) * schedule.structure.vertices


def around(pieces: Sequence[PhaseTime], step: float) -> list[PhaseTime]:
    """What a step does besides its phases: before the first, between forward and backward, and after the last."""
    there = [p.start for p in pieces if p.phase in FORWARD], [p.start + p.seconds for p in pieces if p.phase in FORWARD]
    back = [p.start for p in pieces if p.phase in BACKWARD], [p.start + p.seconds for p in pieces if p.phase in BACKWARD]
    if not there[0] or not back[0]:
        return []
    spans = {"prepare": (0.0, min(there[0])), "loss": (max(there[1]), min(back[0])), "update": (max(back[1]), step)}
    return [PhaseTime("", name, 0, low, high - low) for name, (low, high) in spans.items() if high > low]


def _line(pieces: Sequence[PhaseTime]) -> tuple[float, float]:
    """Least squares of seconds over rows; neither share may be negative."""
    rows, seconds = (np.array([getattr(p, what) for p in pieces], float) for what in ("rows", "seconds"))
    if len(set(rows.tolist())) < 2:
        return 0.0, float(seconds.mean() / max(1.0, rows.mean()))
    beta, alpha = np.polyfit(rows, seconds, 1)
    if beta < 0:
        return float(seconds.mean()), 0.0
    return (float(alpha), float(beta)) if alpha >= 0 else (0.0, float(seconds.sum() / rows.sum()))


class Recorder:
    """Watches the steps of one model and writes a run."""

    def __init__(self, model: Model, folder: str | Path | None, *, name: str = "", progress: bool = True) -> None:
        self.model, self.folder, self.name = model, folder, name or type(next(iter(model.functions.values()))).__name__
        self.printer = Printer() if progress else None
        self.loss: float | None = None
        self.series: dict[str, list[float]] = {"ms": [], "wait_ms": [], "loss": []}
        self.vertices: list[int] = []
        self.device = next((p.device for p in model.parameters()), None)
        self.costs: Costs | None = None
        self.predicted: Seen | None = None
        self.measured: Seen | None = None
        self.data: dict[str, Any] = {}
        self.alternatives: list[dict[str, Any]] = []
        self._ended = 0.0
        atexit.register(self.close)

    @contextmanager
    def step(self, graphs: Structure | Schedule) -> Iterator[Recorder]:
        """Time what is done inside: forward, backward and update of one batch."""
        n, structure = len(self.series["ms"]), graphs.structure if isinstance(graphs, Schedule) else graphs
        waited = time.perf_counter() - self._ended if self._ended else 0.0
        pieces: list[PhaseTime] = []
        began = time.perf_counter()
        if n in (LEARNED, TRACED):
            with traced(self.device) as pieces:
                yield self
        else:
            yield self
        self._synchronize()
        spent = time.perf_counter() - began
        self.vertices.append(structure.vertices)
        self.series["ms"].append(spent * 1e3 if not pieces else self.series["ms"][-1])
        self.series["wait_ms"].append(waited * 1e3)
        self.series["loss"] += [self.loss] if self.loss is not None else []
        if n == LEARNED:
            self.costs = Costs.of(pieces, spent, structure.vertices) if pieces else None
        elif n == TRACED and self.costs is not None:
            self._compare(pieces, spent, structure)
        self._ended = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device is not None:
            synchronize(self.device)

    def _compare(self, pieces: Sequence[PhaseTime], spent: float, structure: Structure) -> None:
        """Predict the traced step by what was learned before, and set the two side by side; then say so."""
        assert self.costs is not None  # learned from an earlier step
        schedule = self.model.schedule(structure)
        self.data = as_data(schedule)
        self.predicted = _seen(self.costs.of_schedule(schedule), self.costs.seconds(schedule))
        self.measured = _seen(pieces, spent)
        for policy in POLICIES:
            other = Schedule(structure, self.model.reads(), policy)
            took, batches = self.costs.seconds(other) * 1e3, len(other.rounds)
            self.alternatives.append(
                {"plan": f"{policy}: {batches} batches", "step_ms": took, "memory_gb": 0.0, "causes_ms": {}, "reason": ""}
            )
        if self.printer is not None:
            self.printer.report(self.run())
        if self.folder is not None:
            self.run().save(self.folder)

    def run(self) -> Run:
        """The run so far."""
        device = describe(self.device) if self.device is not None else ""
        tensors = [
            {
                "name": name,
                "role": "param",
                "shape": list(p.shape),
                "local": list(p.shape),
                "dtype": str(p.dtype).removeprefix("torch."),
                "places": {},
            }
            for name, p in self.model.cells.named_parameters()
        ]
        taken = self.data.get("policy", self.model.policy)
        return Run(
            name=self.name, kind="dynamic", plan=f"{taken}: {self.data.get('batches', 0)} batches", program="", machine=device, cluster="",
            mesh={"dp": 1}, unit="vertices", per_step=median(self.vertices), flops=0.0, peak_flops=0.0,
            steps={k: [round(x, 4) for x in v] for k, v in self.series.items()}, predicted=self.predicted, measured=self.measured,
            tensors=tensors, alternatives=self.alternatives, schedule=self.data,
        )  # fmt: skip

    def close(self) -> None:
        """Write what there is; called at the end of the process, if not before."""
        atexit.unregister(self.close)
        if self.folder is not None and self.series["ms"]:
            self.run().save(self.folder)


def _seen(pieces: Sequence[PhaseTime], spent: float) -> Seen:
    """Phases on two rows, forward and backward, what lies around them on a third; what is left of the step is all else."""
    every = sorted([*pieces, *around(pieces, spent)], key=lambda p: p.start)
    causes: dict[str, float] = {}
    for p in every:
        causes[_cause(p)] = causes.get(_cause(p), 0.0) + p.seconds * 1e3
    causes["rest"] = max(0.0, spent * 1e3 - sum(causes.values()))
    kept = [p for p in every if p.seconds > 0]
    line = Timeline(tuple(map(_task, kept)), tuple(p.start for p in kept), tuple(p.start + p.seconds for p in kept))
    return Seen(spent * 1e3, 0.0, causes, line)


def _cause(p: PhaseTime) -> str:
    return p.phase if p.phase in ("rounds", "back") or not p.klass else "compute"


def _task(p: PhaseTime) -> Task:
    if not p.klass:
        return Task(p.phase, "around", p.seconds, (), p.phase)
    name = f"{p.klass}: {p.rows} rows" if _cause(p) != "compute" else f"{p.klass}: {p.phase}, {p.rows} rows"
    return Task(name, "forward" if p.phase in FORWARD else "backward", p.seconds, (), _cause(p))
