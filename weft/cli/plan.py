"""`weft plan MODEL --cluster SPEC`: the best strategy found for a training step, next to what other systems would do."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import CLUSTER, IMBALANCE, console, count, emit, results, writable

if TYPE_CHECKING:
    from rich.console import Console

    from weft.plan.plan import Plan
    from weft.plan.planner import Infeasible, Request


def plan(
    model: str = typer.Argument(
        ...,
        help="A known name such as llama3-8b, hf:FOLDER with a Hugging Face config.json, or FILE.py:FUNCTION that returns (model, loss, batch).",
    ),
    cluster: str = CLUSTER,
    batch: int = typer.Option(
        0, "--batch", callback=count, help="Global batch in samples.", show_default="about 4M tokens; for FILE.py:FUNCTION its batch on every device"
    ),
    seq: int = typer.Option(0, "--seq", callback=count, help="Sequence length.", show_default="the model's"),
    objective: str = typer.Option(
        "time", "--objective", help="Minimise time (step time), memory or cost (device time per token), or maximise goodput."
    ),
    noise: float = typer.Option(0.0, "--noise", help="Gradient noise scale in samples (step.noise.scale), for goodput.", show_default=False),
    max_tp: int = typer.Option(0, "--max-tp", help="Largest tensor-parallel degree to consider.", show_default="no limit"),
    memory: str = typer.Option("", "--memory", help="Memory of a device that may be used, such as 70GB.", show_default="all"),
    pin: list[str] = typer.Option(
        [], "--pin", help='Fix a decision, such as tp=4, or a layout, such as "blocks.*.mlp.up=tp:S(0)". Repeatable.'
    ),
    dtensor: str = typer.Option(
        "", "--dtensor", help="JSON file {module: colwise or rowwise}, as for torch's parallelize_module, that fixes layouts."
    ),
    what_if: list[str] = typer.Option(
        [], "--what-if", help="Also plan with cluster=SPEC, batch=N, seq=N, memory=70GB or imbalance=1.5 changed. Repeatable."
    ),
    fastest: bool = typer.Option(
        False, "--fastest", help="Take the fastest prediction even if a simpler plan is equal within the prediction error."
    ),
    imbalance: float = typer.Option(1.0, "--imbalance", help=IMBALANCE),
    out: str = typer.Option("", "-o", "--out", "--save", help="Save the plan to this file."),
    export: str = typer.Option(
        "", "--export", help="Print the plan as the configuration of torchtitan, megatron, fsdp2, accelerate, huggingface or deepspeed."
    ),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Find the fastest plan of a training step: parallel degrees, sharding, recompute and pipeline schedule, searched together."""
    from weft.plan.ask import Ask
    from weft.plan.pins import is_layout
    from weft.plan.plan import Plan
    from weft.plan.planner import Request
    from weft.plan.space import Limits, bytes_of, parse_pins

    began = time.perf_counter()
    writable(out)
    if export:
        from weft.plan.export import known_form

        known_form(export)
    limits = Limits(max_tp, bytes_of(memory) if memory else 0.0, parse_pins([p for p in pin if not is_layout(p)]))
    request = Request(model, cluster, batch, seq, objective, limits, fastest, imbalance=imbalance)
    changes = [changed(request, text) for text in what_if]  # refuse bad ones before the work
    ask = Ask([p for p in pin if is_layout(p)], read_dtensor(dtensor) if dtensor else None, noise)
    with console.status("planning") as status:
        made = ask.plan(request, status.update)
        others = [(text, ask.plan(other, status.update)) for text, other in zip(what_if, changes, strict=True)]
    seconds = time.perf_counter() - began
    if isinstance(made, Plan):
        show(made, seconds, console if export else results())
        if out:
            made.save(out)
            console.print(f"saved to {out}")
    else:
        results().print(f"[red]infeasible[/]: {made.reason}\n  nearest: {made.change}", highlight=False)
    for text, other_made in others:
        _show_other(text, made, other_made)
    exported = {}
    if export and isinstance(made, Plan):
        from weft.plan.export import export as write

        exported = {"exported": write(made, export)}
        if not json:
            print(exported["exported"], end="")
    if json:
        asked = (
            {"what_if": [{"what_if": text, **result(r, m, seconds)} for (text, m), r in zip(others, changes, strict=True)]}
            if what_if
            else {}
        )
        emit({**result(request, made, seconds), **asked, **exported})
    if not isinstance(made, Plan):
        raise typer.Exit(2)


