"""A run as facts for a page: what was measured next to what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.cluster.spec import cluster
from weft.core.errors import WeftError
from weft.cost.timeline import Seen
from weft.plan.plan import ZERO
from weft.plan.schedules import PLAIN, SCHEDULES
from weft.plan.spec import AGAIN
from weft.record.run import Run
from weft.report.facts import Curve, Facts, Figure, View
from weft.report.words import count, ms, percent, size


def of_run(run: Run) -> Facts:
    """Everything a page tells of a run."""
    measured = run.measured.lasting(run.step_ms) if run.measured is not None and run.measured.step_ms and run.step_ms else run.measured
    seen = {"predicted": run.predicted, "measured": measured}
    known: dict[str, Seen] = {k: v for k, v in seen.items() if v is not None}
    ranks = " × ".join(f"{a} {n}" for a, n in run.mesh.items())
    steps = len(run.steps.get("ms", ()))
    about = f"{steps:,} steps under {run.plan} on {ranks} ({run.machine})."
    if run.kind == "dynamic":
        about = f"{steps:,} steps on graphs, {run.schedule.get('samples', 0):,} samples at a time ({run.machine})."
    return Facts(
        title=f"{run.name}, trained", about=about, figures=list(_figures(run)), plan=list(_plan(run)), says=list(run.says), mesh=run.mesh,
        tensors=run.tensors, communication=run.communication, views=_views(run, known),
        causes_ms={k: v.causes_ms for k, v in known.items() if v.causes_ms}, memory=[Curve(k, v.memory) for k, v in known.items() if v.memory],
        budget=_budget(run), memory_note=_memory_note(run), alternatives=run.alternatives, chosen=run.plan, verbs=run.verbs,
        schedule=run.schedule, steps=run.steps, unit=run.unit,
    )  # fmt: skip


def _figures(run: Run) -> Any:
    p, m = run.predicted, run.measured
    off = f"predicted {ms(p.step_ms)}, {run.step_ms / p.step_ms - 1:+.0%}" if p is not None and p.step_ms else ""
    yield Figure("step, measured", ms(run.step_ms), off)
    yield Figure(f"{run.unit} per second", count(run.per_second), f"{count(run.per_step)} a step")
    if run.mfu is not None:
        yield Figure("MFU", percent(run.mfu), f"of {run.peak_flops / 1e9:,.0f} GFLOP/s")
    if m is not None and m.memory_gb:
        note = f"predicted {size(p.memory_gb * 1e9)}, {m.memory_gb / p.memory_gb - 1:+.0%}" if p is not None and p.memory_gb else ""
        yield Figure("memory of a rank", size(m.memory_gb * 1e9), note)
    loss = run.steps.get("loss") or ()
    if len(loss) > 1:
        yield Figure("loss", f"{loss[-1]:.4g}", f"from {loss[0]:.4g}")


def _plan(run: Run) -> Any:
    """The words of the plan, each with what it means, and what the run was made on."""
    for axis, n in run.mesh.items():
        if n > 1:
            yield axis, str(n), {"dp": "data-parallel replicas", "tp": "tensor parallelism", "cp": "context parallelism",
                                 "ep": "expert parallelism", "pp": "pipeline stages"}.get(axis, "ranks")  # fmt: skip
    words = run.plan.split(",")
    yield from _passes(run, words)
    level = next((int(w[4:]) for w in words if w.startswith("zero")), None)
    if level is not None:
        yield "sharded", f"zero{level}", f"{ZERO[level]} sharded over replicas"
    if "sp" in words:
        yield "sequence parallel", "sp", "activations between TP regions sharded along the sequence"
    if rules := run.rules:
        yield "rules", ", ".join(rules), "the step rewritten by proved rules"
    if run.schedule:
        yield from _batching(run.schedule)
    if run.per_step:
        yield "a step", count(run.per_step), run.unit
    if run.flops:
        yield "work of a step", f"{run.flops / 1e9:,.1f} GFLOP", "forward and backward, as MFU counts it"
    if run.cluster:
        yield "predicted on", run.cluster, "the profile that priced it"


def _passes(run: Run, words: Sequence[str]) -> Any:
    """How a step is split into passes, where it is."""
    if run.mesh.get("pp", 1) > 1:
        yield "schedule", next((w for w in SCHEDULES if w in words), PLAIN), "the order in which stages take up their passes"
    passes = [t.name for t in run.measured.line.tasks if t.stream == "stage 0" and t.cause == "forward"] if run.measured is not None else []
    if passes:
        yield "micro-batches", str(len({name.split()[1] for name in passes})), "each goes through all stages; their gradients add up"
    for word in (w for w in words if w in AGAIN):
        kept = "only the inputs of blocks are kept, the rest is recomputed" if AGAIN[word] == "full" else "recomputed, part of every block"
        yield "recompute", "blocks" if AGAIN[word] == "full" else AGAIN[word], kept


def _batching(schedule: Mapping[str, Any]) -> Any:
    least, batches = schedule["least"], schedule["batches"]
    yield "policy", schedule["policy"], "what decides which vertices run together"
    yield "batches", f"{batches:,}", "the fewest possible" if batches == least else f"at least {least:,} are needed"
    yield "rows a batch", f"{schedule['vertices'] / max(1, batches):,.1f}", "vertices of one class that run together, on average"


def _views(run: Run, known: dict[str, Seen]) -> list[View]:
    lines = {k: v.line for k, v in known.items() if v.line.tasks}
    note = "One traced step of rank 0. A collective is pale while it is overlapped and solid while its bytes are waited for; "
    note += "waiting for ranks that start it later is shown apart."
    if run.kind == "dynamic":
        note = "One traced step, batch by batch."
    elif "stage 0" in {t.stream for line in lines.values() for t in line.tasks}:
        note = "One traced step, pass by pass, on all stages."
    if run.measured is not None and run.step_ms and abs(run.measured.step_ms / run.step_ms - 1) > 0.05:
        note += f" The traced step took {ms(run.measured.step_ms)}; it is drawn as long as the median of the others, {ms(run.step_ms)}."
    return [View("one step", lines, note)] if lines else []


def _budget(run: Run) -> float:
    try:
        return cluster(run.cluster).device.memory if run.cluster else 0.0
    except WeftError:
        return 0.0


def _memory_note(run: Run) -> str:
    if run.measured is None or not run.measured.memory:
        return ""
    budget = _budget(run)
    room = f" The rank may use {size(budget)}." if budget else ""
    where = "the stage predicted to be fullest" if run.mesh.get("pp", 1) > 1 else "rank 0"
    return f"Parameters, optimizer state and values that the step can still reach, on {where}, at each statement.{room}"
