"""A plan as facts for a page: its step is predicted again, its model captured with few layers, its decisions explained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.core.errors import WeftError
from weft.cost.interval import NOT_MODELLED, spread
from weft.cost.pipeline import kept_over
from weft.plan.memory import kept
from weft.plan.named import input_layouts
from weft.plan.phase import LayerRun
from weft.plan.place import place
from weft.plan.plan import Plan
from weft.plan.planner import EXACT, search_of
from weft.plan.search import describe
from weft.plan.setting import Setting
from weft.plan.simulate import SimulatedStep, detail
from weft.plan.spec import Spec
from weft.plan.stage_partitioner import staged
from weft.plan.summaries import rows
from weft.plan.workload import Workload
from weft.report.facts import Curve, Facts, Figure, View
from weft.report.words import count, ms, percent

Say = Callable[[str], None]


def figures(plan: Plan) -> list[Figure]:
    """What the plan promises."""
    f, b = plan.predicted, plan.bounds()
    best = min(plan.baselines_ms.items(), key=lambda item: item[1], default=None)
    made = [
        Figure("step, predicted", ms(f["step_ms"]), f"{ms(b['step_ms_low'])} to {ms(b['step_ms_high'])}: the {spread(plan.kind)}"),
        Figure("global batch", f"{plan.setting.global_batch:,}", f"of {plan.seq:,} tokens" * (plan.seq > 0)),
        Figure(
            "tokens per second" if plan.seq else "samples per second", count(f["tokens_per_s"]),
            f"{count(b['tokens_per_s_low'])} to {count(b['tokens_per_s_high'])}",
        ),
        Figure("MFU", percent(f["mfu"]), f"{percent(b['mfu_low'])} to {percent(b['mfu_high'])}"),
        Figure("memory per device", f"{f['memory_gb']:.1f} GB", f"{b['memory_gb_low']:.1f} to {b['memory_gb_high']:.1f} GB"),
    ]  # fmt: skip
    if best is not None:
        made.append(Figure("best other system", ms(best[1]), f"{best[0]}, {best[1] / f['step_ms'] - 1:+.0%}"))
    return made


def of_plan(plan: Plan, explained: bool = True, progress: Say = lambda _: None, run_model: bool = False) -> Facts:
    """Everything a page tells of a plan."""
    base = Facts(
        title=f"{name_of(plan)} on {plan.cluster}",
        about=f"A plan by weft: {describe(plan.setting)}. Nothing here was measured; all of it is predicted; {NOT_MODELLED}.",
        figures=figures(plan), plan=list(rows(plan)), mesh=_mesh(plan.setting), alternatives=list(_alternatives(plan)), chosen="this plan",
    )  # fmt: skip
    if not plan.is_stack:
        from weft.report.of_captured import of_captured

        progress("the program")
        made = replace(base, **{"causes_ms": _causes(plan), **of_captured(plan, run_model)})
        return replace(made, reasons=_reasons(plan, progress, run_model)) if explained and not made.says else made  # of a model that is still the one planned
    plan.require_may_run(run_model)
    progress("the model")
    made = replace(base, **_model(plan))
    if plan.setting.shares:
        return replace(made, memory_note="Copies of unequal devices take unequal shares; their step is not drawn.")
    progress("the step")
    made = replace(made, **_step(plan))
    if explained:
        made = replace(made, reasons=_reasons(plan, progress, run_model))
    return made


def _reasons(plan: Plan, progress: Say, run_model: bool = False) -> list[dict[str, Any]]:
    from weft.plan.explain import explain

    return [r.data() for r in explain(plan, lambda text: progress(f"what else for {text}"), run_model)]


def name_of(plan: Plan) -> str:
    """A model by its name; one of a file without the folders before it."""
    return plan.model.rpartition("/")[2] if ":" in plan.model else plan.model


def _causes(plan: Plan) -> dict[str, dict[str, float]]:
    causes = {k: v for k, v in (plan.predicted.get("causes_ms") or {}).items() if v > 0}
    return {"predicted": causes} if causes else {}


def _mesh(s: Setting) -> dict[str, int]:
    return {a: getattr(s, a) for a in ("dp", "pp", "cp", "ep", "tp") if getattr(s, a) > 1} or {"dp": 1}


def _alternatives(plan: Plan) -> Iterator[dict[str, Any]]:
    yield {"plan": "this plan", "step_ms": plan.step_ms, "memory_gb": plan.predicted["memory_gb"], "reason": ""}
    for name, took in plan.baselines_ms.items():
        yield {"plan": name, "step_ms": took, "memory_gb": None, "reason": ""}
    for name, reason in plan.infeasible.items():
        yield {"plan": name, "step_ms": None, "memory_gb": None, "reason": reason}


# --- the model


def _model(plan: Plan) -> dict[str, Any]:
    """Tensors of the model and how they are laid out, placed as the plan says: of one known by its sizes two layers, since all are the same."""
    from weft.frontend.catalog import few_layers
    from weft.frontend.source import load

    sizes = few_layers(plan.model, seq=plan.seq)
    given = {"seq": plan.seq} if plan.seq and plan.model.startswith("hf:") else {}
    made = load(plan.model, device="meta", **(sizes.settings if sizes else given))
    layers, few = (sizes.of, sizes.layers) if sizes else (1, 1)
    try:
        placed = _placed(plan, made)
    except WeftError as error:
        return {"says": [f"The layouts of single tensors are not drawn: {error.message}."]}
    stages = _stages(plan.setting) if plan.setting.pp > 1 else []
    return {**placed, "repeats": layers / few, "stages": stages}


def _stages(s: Setting) -> list[float]:
    """Layers of each stage, its chunks together."""
    places = s.pipeline.places(s.pp, s.chunks)
    return [sum(n for n, g in zip(s.layers, places, strict=True) if g % s.pp == i) for i in range(s.pp)]


def _placed(plan: Plan, w: Any) -> dict[str, Any]:
    """One micro-batch on the mesh of one stage."""
    import torch

    from weft.api.program_facts import communication, tensors, verbs
    from weft.frontend.capture import capture

    s = plan.setting
    optimizer = torch.optim.AdamW(w.model.parameters())
    captured = capture(w.model, w.example(s.replicas * s.micro_batch, device="meta"), w.loss, optimizer)
    named = Spec(s.dp, s.cp, s.ep, s.tp, s.zero, s.sp and s.tp > 1)
    program = place(captured.program, named.mesh, *input_layouts(captured.program, named, captured.states))
    mesh = {"pp": s.pp, **named.mesh.sizes} if s.pp > 1 else dict(named.mesh.sizes)
    stored = tensors(program, captured.states)
    return {"tensors": stored, "mesh": mesh, "communication": communication(program), "program": program,
            "verbs": verbs(program, captured.program)}  # fmt: skip


# --- the step


def _step(plan: Plan) -> dict[str, Any]:
    search, setting, note = search_of(plan), plan.setting, ""
    if setting.virtual_stages * setting.micro_batches > EXACT:
        few = 2 * setting.pp
        note = f"The first {few} of {setting.micro_batches:,} micro-batches; the rest repeats them."
        setting = setting.in_micro_batches(few)
    step = search.step(setting)
    views = [View("the full step", {"predicted": step.timeline}, note)]
    for title, line in detail(search.work(setting), setting, search.cluster).items():
        views.append(View(title, {"predicted": line}, "Op by op: what the host issues, the device computes and the links carry."))
    worst = max(range(len(step.memory)), key=lambda i: step.memory[i].total)
    curves = list(_memory(setting, step, _sizes(search.work(setting), setting), worst))
    where = f"stage {worst}, the fullest of {setting.pp}" if setting.pp > 1 else "a device"
    return {
        "views": views, "causes_ms": _causes(plan), "memory": curves, "budget": search.memory,
        "memory_note": f"Of {where}. {note}".strip(),
    }  # fmt: skip


def _sizes(work: Workload, s: Setting) -> list[float]:
    """Bytes that a forward of each virtual stage keeps for its backward."""
    stages = staged(work, s).stages or (((work.first, 1), *work.layers(0, work.depth), (work.last, 1)),)
    return [kept(s, [LayerRun(*run) for run in stage]) for stage in stages]


def _memory(s: Setting, step: SimulatedStep, sizes: Sequence[float], stage: int) -> Iterator[Curve]:
    """What is in memory all the time, activations as passes come and go, buffers of the pass at work, and the safety margin."""
    m, end = step.memory[stage], step.seconds
    for name, stored in (("parameters", m.params), ("gradients", m.grads), ("optimizer", m.optimizer), ("buffers", m.buffers)):
        if stored:
            yield Curve(name, [(0.0, stored), (end, stored)], stacked=True)
    yield Curve("activations", _activations(s, step, sizes, stage), stacked=True)
    yield Curve("temporaries", _passing(step, stage, m.temporaries), stacked=True)
    yield Curve("safety margin", [(0.0, m.total - m.allocated), (end, m.total - m.allocated)], stacked=True)


def _activations(s: Setting, step: SimulatedStep, sizes: Sequence[float], stage: int) -> list[tuple[float, float]]:
    """A forward adds what its backward will need; that backward frees it."""
    line, points = step.timeline, [(0.0, 0.0)]
    order = s.pipeline.orders(s.pp, s.micro_batches, s.chunks)[stage]
    for i, (kind, *_), now in kept_over(line, stage, order, sizes[stage :: s.pp]):
        points.append((line.start[i] if kind == "forward" else line.end[i], now))
    return [*points, (step.seconds, now)]


def _passing(step: SimulatedStep, stage: int, stored: float) -> list[tuple[float, float]]:
    """The largest buffers of a pass, while one runs."""
    line, points = step.timeline, [(0.0, 0.0)]
    for i in sorted(line.on(f"stage {stage}"), key=line.start.__getitem__):
        if line.tasks[i].cause in ("forward", "backward", "weight"):
            points += [(line.start[i], stored), (line.end[i], 0.0)]
    return [*points, (step.seconds, 0.0)]
