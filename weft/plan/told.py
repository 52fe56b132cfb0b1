"""A plan in words: the table a person reads in a minute, and what two plans decide differently.

Of a transformer the degrees say what is shared. Of a captured program the layouts do: what an axis of its mesh cuts is read off the placed
program, so that devices which all do the same work are said to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from weft.cluster.spec import cluster
from weft.core.errors import WeftError
from weft.core.layout import P, S
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.interval import NOT_MODELLED, equal_within, spread
from weft.plan.plan import FORESEEN, ZERO, Plan, step_of
from weft.plan.setting import Setting

DEGREES = {
    "dp": "copies of the model", "tp": "devices that share each product", "pp": "pipeline stages",
    "cp": "devices that share a sequence", "ep": "devices that share the experts",
}  # fmt: skip
AGAIN = {
    "none": "nothing", "activation": "the activation", "ffn": "the feed-forward up to its activation", "selective": "attention and the activation",
    "per-op": "all but attention and every second product", "full": "the whole layer",
}  # fmt: skip
HALVES = ("attention", "ffn")  # blocks that are half a layer each

Row = tuple[str, str, str]


def rows(plan: Plan) -> Iterator[Row]:
    """The decisions, each with what it means."""
    s = plan.setting
    yield from _captured(plan) if plan.layouts.get("program") else _stack(plan)
    if plan.layouts.get("rules"):
        told = ", and so by parallelize" if "moves" in plan.layouts else "; the file does not say where"
        yield "rules", ", ".join(plan.layouts["rules"]), f"the step rewritten{told}"
    for share in plan.shares:
        yield "share", str(share["kind"]), _share(share).partition(": ")[2]
    yield "dtype", s.dtype, f"gradients summed in {s.grad_dtype}"


def _times(n: int, noun: str) -> str:
    many = {"copy": "copies", "micro-batch": "micro-batches"}.get(noun, noun + "s")
    return f"{n:,} {noun if n == 1 else many}"


def _share(share: Mapping[str, Any]) -> str:
    copies, much = int(share["copies"]), f"{_times(share['micro_batches'], 'micro-batch')} of {share['micro_batch']}"
    return f"{share['kind']}: " + (f"1 copy takes {much}" if copies == 1 else f"{_times(copies, 'copy')} take {much} each")


def _in_pieces(samples: int, rounds: int, batch: int) -> Row:
    often = "once" if rounds == 1 else f"{rounds:,} times"
    return "micro-batch", str(samples), f"{'sample' if samples == 1 else 'samples'} at a time, {often} a step for {_times(batch, 'sample')}"


def told(plan: Plan, seconds: float | None = None) -> str:
    """The plan as a text a person reads in a minute, with how long it took to make where that is told."""
    return "\n".join(_lines(plan, seconds))


def _lines(plan: Plan, seconds: float | None) -> Iterator[str]:
    f, b = plan.foreseen, plan.bounds()
    yield f"{plan.model} on {plan.cluster}, {plan.setting.global_batch} samples{f' of {plan.seq}' * (plan.seq > 0)}"
    table = [("decision", "value", "meaning"), *rows(plan)]
    widths = [max(len(row[k]) for row in table) for k in (0, 1)]
    yield from (f" {name:<{widths[0]}}  {value:<{widths[1]}}  {means}".rstrip() for name, value, means in table)
    yield (
        f"step {f['step_ms']:,.1f} ms ({b['step_ms_low']:,.1f} to {b['step_ms_high']:,.1f}), "
        f"{f['tokens_per_s']:,.0f} ({b['tokens_per_s_low']:,.0f} to {b['tokens_per_s_high']:,.0f}) {'tokens' if plan.seq else 'samples'}/s, "
        f"utilisation {f['mfu']:.1%} ({b['mfu_low']:.1%} to {b['mfu_high']:.1%}), "
        f"memory {f['memory_gb']:.1f} ({b['memory_gb_low']:.1f} to {b['memory_gb_high']:.1f}){_room(plan)} GB"
    )
    yield f"in brackets the {spread(plan.kind)}; {NOT_MODELLED}"
    if f.get("causes_ms"):
        parts = sorted(f["causes_ms"].items(), key=lambda item: -item[1])
        yield "of which " + ", ".join(f"{k} {v:,.1f}" for k, v in parts) + " ms on the busiest stage"
    if equal := f.get("equal_ms"):
        yield f"the simplest of plans that are equal, as predictions are off by {equal_within():.0%} against each other (--fastest takes the fastest):"
        yield from (f"  {ms:,.1f} ms, {other}" for other, ms in equal.items())
    for words, ms in f.get("padded_ms", {}).items():
        yield f"you may {words}: {ms:,.1f} ms ({ms / f['step_ms'] - 1:+.0%}); weft leaves the model as it is"
    for name, ms in sorted(plan.baselines_ms.items(), key=lambda item: item[1]):
        yield f"  {name:<14} {ms:>12,.1f} ms  {ms / f['step_ms']:.2f}x"
    yield from (f"  {name:<14} does not run: {reason}" for name, reason in plan.infeasible.items())
    if seconds is not None:
        proved = "nothing better in the space" if f["gap"] < 0.004 else f"at most {f['gap']:.1%} may be left"
        yield f"planned in {seconds:.1f} s; {'the best of the ways tried' if plan.layouts else proved}"


def _room(plan: Plan) -> str:
    """What a device has, or may use; nothing where the cluster's file is no longer there."""
    try:
        has = min(g.profile.device.memory for g in cluster(plan.cluster).groups) / 1e9
    except WeftError:
        return ""
    return f" of {min(has, float(plan.limits.get('memory_gb') or has)):.1f}"