def read_dtensor(path: str) -> dict[str, str]:
    """A user's plan: modules by pattern, each with how `parallelize_module` shards it."""
    import json
    from pathlib import Path

    from weft.core.errors import PlanError, reason
    from weft.core.schema import short

    needed = 'a JSON object such as {"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}'
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the plan {path}", needed=needed, found=reason(error)) from error
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise PlanError(f"cannot read the plan {path}", needed=needed, found=short(found))
    return found


def changed(request: Request, text: str) -> Request:
    """The request with one thing changed."""
    from dataclasses import replace

    from weft.core.errors import PlanError
    from weft.plan.space import bytes_of

    key, _, value = text.partition("=")
    if key == "cluster" and value:
        return replace(request, cluster=value)
    if key in ("batch", "seq") and value.isdigit():
        return replace(request, batch=int(value)) if key == "batch" else replace(request, seq=int(value))
    if key == "memory" and value:
        return replace(request, limits=replace(request.limits, memory=bytes_of(value)))
    if key == "imbalance" and (found := re.fullmatch(r"\d+(\.\d+)?", value)):
        return replace(request, imbalance=float(found[0]))
    raise PlanError(f"cannot read --what-if {text!r}", needed="cluster=SPEC, batch=N, seq=N, memory=70GB or imbalance=1.5", found=text)


def result(request: Request, made: Plan | Infeasible, seconds: float) -> dict[str, Any]:
    from weft.cost.interval import spread
    from weft.plan.plan import Plan

    keys = ("step_ms", "tokens_per_s", "mfu", "memory_gb")
    if not isinstance(made, Plan):
        empty = dict.fromkeys(keys)
        lacking = {**made.infeasible, "nearest": made.change}
        return {
            "model": request.model, "cluster": request.cluster, **empty, "seconds": seconds, "baselines_ms": {}, "infeasible": lacking,
            "plan": None,
        }  # fmt: skip
    equal = dict(made.predicted.get("equal_ms", {}))
    return {
        "model": request.model, "cluster": request.cluster, **{k: made.predicted[k] for k in keys}, **made.bounds(), "interval": str(spread(made.kind)),
        "fastest_ms": min([made.step_ms, *equal.values()]), "equal_ms": equal, "seconds": seconds,
        "baselines_ms": dict(made.baselines_ms), "infeasible": dict(made.infeasible), "plan": made.data(),
    }  # fmt: skip


def show(plan: Plan, seconds: float | None, to: Console) -> None:
    """The plan as a table a person reads in a minute."""
    from weft.plan.summaries import plan_text

    to.print(plan_text(plan, seconds), highlight=False, markup=False)


def _show_other(text: str, made: Plan | Infeasible, other: Plan | Infeasible) -> None:
    from weft.plan.plan import Plan
    from weft.plan.search import describe

    if not isinstance(other, Plan):
        results().print(f"what if {text}: infeasible, {other.reason}\n  nearest: {other.change}", highlight=False)
        return
    ratio = f" ({other.step_ms / made.step_ms:.2f}x)" if isinstance(made, Plan) else ""
    rate = f"{other.predicted['tokens_per_s']:,.0f} {'tokens' if other.seq else 'samples'}/s"
    results().print(f"what if {text}: {other.step_ms:,.1f} ms{ratio}, {rate}, {describe(other.setting)}", highlight=False)
