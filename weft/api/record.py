"""What a training step writes about itself: per-step times, one step traced, one with its memory counted, next to what was predicted.

    step = weft.parallelize(..., record="run/")        # then train as always; `weft report run/` shows it

Recording waits for the device after every step. The fourth step is traced, the fifth counts memory; both train as the others do. Of a step
in micro-batches every pass of every stage is reported.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weft.api.bands import bands
from weft.api.pipeline_plans import staged
from weft.api.pool import Option, prepare, with_doubles, words
from weft.api.program_facts import (
    communication,
    communication_of_stages,
    digest,
    main_dtype,
    model_flops,
    rewrite_rules_used,
    split,
    taken,
    tensors,
    tensors_of_stages,
    verbs,
)
from weft.api.traced_step import TracedStep, last_starts, measured_line, seen_of_stages
from weft.cluster.here import here
from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import WeftError
from weft.core.program import Program
from weft.cost.simulate import predict
from weft.cost.timeline import Seen
from weft.ops.rounds import RUNNERS, rounds
from weft.plan.schedules import SCHEDULES
from weft.plan.spec import Spec
from weft.record.progress import Printer, partings
from weft.record.run import Run
from weft.runtime.agree import rank
from weft.runtime.machine import describe
from weft.runtime.trace import synchronize

if TYPE_CHECKING:
    from weft.api.micro_batches import MicroBatches
    from weft.api.step import Step
    from weft.cost.staged import StagedStep

TIMED, HELD = 3, 4  # the steps, counted from 0, that are traced
REPORTED_AFTER = 9  # the step after which there is enough to speak of
OFTEN = 5.0  # seconds between two writes of the file
MOST, LARGE = 12, 4000  # plans predicted for comparison, and nodes of a program from which none are


class Recorder:
    """Watches the calls of one step. Every rank keeps one, so that all trace the same steps; rank 0 writes."""

    def __init__(self, step: Step, folder: str | Path | None, cluster: str = "", progress: bool = True) -> None:
        self.step, self.folder = step, folder
        self.rank = rank()
        self.printer = Printer() if progress and self.rank == 0 else None
        self.series: dict[str, list[float]] = {"ms": [], "wait_ms": [], "loss": [], "lr": [], "grad_norm": []}
        self.cluster = _cluster(step, cluster)
        parts, where = step.micro_batches, self.cluster
        self.staged = staged(parts.pipeline, step.plan, where) if parts is not None and where is not None else None
        self.predicted = self._predict()
        self.measured: Seen | None = None
        self.alternatives = [o.data() for o in step.decision.options] if step.decision is not None else []
        self._traces: dict[int, TracedStep] = {}
        self._ended = self._wrote = 0.0
        atexit.register(self.close)

    def call(self, given: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Run the step once, watched."""
        n, began = len(self.series["ms"]), time.perf_counter()
        out = self._traced(n, given, state) if n in (TIMED, HELD) else self.step.run(given, state)
        synchronize(self.step.compiled.device)
        spent, waited = time.perf_counter() - began, began - self._ended if self._ended else 0.0
        if out.get("grad_norm") is not None:
            self.series["grad_norm"].append(float(out["grad_norm"].detach()))
        self._note(spent, waited, float(out["loss"].detach()) if "loss" in out else 0.0)
        self._ended = time.perf_counter()  # what was written and said meanwhile is no wait
        return out

    def _traced(self, n: int, given: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        self._traces[n] = TracedStep(self.step, memory=n == HELD)
        return self._traces[n].run(given, state)

    def _note(self, spent: float, waited: float, loss: float) -> None:
        """Traced steps are slower, so they count neither as steps nor as waits."""
        n = len(self.series["ms"])
        usual = n not in (TIMED, HELD)
        self.series["ms"].append(spent * 1e3 if usual else self.series["ms"][-1])
        self.series["wait_ms"].append(waited * 1e3)
        self.series["loss"].append(loss)
        self.series["lr"].append(float(self.step.optimizer.param_groups[0]["lr"]))
        if n == HELD:
            self.measured = self._seen()
        if self.rank == 0:
            self._tell(n)

    def _tell(self, n: int) -> None:
        if self.printer is not None and n >= REPORTED_AFTER and self.printer.due():
            self.printer.report(self.run())
        if self.folder is not None and (n == HELD or time.monotonic() - self._wrote > OFTEN):
            self._wrote = time.monotonic()
            self.run().save(self.folder)

    def close(self) -> None:
        """Write what there is, with the plans that were not taken. Called at the end of the process, if not before."""
        atexit.unregister(self.close)
        if self.printer is not None and not self.printer.last and self.series["ms"]:
            self.printer.report(self.run())
        if self.rank == 0 and self.folder is not None and self.series["ms"]:
            if not self.alternatives and self.cluster is not None and len(self.step.program.nodes) < LARGE:
                self.alternatives = _others(self.step, self.cluster) if self.staged is None else _other_schedules(self.step, self.staged)
            self.run().save(self.folder)

    def run(self) -> Run:
        """The run so far."""
        step, program = self.step, self.step.program
        peak = self.cluster.device.peak(main_dtype(step.captured.program)) * program.mesh.ranks if self.cluster is not None else 0.0
        made = Run(
            name=step.captured.program.name, kind="training", plan=str(step.plan), machine=_machine(step),
            cluster=self.cluster.text if self.cluster is not None else "", mesh=dict(program.mesh.sizes), peak_flops=peak,
            steps={k: [round(x, 4) for x in v] for k, v in self.series.items()}, predicted=self.predicted, measured=self.measured,
            alternatives=self.alternatives, schedule=_rounds(program), **self._about(),
        )  # fmt: skip
        return Run(**{**made.__dict__, "says": list(partings(made))})

    def _about(self) -> dict[str, Any]:
        """What the programs of a step are."""
        step, program, parts = self.step, self.step.program, self.step.micro_batches
        unit, per_step = taken(step.captured.program)
        many = step.plan.micro_batches if parts is not None else 1
        made = {
            "unit": unit, "per_step": many * per_step, "flops": many * model_flops(step.captured.program),
            "tensors": [*tensors_of_stages(parts), *tensors(program, step.captured.states)],
        }  # fmt: skip
        if parts is None:
            shown = [*verbs(program, step.source), *_checked(step)]
            return made | {"program": digest(program.text), "communication": communication(program), "verbs": [*rewrite_rules_used(step.moves), *shown]}
        shown = [*rewrite_rules_used(step.moves), split(many, step.plan.virtual_stages)]
        return made | {"program": digest(parts.pipeline.text), "communication": communication_of_stages(parts), "verbs": shown}

    def _predict(self) -> Seen | None:
        if self.cluster is None:
            return None
        return self.staged.seen if self.staged is not None else predict(self.step.program, self.cluster, above=bands)

    def _seen(self) -> Seen:
        """The traced step: statements as tasks, and bytes at the times the same statements had in the step before; of stages every pass."""
        timed, counted = self._traces.pop(TIMED), self._traces.pop(HELD)
        if self.step.micro_batches is not None:
            return seen_of_stages(self.step, timed, counted, self.staged)
        trace = timed.update
        line, causes = measured_line(self.step.program, trace, last_starts(self.step, trace))
        times = [*trace.began, trace.ended[-1]]
        memory = [(t, float(b)) for t, b in zip(times, counted.update.bytes_in_use, strict=True)]
        return Seen(trace.ended[-1] * 1e3, max(counted.update.bytes_in_use) / 1e9, causes, line, memory)


def _cluster(step: Step, text: str) -> Cluster | None:
    """Where the step is predicted: as given, else this machine as `plan="auto"` sees it; None where there is no profile for it."""
    if text:
        return with_doubles(read_cluster(text))
    try:
        return with_doubles(here(step.program.mesh.ranks, step.compiled.device))
    except WeftError:
        return None


def _rounds(program: Program) -> dict[str, Any]:
    """How rank 0's samples of the first dynamic model ran in the last step."""
    return next((RUNNERS[n.attr("runner")].shown() for n in program.nodes if n.op is rounds), {})


def _machine(step: Step) -> str:
    """The hardware, and how steps run on it where that is not as they are traced."""
    how = getattr(step.compiled, "how", "node by node")
    return describe(step.compiled.device) + (f"; steps run as {how}, the traced ones node by node" if how != "node by node" else "")


def _checked(step: Step) -> list[dict[str, Any]]:
    """What the check of the plan found before the first step, where it was asked for."""
    report = getattr(step, "report", None)
    return [] if report is None else [{"step": "check the full step", "same": report.equal, "said": f"Against the captured model: {report}."}]


# --- what else could have been


def _others(step: Step, cluster: Cluster) -> list[dict[str, Any]]:
    """The other plans for these ranks, by name, each predicted as it would run."""
    plans = list(words(step.captured, cluster.devices))[:MOST]
    return _priced({str(named): lambda named=named: predict(prepare(step.captured, named), cluster) for named in plans})  # type: ignore[misc]


def _other_schedules(step: Step, own: StagedStep) -> list[dict[str, Any]]:
    """The other schedules for the same degrees."""
    plan, parts = step.plan, cast("MicroBatches", step.micro_batches)

    def seen(other: Spec) -> Seen:
        checked = Spec.parse(str(other))
        return staged(parts.under_plan(checked), checked, own.cluster).seen

    others = (replace(plan, schedule=name, virtual=0, micro=plan.micro_batches) for name in SCHEDULES if plan.pp > 1 and name != plan.schedule)
    return _priced({str(plan): lambda: own.seen, **{str(other): partial(seen, other) for other in others}})


def _priced(plans: Mapping[str, Callable[[], Seen]]) -> list[dict[str, Any]]:
    """Each plan with what is predicted of it, or why it cannot be had."""
    found = []
    for name, seen in plans.items():
        try:
            found.append(Option.of(name, seen()))
        except WeftError as e:
            found.append(Option(name, reason=e.message))
    return [o.data() for o in found]