# --- a stack of layers


def _stack(plan: Plan) -> Iterator[Row]:
    s = plan.setting
    yield from ((axis, str(s.size(axis)), means) for axis, means in DEGREES.items() if s.size(axis) > 1)
    yield _in_pieces(s.micro_batch, s.micro_batches, s.global_batch)
    yield _sharded(s)
    if s.tp > 1:
        between = "tokens cut between the products" if s.sequence_parallel else "tokens whole between the products"
        yield "tensor", "sp" if s.sequence_parallel else "plain", between + (", collectives beside products" if s.overlap_tp else "")
    again = {"none": "nothing is run again", "full": "whole layers are run again", "mixed": _mixed(plan)}
    yield "recompute", s.recompute, again.get(s.recompute, f"{AGAIN[s.recompute]} is run again" if s.recompute in AGAIN else "")
    if s.pp > 1:
        yield "schedule", s.schedule, f"{s.virtual} chunks of layers per stage" if s.virtual > 1 else "one chunk of layers per stage"
        yield "layers", *_layers(plan)


def _sharded(s: Setting) -> Row:
    if s.size("data") == 1:
        return "sharded", "nothing", "there is one copy of the model"
    told = f"copies share {ZERO[s.zero]}" if s.zero else ZERO[0]
    return "sharded", f"zero{s.zero}", told + (", gathered once a step" if s.keep_gathered else "")


def _layers(plan: Plan) -> tuple[str, str]:
    """Of each stage in the order of the model; half a layer is its attention or its feed-forward."""
    each = "of each chunk, in the model's order" if plan.setting.virtual > 1 else "of each stage"
    if not plan.stages:
        return " ".join(map(str, plan.layers)) or "even", each
    counts = [sum(_size(name) * n for name, _, n in stage) for stage in plan.stages]
    return " ".join(f"{c:g}" for c in counts), each + ("; half a layer is attention or feed-forward" if any(c % 1 for c in counts) else "")


def _size(block: str) -> float:
    return 0.5 if block in HALVES else float(block == "layer")


def _mixed(plan: Plan) -> str:
    """In how many layers what is run again, the most work first."""
    counts: dict[str, float] = {}
    for name, again, n in (piece for stage in plan.stages for piece in stage):
        counts[again] = counts.get(again, 0.0) + _size(name) * n
    told = [(again, counts[again]) for again in reversed(AGAIN) if counts.get(again)]
    return ", ".join(f"{AGAIN[again]} in {n:g} layer{'s' * (n != 1)}" for again, n in told)


