"""Updates of tables by rows: an update of what a put made reads the put's operands instead, and its result need not exist.

The rules are lines of weft as all others (`algebra`); the ops on their right are defined by their left sides, which is the proof.
"""

from __future__ import annotations

from weft.core.node import Node
from weft.core.program import Program
from weft.frontend.capture.by_rows import AT, at_rows
from weft.ops.registry import memory_traffic


def by_rows(program: Program) -> Program:
    """The program with those updates by rows that move fewer bytes so: on the busiest rank, where it is placed."""
    program = by_definition(program)
    swap = {n: at_rows(n) for n in better_by_rows(program)}
    return program.rewrite(swap, "updates by rows") if swap else program


def better_by_rows(program: Program) -> list[Node]:
    """Updates of what a put made that would move fewer bytes by rows."""
    return [n for n in program.nodes if n.op in AT and n.args[1].op.name == "put" and _pays(program, n)]


def by_definition(program: Program) -> Program:
    """The program with every such update written as what it stands for."""
    swap = {n: n.op.defined(*n.args, **dict(n.attrs)) for n in program.nodes if n.op in AT.values()}
    return program.rewrite(swap, "whole gradients") if swap else program


def rules_of(program: Program) -> tuple[str, ...]:
    """The rules by which its updates came to read rows."""
    return tuple(dict.fromkeys(f"{n.op.update.name}_by_rows" for n in program.nodes if n.op in AT.values()))


def _pays(program: Program, update: Node) -> bool:
    """Whether reading rows saves more than it costs; a gradient that others read is made all the same."""
    saved = memory_traffic(update.args[1]) if reads_alone(program, update) else 0
    return memory_traffic(at_rows(update)) < memory_traffic(update) + saved


def reads_alone(program: Program, update: Node) -> bool:
    """Whether nothing but the update reads its gradient."""
    gradient = update.args[1]
    return list(program.users[gradient]) == [update] and not program.outputs_of(gradient)
