"""`weft simulate MODEL --cluster SPEC ...`: step time, throughput, memory and where the time goes, without the cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.output import CLUSTER, IMBALANCE, console, count, emit, many, results, writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.cluster.spec import Cluster
    from weft.cost.timeline import Timeline
    from weft.plan.fits import Fit, FittingChange
    from weft.plan.setting import Setting
    from weft.plan.simulate import SimulatedStep


def simulate(
    model: str = typer.Argument(..., help="A known name such as llama3-8b, or hf:FOLDER with a Hugging Face config.json."),
    cluster: str = CLUSTER,
    plan: str = typer.Option("", "--plan", help="All degrees as one plan string, such as dp8,tp2,zero1, in place of the options for them.", show_default=False),
    batch: int = typer.Option(0, "--batch", callback=count, help="Global batch in samples.", show_default="one micro-batch per replica"),
    micro_batch: int = typer.Option(1, "--micro-batch", help="Samples per device at a time."),
    seq: int = typer.Option(0, "--seq", callback=count, help="Sequence length.", show_default="the model's"),
    dp: int = typer.Option(0, "--dp", help="Data-parallel degree.", show_default="all remaining devices"),
    tp: int = typer.Option(1, "--tp", help="Tensor-parallel degree."),
    pp: int = typer.Option(1, "--pp", help="Pipeline stages."),
    cp: int = typer.Option(1, "--cp", help="Context-parallel degree."),
    ep: int = typer.Option(1, "--ep", help="Expert-parallel degree."),
    virtual: int = typer.Option(1, "--virtual", help="Virtual stages per device, for the interleaved schedule."),
    zero: int = typer.Option(0, "--zero", help="ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also parameters (FSDP)."),
    recompute: str = typer.Option(
        "none",
        "--recompute",
        help="Activation checkpointing: none, selective (attention), per-op (all but some matmuls) or full; "
        "offload or full-offload keeps activations, or inputs of layers, in host memory.",
    ),
    schedule: str = typer.Option(
        "",
        "--schedule",
        help="Pipeline schedule: gpipe, 1f1b, interleaved, zero-bubble, 1f1b-eager, zero-bubble-eager, zero-bubble-v or dual-pipe-v.",
    ),
    kernels: str = typer.Option(
        "compiled", "--kernels", help="compiled (fused, as torch.compile), eager (one kernel per op) or classic (Megatron of 2021)."
    ),
    dtype: str = typer.Option("", "--dtype", help="fp32, tf32, fp16, bf16, fp8 or fp4.", show_default="the device's faster 16-bit type"),
    sequence_parallel: bool = typer.Option(False, "--sequence-parallel", help="Shard activations between TP regions along the sequence."),
    overlap: bool = typer.Option(True, help="Overlap communication of gradients and parameters with compute."),
    imbalance: float = typer.Option(1.0, "--imbalance", help=IMBALANCE),
    overlap_tp: bool = typer.Option(False, "--overlap-tp", help="Overlap tensor-parallel collectives with their matmuls (async TP)."),
    keep_gathered: bool = typer.Option(
        False, "--keep-gathered", help="With ZeRO-3, gather parameters once per step instead of for every use."
    ),
    trace: str = typer.Option("", "--trace", help="Write the timeline for Perfetto to this file."),
    json: bool = typer.Option(False, "--json", help="Print the result as one JSON object."),
) -> None:
    """Predict one training step: time, tokens/s, MFU, memory, and what to change if it does not fit."""
    from weft.cluster import spec
    from weft.cost.interval import bounds, kind_of, spread
    from weft.plan.fits import fit
    from weft.plan.planner import best_dtype, captured_stack
    from weft.plan.schedules import CHUNKED, PLAIN
    from weft.plan.setting import Setting
    from weft.plan.simulate import detail
    from weft.plan.simulate import simulate as run

    began = time.perf_counter()
    writable(trace)
    place = spec.cluster(cluster)
    copies = dp or max(1, place.devices // max(1, tp * pp * cp))
    if plan:
        _require_no_degrees(plan, dp=dp, tp=tp - 1, pp=pp - 1, cp=cp - 1, ep=ep - 1, virtual=virtual - 1, zero=zero, schedule=schedule)
    setting = _of_words(plan, batch, micro_batch, kernels, dtype or best_dtype(place), overlap) if plan else Setting.counted(
        global_batch=batch or copies * max(1, micro_batch) * (4 * pp if pp > 1 else 1), micro_batch=micro_batch,
        dp=copies, tp=tp, pp=pp, cp=cp, ep=ep, virtual=virtual, zero=zero, recompute=_same_for_all_layers(recompute),
        schedule=schedule or (CHUNKED if virtual > 1 else PLAIN), kernels=kernels, dtype=dtype or best_dtype(place),
        sequence_parallel=sequence_parallel, overlap_grads=overlap, overlap_params=overlap, overlap_tp=overlap_tp, keep_gathered=keep_gathered,
    )  # fmt: skip
    setting = replace(setting, imbalance=imbalance)
    setting.check()
    stack = captured_stack(model, setting.dtype, seq)[0]
    step = run(stack.work(setting), setting, place)
    answer = fit(stack, setting, place, step)
    if plan:
        answer = replace(answer, changes=tuple(replace(c, says=_in_words(c, place)) for c in answer.changes))
    if trace:
        _save_trace(step, detail(stack.work(setting), setting, place), trace)
    of = f" of {stack.seq} tokens" if stack.seq else ""
    heading = f"{setting.dtype}, {many(setting.global_batch, 'sample')}{of}, {_stage_rows(setting)}"
    results().print(f"[bold]{model}[/] on {cluster} ({many(place.devices, 'device')}): {heading}", highlight=False)
    kind = kind_of(setting.kernels, bool(stack.experts), False)
    _show(step, answer, kind)
    if json:
        found = _result(setting, step, answer)
        emit(
            {
                "model": model,
                "cluster": cluster,
                **found,
                **bounds(kind, found),
                "interval": str(spread(kind)),
                "seconds": time.perf_counter() - began,
            }
        )


def _require_no_degrees(plan: str, **degrees: Any) -> None:
    from weft.core.errors import PlanError

    if given := [f"--{name}" for name, value in degrees.items() if value]:
        raise PlanError(
            "--plan and options for degrees", needed="one or the other", found=f"--plan {plan} with {', '.join(given)}", try_="write all of it in --plan"
        )


def _in_words(change: FittingChange, place: Cluster) -> str:
    """A change as the options that name it by a plan string."""
    where = [f"--cluster {change.cluster.text}"] if change.cluster != place else []
    return " ".join([*where, f"--plan {change.setting.spec} --micro-batch {change.setting.micro_batch}"])


def _of_words(plan: str, batch: int, micro_batch: int, kernels: str, dtype: str, overlap: bool) -> Setting:
    """The setting that a plan string names; what it says of single parameters or modules is for captured models."""
    from weft.core.errors import PlanError
    from weft.plan.setting import Setting, require_count
    from weft.plan.spec import Spec

    spec = Spec.parse(plan).checked()
    if single := [name for name in ("groups", "stages", "splits", "pins", "shares") if getattr(spec, name)]:
        raise PlanError(
            "this plan names parameters or modules", needed="degrees and words for all layers", found=f"{single[0]} in {plan}",
            try_="weft plan FILE.py:FUNCTION --pin ...",
        )  # fmt: skip
    require_count("micro_batch", micro_batch)
    own = spec.dp * spec.ep * spec.micro_batches * micro_batch
    setting = Setting.of(spec, global_batch=own, kernels=kernels, dtype=dtype, overlap_grads=overlap, overlap_params=overlap)
    return setting.of_batch(batch) if batch else setting


def _same_for_all_layers(recompute: str) -> str:
    """The same recompute of every layer; a mix is what a plan makes of its own memory."""
    from weft.core.errors import PlanError
    from weft.plan.spec import MIXED, RECOMPUTE

    if recompute == MIXED:
        raise PlanError(
            "mixed recompute is for plans, not for one setting", needed=" or ".join(word or "none" for word in RECOMPUTE), found=recompute,
            try_="weft plan, which chooses recompute layer by layer",
        )  # fmt: skip
    return recompute


def _stage_rows(s: Setting) -> str:
    return f"{many(s.micro_batches, 'micro-batch')} of {s.micro_batch}" + (f" on each of {s.replicas} replicas" if s.replicas > 1 else "")


def _result(setting: Setting, step: SimulatedStep, answer: Fit) -> dict[str, Any]:
    communication = {k: v * 1e3 for k, v in step.causes.items() if k in AXES}
    return {
        "step_ms": step.seconds * 1e3, "tokens_per_s": step.tokens_per_second, "mfu": step.mfu,
        "memory_gb": answer.needed / 1e9, "device_memory_gb": answer.memory / 1e9, "fits": answer.fits,
        "largest_micro_batch": answer.largest,
        "changes": [{"try": c.says, "step_ms": c.step.seconds * 1e3, "memory_gb": c.step.peak_memory.total / 1e9} for c in answer.changes],
        "breakdown_ms": {
            "compute": step.causes.get("compute", 0.0) * 1e3, "host": step.causes.get("host", 0.0) * 1e3,
            "exposed": communication, "hidden": {k: v * 1e3 for k, v in step.hidden.items() if v > 0},
            "bubble": step.causes.get("bubble", 0.0) * 1e3, "optimizer": step.causes.get("optimizer", 0.0) * 1e3,
        },
        "memory_parts_gb": {k: v / 1e9 for k, v in step.peak_memory.parts().items()},
        "global_batch": setting.global_batch, "micro_batches": setting.micro_batches, "dtype": setting.dtype,
    }  # fmt: skip


AXES = ("tp", "cp", "dp", "ep", "pp")
MEANS = {
    "compute": "compute", "host": "kernel launch overhead", "bubble": "pipeline bubble",
    "optimizer": "optimizer", **{axis: f"exposed communication, {axis}" for axis in AXES},
}  # fmt: skip


def _show(step: SimulatedStep, answer: Fit, kind: str) -> None:
    from rich.table import Table

    from weft.cost.interval import NOT_MODELLED, spread

    table = Table("the busiest stage", "ms", "share", box=None)
    for cause, seconds in sorted(step.causes.items(), key=lambda item: -item[1]):
        if seconds > 1e-6:
            table.add_row(MEANS.get(cause, cause), f"{seconds * 1e3:,.2f}", f"{seconds / step.seconds:.1%}")
    results().print(table)
    hidden = ", ".join(f"{axis} {v * 1e3:,.1f} ms" for axis, v in step.hidden.items() if v > 1e-6)
    low, high = spread(kind).of(step.seconds * 1e3)
    rates = f"{step.tokens_per_second:,.0f} tokens/s, MFU {step.mfu:.1%}"
    results().print(f"predicted step {step.seconds * 1e3:,.1f} ms ({low:,.1f} to {high:,.1f}), {rates}", highlight=False)
    results().print(f"in brackets the {spread(kind)}; {NOT_MODELLED}", highlight=False)
    if hidden:
        results().print(f"communication overlapped with compute: {hidden}")
    _show_memory(step, answer)


def _show_memory(step: SimulatedStep, answer: Fit) -> None:
    from weft.cost.interval import memory_spread

    parts = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in step.peak_memory.parts().items() if v > 5e7)
    low, high = memory_spread().of(answer.needed / 1e9)
    results().print(f"memory {answer.needed / 1e9:.1f} ({low:.1f} to {high:.1f}) of {answer.memory / 1e9:.1f} GB: {parts}")
    if answer.fits:
        results().print(f"[green]it fits[/]; largest micro-batch that fits: {answer.largest}")
        return
    largest = f"micro-batches of {answer.largest} would" if answer.largest else "nor does a micro-batch of 1"
    results().print(f"[red]it does not fit[/]; {largest}", highlight=False)
    if not answer.changes:
        results().print("  no change that fits was found, up to 64 times the nodes", highlight=False)
    for change in answer.changes[:5]:
        made = f"{change.step.peak_memory.total / 1e9:.1f} GB, {change.step.seconds * 1e3:,.0f} ms"
        results().print(f"  with {change.says}: fits, {made}", highlight=False)


def _save_trace(step: SimulatedStep, layers: Mapping[str, Timeline], path: str) -> None:
    """The stages of the full step, and next to them one layer op by op."""
    import json
    from pathlib import Path

    made = step.timeline.chrome()
    for n, (title, line) in enumerate(layers.items(), 1):
        made["traceEvents"] += line.chrome(n, title)["traceEvents"]
    Path(path).write_text(json.dumps(made))
    console.print(f"timeline written to {path}; open it in ui.perfetto.dev")
