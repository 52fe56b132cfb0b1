"""Updates of parameters as forms: in place, the last thing a step does. Adam of many parameters is one call; so is an update of a table
with the put that makes its gradient, by the rows that were put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from weft.codegen.library_calls import all_rows
from weft.codegen.peephole import Peephole
from weft.codegen.text import python, settings
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.optimizers import adam, state_inputs
from weft.ops.registry import Kind
from weft.ops.rowwise import stays
from weft.rewrite.updates import better_by_rows, reads_alone

Name = Callable[[Node], str]
FUSED = ({torch.float32}, {torch.bfloat16})  # dtypes throughout that torch's kernel takes


def updates(p: Program, donate: bool, device: str) -> Iterator[Peephole]:
    if not donate:
        return
    tables = [n for n in better_by_rows(p) if n.args[1].attr("dim") == 0 and reads_alone(p, n) and _in_place(p, n)]
    yield from _by_rows(p, tables)
    yield from _joint_adam(p, [n for n in p.find_all("adam") if n not in tables], at_once=device != "cpu")


# -- many at once ------------------------------------------------------------------------------------------------------------------------


def _joint_adam(p: Program, nodes: Sequence[Node], at_once: bool) -> Iterator[Peephole]:
    """Adam of all parameters whose gradients are there at the same time; or of all, where many launches cost more than to wait for the last."""
    groups: dict[Any, list[Node]] = {}
    for n in nodes:
        if _is_fused_adam(n) and _in_place(p, n):
            groups.setdefault((n.attrs, *n.args[-2:], None if at_once else _awaited(n.args[1])), []).append(n)
    for (attrs, rate, count, _), some in groups.items():
        columns = tuple(tuple(n.args[k] for n in some) for k in range(4))
        how = ", ".join(settings((k, v) for k, v in attrs if k != "sign"))

        def text(v: Name, columns: Any = columns, rate: Node = rate, count: Node = count, s: str = how) -> str:
            lists = ", ".join(f"[{', '.join(map(v, column))}]" for column in columns)
            return f"library.adam_({lists}, {v(rate)}, {v(count)}, {s})"

        inputs = tuple(dict.fromkeys(a for n in some for a in n.args))
        yield Peephole((*some, *(u for n in some for _, u in _results(p, n))), inputs, (), text, _instead(p, some))


def _is_fused_adam(n: Node) -> bool:
    return n.op is adam and len(n.args) == 6 and n.attr("sign") == 1 and {a.dtype for a in n.args[:4]} in FUSED


def _awaited(n: Node) -> Node | None:
    """The collective a gradient comes from, seen through views."""
    while n.op.kind is Kind.VIEW or n.op.is_item:
        n = n.args[0]
    return n if n.op.kind is Kind.COMM else None


# -- tables, by rows -----------------------------------------------------------------------------------------------------------------------


def _by_rows(p: Program, tables: Sequence[Node]) -> Iterator[Peephole]:
    """The numbers of the rows, where they are all there are, go with the last that would read them: none does."""
    left = {rows: len(p.users[rows]) for rows in (n.args[1].args[2] for n in tables) if all_rows(rows)}
    for k, n in enumerate(tables):
        gradient = n.args[1]
        x, index, rows = gradient.args
        some = () if rows in left else (rows,)
        left |= {rows: left[rows] - 1} if rows in left else {}
        spare = (rows,) if left.get(rows) == 0 else ()
        slot, name = state_inputs(n), f"{n.op.name}_{k}"
        how = f"still={stays(n.op, n.attrs, len(slot) - 1)}" + (f", adam={python(_settings(n))}" if _is_fused_adam(n) else "")

        def text(
            v: Name, slot: Any = slot, given: Any = (x, index), some: Any = some, n: Node = n, name: str = name, how: str = how
        ) -> str:
            args = ", ".join([*map(v, given), v(some[0]) if some else "None", *map(v, n.args[-2:])])
            return f"by_rows.update_({name}, [{', '.join(map(v, slot))}], {args}, {how})"

        inputs = (*slot, x, index, *some, *n.args[-2:])
        nodes = (*spare, gradient, n, *(u for _, u in _results(p, n) if u is not n))
        yield Peephole(nodes, inputs, (), text, _instead(p, [n]), names={name: partial(n.op.run, **dict(n.attrs))})


def _settings(n: Node) -> dict[str, Any]:
    return {k: v for k, v in n.attrs if k != "sign"}


# -- what is overwritten -------------------------------------------------------------------------------------------------------------------


def _results(p: Program, n: Node) -> list[tuple[Node, Node]]:
    """The state that an update is of, and its next value."""
    homes = state_inputs(n)
    return [(homes[u.attr("index")], u) for u in p.users[n]] if len(n.types) > 1 else [(homes[0], n)]


def _instead(p: Program, nodes: Sequence[Node]) -> tuple[tuple[Node, Node], ...]:
    return tuple((new, home) for n in nodes for home, new in _results(p, n))


def _in_place(p: Program, n: Node) -> bool:
    """Parameter and state are state of the program, whose next value is this update and nothing else."""
    state = p.next_of
    for home, new in _results(p, n):
        names = p.outputs_of(new)
        if p.users[new] or not home.op.is_input or not names or any(state.get(name) != home.attr("name") for name in names):
            return False
        if p.outputs_of(home) or new.type != home.type:
            return False
    return True
