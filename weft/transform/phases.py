"""One program as several that run in turn, each keeping for the later ones what they read of it."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.node import Node, remade, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.comm import all_gather
from weft.ops.experts import left_out
from weft.ops.source import input_node
from weft.plan.split import program_of


def split_phases(p: Program, groups: Sequence[Sequence[str]], afresh: Sequence[Role]) -> list[Program]:
    """One program per group of outputs. What later ones read is an output `kept.K` of the first that has it.

    A value made only of inputs of the roles `afresh`, such as a gathered weight, is made again rather than kept. Of tokens that are sent, and
    only in words gathered, each rank keeps its own.
    """
    phase_of = _phase_of(p, groups)
    cheap = _made_of(p, afresh)
    kept = _kept(p, groups, phase_of, cheap)
    return [_one(p, k, group, phase_of, kept) for k, group in enumerate(groups)]


def _phase_of(p: Program, groups: Sequence[Sequence[str]]) -> dict[Node, int]:
    """The first turn that needs a node; the items of a tuple are taken where it is made."""
    phase_of: dict[Node, int] = {}
    for k, group in enumerate(groups):
        for n in toposort(p.output_names[name] for name in group):
            phase_of[n] = phase_of[n.args[0]] if n.op.is_item else phase_of.get(n, k)
    return phase_of


def _made_of(p: Program, afresh: Sequence[Role]) -> set[Node]:
    found: set[Node] = set()
    for n in p.nodes:
        if n.role in afresh if n.op.is_input else all(a in found for a in n.args):
            found.add(n)
    return found


def _kept(p: Program, groups: Sequence[Sequence[str]], phase_of: dict[Node, int], cheap: set[Node]) -> dict[Node, str]:
    last: dict[Node, int] = {}
    unmade = {n for n in left_out(p) if n.op is all_gather}
    for n, k in phase_of.items():
        for a in n.args:
            read = a.args[0] if a in unmade else a
            last[read] = max(k, last.get(read, 0))
    for k, group in enumerate(groups):
        for name in group:
            last[p.output_names[name]] = max(k, last.get(p.output_names[name], 0))
    made = [n for n in phase_of if not n.op.is_input and n not in cheap and last.get(n, 0) > phase_of[n]]
    return {n: f"kept.{i}" for i, n in enumerate(made)}


def _one(p: Program, k: int, group: Sequence[str], phase_of: dict[Node, int], kept: dict[Node, str]) -> Program:
    swap = {n: input_node(name, n.type) for n, name in kept.items() if phase_of[n] < k}
    roots = {name: p.output_names[name] for name in group} | {name: n for n, name in kept.items() if phase_of[n] == k}
    made = remade(roots.values(), swap)
    return program_of(f"{p.name}.{k}", {name: made[n] for name, n in roots.items()}, p, made)
