"""A plan as text: the table a person reads in a minute, and the differences between two plans.

For a transformer the degrees say what is sharded. For a captured program the layouts do: what an axis of its mesh shards is read off the
placed program, so that devices which only repeat each other's work are reported as such.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.cluster.spec import cluster
from weft.core.errors import WeftError
from weft.core.layout import P, S
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.interval import NOT_MODELLED, equal_within, spread
from weft.plan.partition import even_layers
from weft.plan.plan import PREDICTED_KEYS, ZERO, Plan, step_of
from weft.plan.setting import DECISIONS, Setting
from weft.plan.spec import MIXED, SIZES, Share

DEGREES = {
    "dp": "data-parallel replicas", "tp": "tensor parallelism", "pp": "pipeline stages",
    "cp": "context parallelism (sequences sharded)", "ep": "expert parallelism",
}  # fmt: skip
AGAIN = {
    "none": "nothing", "offload": "nothing, activations in host memory", "activation": "the MLP's activation",
    "ffn": "the MLP up to its activation", "selective": "attention and the MLP's activation",
    "per-op": "all but attention and every second matmul", "full": "the full layer", "full-offload": "the full layer, inputs in host memory",
}  # fmt: skip

Row = tuple[str, str, str]


def rows(plan: Plan) -> Iterator[Row]:
    """The decisions, each with what it means."""
    s = plan.setting
    yield from _captured(plan) if plan.layouts.get("program") else _stack(plan)
    if plan.layouts.get("rules"):
        where = ", also by parallelize" if "moves" in plan.layouts else "; the file does not record where"
        yield "rules", ", ".join(plan.layouts["rules"]), f"algebraic rewrites of the step{where}"
    for share in s.shares:
        yield "share", share[0], _share(share).partition(": ")[2]
    yield "dtype", s.dtype, f"gradients reduced in {s.grad_dtype}"


def _times(n: int, noun: str) -> str:
    many = {"micro-batch": "micro-batches"}.get(noun, noun + "s")
    return f"{n:,} {noun if n == 1 else many}"


def _share(share: Share) -> str:
    kind, copies, samples, rounds = share
    much = f"{_times(rounds, 'micro-batch')} of {samples}"
    return f"{kind}: " + (f"1 replica takes {much}" if copies == 1 else f"{_times(copies, 'replica')} take {much} each")


def _in_pieces(samples: int, rounds: int, batch: int) -> Row:
    return "micro-batch", str(samples), f"samples per device at a time, {_times(rounds, 'micro-batch')} per step, global batch {batch:,}"


def plan_text(plan: Plan, seconds: float | None = None) -> str:
    """The plan as text a person reads in a minute, with the seconds planning took where they are given."""
    return "\n".join(_lines(plan, seconds))


def summary(plan: Plan) -> Iterator[str]:
    """The decisions and the predicted figures."""
    f, b = plan.predicted, plan.bounds()
    yield f"{plan.model} on {plan.cluster}, global batch {plan.setting.global_batch:,}{f' x {plan.seq:,} tokens' * (plan.seq > 0)}"
    table = [("decision", "value", "meaning"), *rows(plan)]
    widths = [max(len(row[k]) for row in table) for k in (0, 1)]
    yield from (f" {name:<{widths[0]}}  {value:<{widths[1]}}  {means}".rstrip() for name, value, means in table)
    yield (
        f"predicted step {f['step_ms']:,.1f} ms ({b['step_ms_low']:,.1f} to {b['step_ms_high']:,.1f}), "
        f"{f['tokens_per_s']:,.0f} ({b['tokens_per_s_low']:,.0f} to {b['tokens_per_s_high']:,.0f}) {'tokens' if plan.seq else 'samples'}/s, "
        f"MFU {f['mfu']:.1%} ({b['mfu_low']:.1%} to {b['mfu_high']:.1%}), "
        f"memory {f['memory_gb']:.1f} ({b['memory_gb_low']:.1f} to {b['memory_gb_high']:.1f}){_room(plan)} GB"
    )


def _lines(plan: Plan, seconds: float | None) -> Iterator[str]:
    f = plan.predicted
    yield from summary(plan)
    yield f"in brackets the {spread(plan.kind)}; {NOT_MODELLED}"
    if f.get("causes_ms"):
        parts = sorted(f["causes_ms"].items(), key=lambda item: -item[1])
        yield "busiest stage: " + ", ".join(f"{k} {v:,.1f}" for k, v in parts) + " ms"
    if equal := f.get("equal_ms"):
        within, usual = f.get("equal_within"), f"{equal_within():.0%}, the error between two predictions"
        why = f"{within:.0%}, the error of a step that waits for the host" if within else usual
        width = max(map(len, equal))
        yield f"the simplest of the plans within {why} (--fastest takes the fastest):"
        yield from (f"  {other:<{width}} {ms:>12,.1f} ms" for other, ms in sorted(equal.items(), key=lambda item: item[1]))
    fastest = min([f["step_ms"], *f.get("equal_ms", {}).values()])
    for words, ms in f.get("padded_ms", {}).items():
        yield f"tip: {words}: {ms:,.1f} ms ({ms / fastest - 1:+.0%} against the fastest without it); weft does not change the model"
    if plan.baselines_ms or plan.infeasible:
        yield "other systems, each with the best settings found for it:"
    for name, ms in sorted(plan.baselines_ms.items(), key=lambda item: item[1]):
        yield f"  {name:<14} {ms:>12,.1f} ms  {_against(ms / f['step_ms'])}"
    yield from (f"  {name:<14} {_refused(reason)}" for name, reason in plan.infeasible.items())
    if seconds is not None:
        proved = "nothing better in the search space" if f["gap"] < 0.004 else f"at most {f['gap']:.1%} from the best in the search space"
        yield f"planned in {seconds:.1f} s; {'the best of the candidates tried' if plan.layouts else proved}"


def _refused(reason: str) -> str:
    return f"does not fit: {reason}" if reason.startswith("needs") else f"not possible: {reason}"


def _against(ratio: float) -> str:
    """How much slower or faster than the plan."""
    return "the same" if abs(ratio - 1) < 0.005 else f"{ratio - 1:.0%} slower" if ratio > 1 else f"{1 - ratio:.0%} faster"


def _room(plan: Plan) -> str:
    """The memory of a device, or its limit; empty where the cluster's file is gone."""
    try:
        has = cluster(plan.cluster).memory / 1e9
    except WeftError:
        return ""
    return f" of {min(has, float(plan.limits.get('memory_gb') or has)):.1f}"


