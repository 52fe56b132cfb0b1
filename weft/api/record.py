"""What a training step writes about itself: per-step times, one step traced, one with its memory counted, next to what was predicted.

    step = weft.parallelize(..., record="run/")        # then train as always; `weft report run/` shows it

Recording waits for the device after every step. The fourth step is traced, the fifth counts memory; both train as the others do.
"""

from __future__ import annotations

import atexit
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weft.api.bands import Span, bands, labelled, params_of
from weft.cluster.spec import Cluster
from weft.cluster.spec import cluster as read_cluster
from weft.core.errors import WeftError
from weft.core.node import DTYPE_NAMES, Node
from weft.core.program import Group, Program
from weft.core.role import Role
from weft.core.text import node_names
from weft.cost.simulate import cause_of, predict
from weft.cost.timeline import Seen, Task, Timeline
from weft.cost.work import DTYPES, Collective, records
from weft.ops.registry import Kind, flops
from weft.ops.rounds import RUNNERS, rounds
from weft.record.progress import Printer, partings
from weft.record.run import Run
from weft.rewrite.engine import same_erased
from weft.runtime.agree import from_all, rank, world
from weft.runtime.machine import describe
from weft.runtime.trace import Trace, synchronize, traced

if TYPE_CHECKING:
    from weft.api.step import Step

TIMED, HELD = 3, 4  # the steps, counted from 0, that are traced
SAID = 9  # the step after which there is enough to speak of
OFTEN = 5.0  # seconds between two writes of the file
PROVED = "A proved rule: both sides have the same values."
MOST, LARGE = 12, 4000  # plans predicted for comparison, and nodes of a program from which none are


class Recorder:
    """Watches the calls of one step. Every rank keeps one, so that all trace the same steps; rank 0 writes."""

    def __init__(self, step: Step, folder: str | Path | None, cluster: str = "", progress: bool = True) -> None:
        self.step, self.folder = step, folder
        self.rank = rank()
        self.printer = Printer() if progress and self.rank == 0 else None
        self.series: dict[str, list[float]] = {"ms": [], "wait_ms": [], "loss": [], "lr": [], "grad_norm": []}
        self.cluster = _cluster(step, cluster)
        self.predicted = self._predict(self.cluster) if self.cluster is not None else None
        self.measured: Seen | None = None
        self.alternatives: list[dict[str, Any]] = _options(getattr(step, "decision", None))
        self._traces: dict[int, Trace] = {}
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
        compiled = self.step.compiled
        plain = compiled._step
        if dist.is_initialized():
            dist.barrier()  # the clocks of all ranks begin here
        compiled._step, self._traces[n] = traced(plain, compiled.code.text, compiled.device, memory=n == HELD)
        try:
            return self.step.run(given, state)
        finally:
            compiled._step = plain

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
        if self.printer is not None and n >= SAID and self.printer.due():
            self.printer.say(self.run())
        if self.folder is not None and (n == HELD or time.monotonic() - self._wrote > OFTEN):
            self._wrote = time.monotonic()
            self.run().save(self.folder)

    def close(self) -> None:
        """Write what there is, with the plans that were not taken. Called at the end of the process, if not before."""
        atexit.unregister(self.close)
        if self.printer is not None and not self.printer.last and self.series["ms"]:
            self.printer.say(self.run())
        if self.rank == 0 and self.folder is not None and self.series["ms"]:
            if not self.alternatives and self.cluster is not None and len(self.step.program.nodes) < LARGE:
                self.alternatives = self._others(self.cluster)
            self.run().save(self.folder)

    def run(self) -> Run:
        """The run so far."""
        step, program = self.step, self.step.program
        peak = self.cluster.device.peak(_main_dtype(step.captured.program)) * program.mesh.ranks if self.cluster is not None else 0.0
        made = Run(
            name=step.captured.program.name, kind="training", plan=str(step.plan), machine=_machine(step),
            cluster=self.cluster.text if self.cluster is not None else "", mesh=dict(program.mesh.sizes), peak_flops=peak,
            steps={k: [round(x, 4) for x in v] for k, v in self.series.items()}, predicted=self.predicted, measured=self.measured,
            alternatives=self.alternatives, schedule=_rounds(program), **self._about(),
        )  # fmt: skip
        return Run(**{**made.__dict__, "says": list(partings(made))})

    def _about(self) -> dict[str, Any]:
        """What the program of a step is."""
        step, program = self.step, self.step.program
        unit, per_step = _taken(program)
        return {
            "program": digest(program), "unit": unit, "per_step": per_step, "flops": model_flops(step.captured.program),
            "tensors": tensors(program, step.captured.states), "communication": communication(program),
            "verbs": [*rewrite_rules_used(step.moves), *verbs(program, step.source), *_checked(step)],
        }  # fmt: skip

    def _predict(self, cluster: Cluster) -> Seen:
        return predict(self.step.program, cluster, above=bands)

    def _others(self, cluster: Cluster) -> list[dict[str, Any]]:
        return _others(self.step, cluster)

    def _seen(self) -> Seen:
        """The traced step: statements as tasks, and bytes at the times the same statements had in the step before."""
        timed, memory_trace = self._traces.pop(TIMED), self._traces.pop(HELD)
        line, causes = measured_line(self.step.program, timed, last_starts(self.step, timed))
        times = [*timed.began, timed.ended[-1]]
        memory = [(t, float(b)) for t, b in zip(times, memory_trace.held, strict=True)]
        return Seen(timed.ended[-1] * 1e3, max(memory_trace.held) / 1e9, causes, line, memory)


