"""Collectives of one kind sent as one message: sums of gradients scattered as the backward pass makes them, slices gathered
a little before they are used. Where every message has its price, a hundred small ones cost more than what they carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from weft.codegen.local_memory import local_shape_of, partial_op
from weft.codegen.peepholes import Peephole
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.ops.comm import all_gather, reduce_scatter
from weft.ops.registry import nbytes


def bundles_of(
    program: Program, wires: Sequence[Node], nodes: Sequence[Node], coords: Mapping[str, int], most: Mapping[str, int]
) -> list[Peephole]:
    """Forms of two and more of the `wires`; `nodes` is the order in which a rank does everything, `most` the bytes of a message by axis."""
    at = {n: i for i, n in enumerate(nodes)}
    used = {n: min((at[u] for u in program.users[n] if u in at), default=len(nodes)) for n in wires}
    isomorphic: dict[object, list[Node]] = {}
    for n in wires:
        if len(n.args) == 1 and n.op.name in WRITERS and not n.attr("tree"):
            early = n.op is all_gather and n.args[0].op.is_input
            how = partial_op(n.args[0].layout, n.attr("axis")) if n.op is reduce_scatter else early
            isomorphic.setdefault((n.op.name, n.attr("axis"), n.dtype, how), []).append(n)
    found = []
    for (name, axis, _, how), members in isomorphic.items():  # type: ignore[misc]
        for some in _split_messages(members, at, used, how is True, most[axis]):
            text = WRITERS[name](some, coords)
            found.append(Peephole(tuple(some), tuple(n.args[0] for n in some), tuple(some), text, starts=True, early=how is True))
    return found


def _split_messages(members: Sequence[Node], at: Mapping[Node, int], used: Mapping[Node, int], early: bool, most: int) -> Iterator[list[Node]]:
    """Runs of members that can wait for their last, or start with their first, none larger than a message should be."""
    run, size, wanted = list[Node](), 0, len(at)
    last = _last_needed(members) if not early else {}
    for k, n in enumerate(members):
        more = max(nbytes(n.type), nbytes(n.args[0].type))
        separate = bool(run) and not early and (wanted <= at[n] or last[n] >= k - len(run))
        full = not early and size >= most / 2  # a large one is not kept waiting for a small one that comes later
        if separate or full or size + more > most:
            yield from [run] if len(run) > 1 else []
            run, size, wanted = [], 0, len(at)
        run.append(n)
        size, wanted = size + more, min(wanted, used[n])
    yield from [run] if len(run) > 1 else []


def _last_needed(members: Sequence[Node]) -> dict[Node, int]:
    """Of each member, the last of the others, by number, that it is computed from; -1 where there is none."""
    number = {n: k for k, n in enumerate(members)}
    under: dict[Node, int] = {}
    last: dict[Node, int] = {}
    for n in toposort(members):
        before = max((under[a] for a in n.args), default=-1)
        under[n] = max(before, number.get(n, -1))
        last[n] = before
    return last


Text = Callable[[Callable[[Node], str]], str]


def _scattered(some: Sequence[Node], coords: Mapping[str, int]) -> Text:
    axis = some[0].attr("axis")
    shapes = [local_shape_of(n.layout, axis, coords) for n in some]
    hows = [((shape.before, shape.full, shape.after), shape.mine, n.layout.local_shape(coords)) for n, shape in zip(some, shapes, strict=True)]
    op = partial_op(some[0].args[0].layout, axis)
    return lambda v: f"comm.reduce_scatter_list([{', '.join(v(n.args[0]) for n in some)}], on.{axis}, {op!r}, hows={hows})"


def _gathered(some: Sequence[Node], coords: Mapping[str, int]) -> Text:
    axis = some[0].attr("axis")
    shapes = [local_shape_of(n.args[0].layout, axis, coords) for n in some]
    hows = [((shape.before, shape.mine, shape.after), shape.full, n.layout.local_shape(coords)) for n, shape in zip(some, shapes, strict=True)]
    return lambda v: f"comm.all_gather_list([{', '.join(v(n.args[0]) for n in some)}], on.{axis}, hows={hows})"


WRITERS = {"reduce_scatter": _scattered, "all_gather": _gathered}