# --- a stack of layers


def _stack(plan: Plan) -> Iterator[Row]:
    s = plan.setting
    yield from ((axis, str(getattr(s, axis)), means) for axis, means in DEGREES.items() if getattr(s, axis) > 1)
    if s.ragged_ep:
        yield "tokens", "sent", "to the ranks of the experts they picked alone (ragged-ep); on GPUs parallelize runs such a step node by node"
    if s.ep > 1:
        yield "imbalance", f"{s.imbalance:g}", "assumed: picks of the busiest rank of ep over those of an average one (--imbalance)"
    yield _in_pieces(s.micro_batch, s.micro_batches, s.global_batch)
    yield _sharded(s)
    if s.tp > 1:
        between = "activations between TP regions sharded along the sequence" if s.sp else "activations between TP regions replicated"
        yield "tensor", "sp" if s.sp else "plain", between + (", collectives overlapped with matmuls (async TP)" if s.async_tp else "")
    mode, again = s.named("recompute"), {
        "none": "all activations kept", "offload": "activations kept in host memory", "full": "full layers recomputed in backward",
        "full-offload": "full layers recomputed in backward from inputs kept in host memory", "mixed": _mixed(plan),
    }  # fmt: skip
    yield "recompute", mode, again.get(mode, f"{AGAIN[mode]} recomputed in backward" if mode in AGAIN else "")
    if s.pp > 1:
        yield "schedule", s.schedule, f"{s.chunks} chunks of layers per stage" if s.chunks > 1 else "one chunk of layers per stage"
        yield "layers", *_layers(plan)


def _sharded(s: Setting) -> Row:
    if s.size("data") == 1:
        return "sharded", "nothing", "one replica"
    means = f"{ZERO[s.zero]} sharded over replicas{' (FSDP)' if s.zero == 3 else ''}" if s.zero else ZERO[0]
    return "sharded", f"zero{s.zero}", means + (", parameters gathered once per step" if s.gather_once else "")