def _cluster(step: Step, text: str) -> Cluster | None:
    """Where the step is predicted: as given, else this machine as `plan="auto"` sees it; None where there is no profile for it."""
    from weft.api.auto import here, with_doubles

    if text:
        return with_doubles(read_cluster(text))
    try:
        return with_doubles(here(step.program.mesh.ranks, step.compiled.device))
    except WeftError:
        return None


def _rounds(program: Program) -> dict[str, Any]:
    """How rank 0's samples of the first dynamic model ran in the last step."""
    return next((RUNNERS[n.attr("runner")].shown() for n in program.nodes if n.op is rounds), {})


def digest(program: Program) -> str:
    """A short name for a program: equal texts, equal names."""
    return hashlib.sha256(program.text.encode()).hexdigest()[:16]


# --- what a program is, as data


KINDS = {Role.PARAMETER: "param", Role.BUFFER: "buffer", Role.BATCH: "batch"}


def tensors(program: Program, states: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every input that a rank has: what it is, and along which axes it is sharded."""
    found = []
    for name, node in program.input_names.items():
        role = "state" if name in states else KINDS.get(node.role)
        places = {a: str(p) for a, p in node.layout.placements.items() if str(p) != "R"}
        local = list(node.layout.largest_local)
        if role is not None:
            found.append(
                {"name": name.partition(".")[2], "role": role, "shape": list(node.shape), "local": local, "dtype": DTYPE_NAMES[node.dtype], "places": places}
            )
    return found


def communication(program: Program) -> list[dict[str, Any]]:
    """Collectives by kind and axis, with how many there are and the bytes of their tensors."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for op in records(program):
        if isinstance(op, Collective):
            count[op.kind, op.axis] += 1
            size[op.kind, op.axis] += round(op.bytes)
    return [{"kind": kind, "axis": axis, "count": n, "bytes": size[kind, axis]} for (kind, axis), n in count.most_common()]


def model_flops(program: Program) -> float:
    """Of one step on one device: matmuls and ops kept in one piece, forward and backward."""
    return sum(flops(n) for n in program.nodes if n.op.kind in (Kind.CONTRACT, Kind.WHOLE))


def _main_dtype(program: Program) -> str:
    work: Counter[str] = Counter()
    for n in program.nodes:
        if n.op.kind is Kind.CONTRACT:
            work[DTYPES.get(DTYPE_NAMES[n.types[0].dtype], "fp32")] += round(flops(n))
    return work.most_common(1)[0][0] if work else "fp32"


def _taken(program: Program) -> tuple[str, float]:
    """Tokens where a batch has rows of integers, else samples."""
    batch = [n for n in program.inputs_for(Role.BATCH).values() if n.ndim]
    words = [n for n in batch if n.ndim == 2 and not n.dtype.is_floating_point]
    if words:
        return "tokens", float(words[0].shape[0] * words[0].shape[1])
    return "samples", float(batch[0].shape[0] if batch else 1)


def verbs(program: Program, captured: Program) -> list[dict[str, Any]]:
    """The steps that led to a program, each with whether it leaves what one device would run as it is, node for node."""
    found: list[dict[str, Any]] = []
    while program.parent is not None:
        if program.step:
            found.append({"step": program.step, "same": same_erased(program.parent, program)})
        program = program.parent
    words = ", ".join(f"{a} {n}" for a, n in program.mesh.sizes.items())
    placed = {"step": f"place on {words}", "same": same_erased(captured, program)}
    return [placed, *reversed(found)]


def _machine(step: Step) -> str:
    """The hardware, and how steps run on it where that is not as they are traced."""
    how = getattr(step.compiled, "how", "node by node")
    return describe(step.compiled.device) + (f"; steps run as {how}, the traced ones node by node" if how != "node by node" else "")


def rewrite_rules_used(moves: Sequence[str]) -> list[dict[str, Any]]:
    """The uses of rules by which a plan rewrote a step."""
    return [{"step": words, "same": False, "rule": words.split(" ")[0], "said": PROVED} for words in moves]


def _checked(step: Step) -> list[dict[str, Any]]:
    """What the check of the plan found before the first step, where it was asked for."""
    report = getattr(step, "report", None)
    return [] if report is None else [{"step": "check the full step", "same": report.equal, "said": f"Against the captured model: {report}."}]


# --- the traced step


def measured_line(program: Program, trace: Trace, starts: Mapping[str, float] | None = None) -> tuple[Timeline, dict[str, float]]:
    """Statements of the rank; a collective is in flight from its start until the rank waits for it, then exposed. Above them phases and layers.

    `starts` says when the last rank started each collective: until then this one waits for the others, and no byte moves."""
    units, causes, params = _by_variable(program), dict[str, float](), params_of(program)
    tasks: list[tuple[Task, float]] = []
    started: dict[str, tuple[float, str, str]] = {}
    spans: list[Span] = []

    def add(name: str, stream: str, cause: str, began: float, ended: float) -> None:
        if stream == "compute":
            causes[cause] = causes.get(cause, 0.0) + (ended - began) * 1e3
        if ended > began or stream == "compute":
            tasks.append((Task(name, stream, ended - began, (), cause), began))

    for statement, began, ended in zip(trace.statements, trace.began, trace.ended, strict=True):
        unit = units.get(statement.text.partition("(")[0]) or units.get(statement.made)
        name, cause = (labelled(unit, params), cause_of(unit)) if unit is not None else (statement.text[:40], "compute")
        spans.append((unit, began, ended))
        late = min(max(began, (starts or {}).get(statement.made, 0.0)), ended) if statement.axis or statement.waits else began
        if statement.axis:
            started[statement.made], cause = (ended, name, statement.axis), statement.axis
        elif statement.waits and statement.made in started:
            start, name, cause = started.pop(statement.made)
            add(name, "communication", "in flight", start, began)
            add(name, "communication", cause, max(late, start), ended)
            name = f"wait for {name}"
        if late > began:
            add(f"wait for other ranks: {name}", "compute", "peers", began, late)
        add(name, "compute", cause, late, ended)
    tasks += bands(program, spans)
    return arranged(tasks), {k: v for k, v in causes.items() if v > 0}


def arranged(tasks: Sequence[tuple[Task, float]]) -> Timeline:
    """Tasks with their starts as a timeline, bands first."""
    order = sorted(tasks, key=lambda item: (item[1], {"phase": 0, "layer": 1}.get(item[0].stream, 2)))
    return Timeline(tuple(t for t, _ in order), tuple(b for _, b in order), tuple(b + t.seconds for t, b in order))


def last_starts(step: Step, trace: Trace, after: float = 0.0) -> dict[str, float]:
    """When the last of its ranks started each collective of the traced step, by the name it binds. All ranks must ask.

    Their clocks began where all met before the step, the trace's `after` seconds later. Nothing is said where ranks run different statements."""
    own = {s.made: (s.axis, after + began) for s, began in zip(trace.statements, trace.began, strict=True) if s.axis}
    if world() == 1:
        return {}
    every = from_all((step.compiled.coords, own))
    mine = step.compiled.coords
    found: dict[str, float] = {}
    for name, (axis, _) in own.items():
        peers = [theirs for coords, theirs in every if all(coords[a] == mine[a] for a in mine if a != axis)]
        if all(theirs.get(name, ("", 0.0))[0] == axis for theirs in peers):
            found[name] = max(theirs[name][1] for theirs in peers) - after
    return found


def _by_variable(program: Program) -> dict[str, Node | Group]:
    """What each variable of the generated code stands for: a node, or the group it is in. A group's kernel has its name."""
    grouped = {n: g for g in program.groups for n in g.nodes}
    named = {g.name: g for g in program.groups if g.kind == "fuse"}
    return {**named, **{f"t{name[1:]}": grouped.get(n, n) for n, name in node_names(program).items() if name[1:2].isdigit()}}


# --- what else could have been


def _options(decision: Any) -> list[dict[str, Any]]:
    return [o.data() for o in getattr(decision, "options", ())]


def _others(step: Step, cluster: Cluster) -> list[dict[str, Any]]:
    """The other plans for these ranks, by name, each predicted as it would run."""
    from weft.api.auto import prepare, words

    plans = list(words(step.captured, cluster.devices))[:MOST]
    return options_of({str(named): lambda named=named: predict(prepare(step.captured, named), cluster) for named in plans})  # type: ignore[misc]


def options_of(plans: Mapping[str, Callable[[], Seen]]) -> list[dict[str, Any]]:
    """Each plan with what is predicted of it, or why it cannot be had."""
    from weft.api.auto import Option

    found = []
    for name, seen in plans.items():
        try:
            found.append(Option.of(name, seen()))
        except WeftError as e:
            found.append(Option(name, reason=e.message))
    return [o.data() for o in found]
