"""What a valid program is. Every program that is made by hand, parsed or rewritten can be asked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from weft.core.errors import InvalidProgram
from weft.core.node import Node, inferred
from weft.core.program import Program

Rule = Callable[[Program], "str | None"]


def _names_are_unique(p: Program) -> str | None:
    twice = [n for n, k in Counter([i.attr("name") for i in p.inputs]).items() if k > 1]
    twice += [n for n, k in Counter([name for name, _ in p.outputs]).items() if k > 1]
    return f"the name {twice[0]!r} stands twice" if twice else None


def _names_can_be_read_back(p: Program) -> str | None:
    names = [i.attr("name") for i in p.inputs] + [name for name, _ in p.outputs]
    odd = [n for n in names if not re.fullmatch(r"[\w.]+", n)]
    numbers = [i.attr("name") for i in p.inputs if i.attr("name").isdigit()]
    if numbers:
        return f"input {numbers[0]!r} would print as the number of a node"
    odd += [n for n in (p.name, *(g.name for g in p.groups)) if not re.fullmatch(r"[\w.\-]+", n)]
    return f"the name {odd[0]!r} has more than letters, digits, _ and dots" if odd else None


def _inputs_are_declared(p: Program) -> str | None:
    declared = set(p.inputs)
    unknown = [n for n in p.nodes if n.op.is_input and n not in declared]
    return f"input {unknown[0].attr('name')!r} is read but not declared" if unknown else None


def _one_mesh(p: Program) -> str | None:
    other = [n for n in p.nodes if n.mesh != p.mesh]
    return f"{other[0].op.name} is on {other[0].mesh}, the program on {p.mesh}" if other else None


def _outputs_are_tensors(p: Program) -> str | None:
    bad = [name for name, n in p.outputs if len(n.types) != 1]
    return f"output {bad[0]!r} is a tuple" if bad else None


def _state_fits(p: Program) -> str | None:
    for out, inp in p.state:
        if out not in p.output_names or inp not in p.input_names:
            return f"state {inp}={out} names no output or no input"
        a, b = p.output_names[out].type, p.input_names[inp].type
        if a != b:
            return f"state {inp}={out} would change its type: {b} becomes {a}"
    return None


def _types_follow(p: Program) -> str | None:
    odd = next((n for n in p.nodes if inferred(n.op, n.args, n.attrs) != n.types), None)
    return None if odd is None else f"the type of {odd.op.name} does not follow from its operands"


def groups_are_disjoint(p: Program) -> str | None:
    for kind in ("fuse", "overlap"):
        members = Counter(n for g in p.groups if g.kind == kind for n in g.nodes)
        if any(k > 1 for k in members.values()):
            return f"a node is in two {kind} groups"
    unknown = [n for g in p.groups for n in g.nodes if n not in p.node_set]
    return f"a group holds {unknown[0].op.name}, which is not in the program" if unknown else None


def _groups_are_closed(p: Program) -> str | None:
    for g in p.groups:
        through = leaves_and_returns(p, set(g.nodes))
        if through is not None:
            return f"group {g.name} needs {through.op.name} outside it, which needs the group"
    return None


RULES: tuple[Rule, ...] = (
    _names_are_unique, _names_can_be_read_back, _inputs_are_declared, _one_mesh, _outputs_are_tensors, _state_fits, _types_follow,
    groups_are_disjoint, _groups_are_closed,
)  # fmt: skip


def leaves_and_returns(p: Program, group: set[Node]) -> Node | None:
    """A node outside the group on a way from the group back into it: run as one kernel, it would wait for itself.

    A way may enter another group at one node and leave it at any other, since that group runs as one too.
    """
    full = {n: k for k, g in enumerate(p.groups) if group.isdisjoint(g.nodes) for n in g.nodes}
    members = {k: g.nodes for k, g in enumerate(p.groups)}
    after: set[Node] = set()
    todo = [u for n in group for u in p.users.get(n, ())]
    while todo:
        n = todo.pop()
        if n not in after and n not in group:
            after.add(n)
            todo += p.users[n]
            if n in full:
                todo += members.pop(full[n], ())
    return next((a for n in p.nodes if n in group for a in n.args if a in after), None)


def validate(p: Program) -> Program:
    """The program itself, if it is valid."""
    for rule in RULES:
        wrong = rule(p)
        if wrong:
            raise InvalidProgram(f"program {p.name} is not valid", needed=rule.__name__.strip("_").replace("_", " "), found=wrong)
    return p
