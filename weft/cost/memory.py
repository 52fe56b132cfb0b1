"""What the busiest rank holds while a program runs, and what a device must have for it."""

from __future__ import annotations

from weft.core.node import Node
from weft.core.program import Program
from weft.ops.registry import Kind, nbytes

FRAGMENTATION = 0.04  # of what is allocated; the caching allocator keeps blocks it cannot hand out again
RESIDENT = 1.5e9  # context, kernels, and buffers of the communication library, none of it seen by the allocator


def needed(held: float) -> float:
    """Bytes a device must have where so many are in use."""
    return held * (1 + FRAGMENTATION) + RESIDENT


def room(memory: float) -> float:
    """Bytes that may be in use on a device that has so many."""
    return (memory - RESIDENT) / (1 + FRAGMENTATION)


def peak_bytes(program: Program) -> int:
    """The most bytes the busiest rank holds at any time."""
    return max(live_bytes(program), default=0)


def least_bytes(program: Program) -> int:
    """What the busiest rank holds at the least, however well elementwise ops are fused: of these, only what others read."""
    return max(live_bytes(program, fused=True), default=0)


def live_bytes(program: Program, fused: bool = False) -> list[int]:
    """What the busiest rank holds while each node runs: inputs throughout, every other value from its making to its last use.

    Of what one kernel makes only that is kept which others read, and the next value of a state is written over the last."""
    place, free = {n: i for i, n in enumerate(program.nodes)}, _never_held(program) | (_passed_on(program) if fused else set())
    outputs = {n for _, n in program.outputs}
    dies: dict[int, list[Node]] = {}
    for node in program.nodes:
        if node.args and node not in outputs and program.users[node]:
            dies.setdefault(max(place[u] for u in program.users[node]), []).append(node)
    now = sum(nbytes(t) for n in program.inputs for t in n.types)
    held = []
    for i, node in enumerate(program.nodes):
        if node.args and node not in free:
            now += sum(nbytes(t) for t in node.types)
        held.append(now)
        now -= sum(nbytes(t) for n in dies.get(i, ()) if n not in free for t in n.types)
    return held


def _never_held(program: Program) -> set[Node]:
    """Views, and inside fused groups what no other node reads and what overwrites state."""
    found = {n for n in program.nodes if n.op.kind is Kind.VIEW}
    outputs, state = {n for _, n in program.outputs}, {program.output_names[o] for o, _ in program.state}
    for group in program.groups:
        inside = set(group.nodes) if group.kind == "fuse" else set()
        found |= {n for n in inside if n in state or (n not in outputs and all(u in inside for u in program.users[n]))}
    return found


def _passed_on(program: Program) -> set[Node]:
    """Elementwise values that only elementwise ops read."""
    outputs = {n for _, n in program.outputs}
    alone = {n for n in program.nodes if n.op.kind is Kind.POINTWISE and n not in outputs}
    return {n for n in alone if all(u.op.kind is Kind.POINTWISE for u in program.users[n])}
