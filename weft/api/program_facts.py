"""What the programs of a training step are, as data: tensors, communication, work, and the steps that led to them. For runs and reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weft.api.micro_batches import MicroBatches
from weft.core.node import DTYPE_NAMES
from weft.core.program import Program
from weft.core.role import Role
from weft.cost.work import DTYPES, Collective, records
from weft.ops.registry import Kind, flops, nbytes
from weft.rewrite.engine import same_erased

PROVED = "A proved rule: both sides have the same values."
SPLIT = (
    "Each stage is a stretch of the captured forward pass with its own gradient, and losses of micro-batches are averaged; "
    "step.check(batch) compares all of it with one device."
)


def digest(text: str) -> str:
    """A short name for a program: equal texts, equal names."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
    return sum(flops(n) for n in program.nodes if n.op.kind in (Kind.CONTRACT, Kind.COMPOSITE))


def main_dtype(program: Program) -> str:
    work: Counter[str] = Counter()
    for n in program.nodes:
        if n.op.kind is Kind.CONTRACT:
            work[DTYPES.get(DTYPE_NAMES[n.types[0].dtype], "fp32")] += round(flops(n))
    return work.most_common(1)[0][0] if work else "fp32"


def taken(program: Program) -> tuple[str, float]:
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


def rewrite_rules_used(moves: Sequence[str]) -> list[dict[str, Any]]:
    """The uses of rules by which a plan rewrote a step."""
    return [{"step": words, "same": False, "rule": words.split(" ")[0], "said": PROVED} for words in moves]


def split(micro_batches: int, stages: int) -> dict[str, Any]:
    """How a step is split, among the verbs of its page."""
    words = f"{micro_batches} micro-batches" + (f" through {stages} stages" if stages > 1 else "")
    return {"step": words, "same": False, "said": SPLIT}


def tensors_of_stages(parts: MicroBatches | None) -> list[dict[str, Any]]:
    """The tensors of a micro-batch, as the first stage that reads them holds them."""
    found: dict[str, dict[str, Any]] = {}
    for stage in parts.pipeline.stages if parts is not None else ():
        for t in tensors(stage.phases[0], {}):
            if t["role"] == "batch":
                found.setdefault(t["name"], t)
    return list(found.values())


def communication_of_stages(parts: MicroBatches) -> list[dict[str, Any]]:
    """Collectives of all stages and messages between them, in one step."""
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    many, line = parts.plan.micro_batches, parts.pipeline
    for program, times in [*((p, many) for s in line.stages for p in s.phases), (line.update, 1)]:
        for c in communication(program):
            count[c["kind"], c["axis"]] += times * c["count"]
            size[c["kind"], c["axis"]] += times * c["bytes"]
    for (g, _), readers in parts.runner.routes.items():
        for dst, names in readers.items():
            if line.stages[g].rank != line.stages[dst].rank:
                count["message", "pp"] += many
                size["message", "pp"] += many * sum(nbytes(line.stages[dst].types[n]) for n in names)
    return [{"kind": kind, "axis": axis, "count": n, "bytes": size[kind, axis]} for (kind, axis), n in count.most_common()]