def _layers(plan: Plan) -> tuple[str, str]:
    """Layers of each stage in the order of the model; half a layer is its attention or its MLP."""
    s, counts = plan.setting, plan.setting.layers
    each = "of each chunk, in the model's order" if s.chunks > 1 else "of each stage"
    if s.recompute != MIXED and counts in ((), even_layers(int(sum(counts)), s.virtual_stages)):
        return "even", each
    return " ".join(f"{c:g}" for c in counts), each + ("; half a layer is attention or MLP" if any(c % 1 for c in counts) else "")


def _mixed(plan: Plan) -> str:
    """What is recomputed in how many layers, the most work first."""
    counts: dict[str, float] = {}
    for name, again, n in (piece for stage in plan.setting.stages for piece in stage):
        counts[again] = counts.get(again, 0.0) + SIZES.get(name, 0.0) * n
    counted = [(again, counts[again]) for again in reversed(AGAIN) if counts.get(again)]
    return ", ".join(f"{AGAIN[again]} in {n:g} layer{'s' * (n != 1)}" for again, n in counted)


# --- a captured program


def _captured(plan: Plan) -> Iterator[Row]:
    s, placed = plan.setting, plan.layouts
    for axis, size in placed["mesh"].items():
        if size > 1:
            yield axis, str(size), _shared(placed, axis)
    rounds = int(placed["micro_batches"])
    yield _in_pieces(s.global_batch // (rounds * _batch_parts(placed)), rounds, s.global_batch)
    if s.zero and s.dp > 1:
        yield _sharded(s)
    again = {"": "all activations kept", "full": "blocks or segments recomputed in backward"}
    yield "recompute", s.named("recompute"), again.get(s.again, "parts of blocks recomputed in backward")


def _shared(placed: Any, axis: str) -> str:
    """What is sharded along an axis, by how the program is placed."""
    program = step_of(placed["program"])
    if axis not in program.mesh.sizes or not any(isinstance(t.on(axis), (S, P)) for n in program.nodes for t in n.types):
        return "replicated: more devices do not make this batch faster"
    params = program.inputs_for(Role.PARAMETER).values()
    sharded = sum(isinstance(n.type.on(axis), S) for n in params)
    samples = _shards_batch(program, axis)
    if samples and not sharded:
        return DEGREES["dp"]
    parts = [*(["the samples"] if samples else []), *([f"{sharded} of {len(params)} parameters"] if sharded else [])]
    return f"{' and '.join(parts) or 'intermediate values'} sharded"


def _shards_batch(program: Program, axis: str) -> bool:
    batch = program.inputs_for(Role.BATCH).values() if axis in program.mesh.sizes else ()
    return any(isinstance(n.type.on(axis), S) for n in batch)


def _batch_parts(placed: Any) -> int:
    """Into how many parts the batch is sharded over replicas."""
    return next((int(n) for axis, n in placed["mesh"].items() if axis == "dp" and _shards_batch(step_of(placed["program"]), axis)), 1)


# --- two plans


def differences(a: Plan, b: Plan) -> Iterator[Row]:
    """What two plans decide or predict differently."""
    for name in ("model", "cluster", "seq", "objective", "origin"):
        yield from _difference(name, str(getattr(a, name)), str(getattr(b, name)))
    yield from _difference("rules", *(", ".join(p.layouts.get("rules", ())) or "none" for p in (a, b)))
    for name in (*DECISIONS, "imbalance"):
        yield from _difference(name, str(a.setting.named(name)), str(b.setting.named(name)))
    yield from _difference("layers", *(_layers(p)[0] if p.setting.pp > 1 and not p.layouts else "all on one stage" for p in (a, b)))
    mixed = (_mixed(p) if p.setting.recompute == "mixed" and not p.layouts else p.setting.named("recompute") for p in (a, b))
    yield from _difference("recompute by layer", *mixed)
    yield from _difference("shares", *(", ".join(map(_share, p.setting.shares)) or "equal" for p in (a, b)))
    x, y = (p.layouts.get("inputs", {}) for p in (a, b))
    for name in sorted({**x, **y}):
        yield from _difference(name, *(" ".join(f"{axis}:{place}" for axis, place in of.get(name, {}).items()) or "replicated" for of in (x, y)))
    for key in PREDICTED_KEYS:
        if a.predicted[key] != b.predicted[key]:
            yield key, f"{a.predicted[key]:,.4g}", f"{b.predicted[key]:,.4g}"


def _difference(name: str, a: str, b: str) -> Iterator[Row]:
    if a != b:
        yield name, a, b