# --- a captured program


def _captured(plan: Plan) -> Iterator[Row]:
    s, placed = plan.setting, plan.layouts
    for axis, size in placed["mesh"].items():
        if size > 1:
            yield axis, str(size), _shared(placed, axis)
    if s.pp > 1:
        yield "pp", str(s.pp), DEGREES["pp"]
    rounds = int(placed["micro_batches"])
    yield _in_pieces(s.global_batch // (rounds * _cuts_samples(placed)), rounds, s.global_batch)
    if s.zero and s.dp > 1:
        yield _sharded(s)
    units = [piece for stage in plan.stages for piece in stage]
    again = sum(n for _, what, n in units if what != "none")
    yield "recompute", s.recompute, f"{again} of {len(units)} units of the forward pass are run again" if again else "nothing is run again"
    if s.pp > 1:
        yield "schedule", s.schedule, "one chunk of units per stage"
        yield "units", " ".join(str(len(stage)) for stage in plan.stages), "of the forward pass on each stage"


def _shared(placed: Any, axis: str) -> str:
    """What the devices along an axis share, by how the program is placed."""
    program = step_of(placed["program"])
    if axis not in program.mesh.sizes or not any(isinstance(t.on(axis), (S, P)) for n in program.nodes for t in n.types):
        return "groups of devices that all do the same work: cutting it further is not faster"
    params = program.inputs_for(Role.PARAMETER).values()
    cut = sum(isinstance(n.type.on(axis), S) for n in params)
    samples = _cuts_batch(program, axis)
    if samples and not cut:
        return "copies of the model"
    parts = [*(["the samples"] if samples else []), *([f"{cut} of {len(params)} parameters"] if cut else [])]
    return f"devices that share {' and '.join(parts) or 'what is computed between'}"


def _cuts_batch(program: Program, axis: str) -> bool:
    batch = program.inputs_for(Role.BATCH).values() if axis in program.mesh.sizes else ()
    return any(isinstance(n.type.on(axis), S) for n in batch)


def _cuts_samples(placed: Any) -> int:
    """Into how many parts the batch is cut among copies, by its first axis that cuts it."""
    return next((int(n) for axis, n in placed["mesh"].items() if axis == "dp" and _cuts_batch(step_of(placed["program"]), axis)), 1)


# --- two plans


def differences(a: Plan, b: Plan) -> Iterator[Row]:
    """What two plans decide or foresee differently."""
    for name in ("model", "cluster", "seq", "objective", "origin"):
        yield from _apart(name, str(getattr(a, name)), str(getattr(b, name)))
    yield from _apart("rules", *(", ".join(p.layouts.get("rules", ())) or "none" for p in (a, b)))
    for f in fields(Setting):
        yield from _apart(f.name, str(getattr(a.setting, f.name)), str(getattr(b.setting, f.name)))
    yield from _apart("layers", *(_layers(p)[0] if p.setting.pp > 1 and not p.layouts else "all on one stage" for p in (a, b)))
    yield from _apart("run again", *(_mixed(p) if p.setting.recompute == "mixed" and not p.layouts else p.setting.recompute for p in (a, b)))
    yield from _apart("shares", *(", ".join(map(_share, p.shares)) or "equal" for p in (a, b)))
    x, y = (p.layouts.get("inputs", {}) for p in (a, b))
    for name in sorted({**x, **y}):
        yield from _apart(name, *(" ".join(f"{axis}:{place}" for axis, place in held.get(name, {}).items()) or "whole" for held in (x, y)))
    for key in FORESEEN:
        if a.foreseen[key] != b.foreseen[key]:
            yield key, f"{a.foreseen[key]:,.4g}", f"{b.foreseen[key]:,.4g}"


def _apart(name: str, a: str, b: str) -> Iterator[Row]:
    if a != b:
        yield name, a, b
