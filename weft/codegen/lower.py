"""A program as the list of things one rank does: local shapes, spans of what is sharded, groups, and who waits when.

Every rank derives its own list from the same program, in the same order, so collectives meet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from weft.codegen.blocks import Block, blocks_of, in_blocks
from weft.codegen.bundles import bundles_of
from weft.codegen.order import gathers_parameters, is_wire, order
from weft.codegen.peepholes import Peephole, peepholes_of
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.comm import slice_
from weft.ops.registry import Kind


@dataclass(frozen=True)
class Step:
    """One statement of a rank: a node to compute, or to start, or several at once, and the collectives to finish first."""

    what: Node | Block | Peephole
    waits: tuple[Node, ...]  # started earlier, first needed here
    frees: tuple[Node, ...]  # not needed after


@dataclass(frozen=True)
class RankProgram:
    """What one rank does, in order."""

    program: Program
    coords: Mapping[str, int]
    steps: tuple[Step, ...]
    last_waits: tuple[Node, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a group is not one step
    homes: Mapping[Node, Node] = field(default_factory=dict)  # next values of state that are copied to where the last one was


def takes_part(node: Node, coords: Mapping[str, int]) -> bool:
    """Whether the rank has anything to do with the node: it holds the result, or an operand that is sent."""
    here = any(t.layout.present(coords) for t in node.types)
    return here or (is_wire(node) and any(t.layout.present(coords) for a in node.args for t in a.types))


def rank_program(
    program: Program, rank: int, fuse: Collection[str | None] = (), donate: bool = False, target: str = "cpu", device: str = "cpu",
    far: Mapping[str, int] = MappingProxyType({}),
) -> RankProgram:  # fmt: skip
    """The steps of one rank. Groups along an axis in `fuse` become kernels over peer memory; collectives along one in `far`,
    where each message has its price, are sent several at once, up to so many bytes."""
    coords = program.mesh.coords(rank)
    blocks, reasons = blocks_of(program, rank, fuse, donate, target)
    grouped = {n for b in blocks for n in b.nodes}
    forms = peepholes_of(program, grouped, coords, donate, device)
    nodes = [n for n in order(program, far) if n in grouped or takes_part(n, coords)]
    taken = grouped.union(*(f.nodes for f in forms))
    forms += bundles_of(program, [n for n in nodes if is_wire(n) and n.attr("axis") in far and n not in taken], nodes, coords, far)
    units = in_blocks(_placed(program, nodes, forms, blocks), [*blocks, *forms])
    last, mine = _last_use(program, units), {n for n in nodes if takes_part(n, coords)}
    pending: dict[Node, None] = {}
    steps = []
    for i, unit in enumerate(units):
        args = dict.fromkeys(_args(unit))
        waits = tuple(a for a in args if a in pending)
        for a in waits:
            del pending[a]
        if isinstance(unit, Peephole) and unit.starts:
            pending |= dict.fromkeys(unit.outputs)
        elif isinstance(unit, Node) and is_wire(unit):
            pending[unit] = None
        steps.append(Step(unit, waits, tuple(a for a in args if last.get(a) == i and a in mine and not a.op.is_number)))
    homes = _homes(program, units) if donate and device == "cpu" and gathers_parameters(program) else {}
    return RankProgram(program, coords, tuple(steps), tuple(pending), reasons, homes)


def _homes(program: Program, units: Sequence[Node | Block | Peephole]) -> dict[Node, Node]:
    """State whose next value one node makes after all have read the last one."""
    at = {n: i for i, unit in enumerate(units) for n in ((unit,) if isinstance(unit, Node) else unit.nodes)}
    found = {}
    for name, n in program.outputs:
        home = program.input_names.get(program.next_of.get(name, ""))
        if home is None or not n.shape or n.type != home.type or program.outputs_of(home) or len(program.outputs_of(n)) > 1:
            continue
        if at.get(n, -1) >= 0 and units[at[n]] is n and not is_wire(n) and all(at.get(u, 0) <= at[n] for u in _readers(program, home)):
            found[n] = home
    return found


def _placed(program: Program, nodes: Sequence[Node], forms: Sequence[Peephole], blocks: Sequence[Block]) -> list[Node]:
    """The order of nodes with every form where the last of its nodes is, or the first. One that overwrites what is read later comes
    at the end, and so does a kernel that overwrites."""
    home = {n: f for f in forms for n in f.nodes}
    final: dict[Peephole, Node] = {}
    for n in nodes:
        if n in home and not (home[n].early and home[n] in final):
            final[home[n]] = n
    here = [n for n in nodes if n not in home or final[home[n]] is n]
    at = {n: i for i, n in enumerate(here)}
    where = {n: at[final[home[n]] if n in home else n] for n in nodes}

    overwriting = {n for b in blocks if any(call.fused.reused for call in b.calls) for n in b.nodes}

    def too_soon(n: Node) -> bool:
        olds = [old for _, old in home[n].instead] if n in home else []
        return n in overwriting or any(where.get(u, 0) > at[n] for old in olds for u in _readers(program, old))

    return sorted(here, key=too_soon)


def _readers(program: Program, node: Node) -> list[Node]:
    """Who reads a tensor, itself or what shares its memory."""
    found = list(program.users[node])
    for u in found:
        found += program.users[u] if u.op.kind is Kind.VIEW or u.op is slice_ else ()
    return found


def _args(unit: Node | Block | Peephole) -> tuple[Node, ...]:
    return unit.args if isinstance(unit, Node) else unit.inputs


def _last_use(program: Program, units: Sequence[Node | Block | Peephole]) -> dict[Node, int]:
    kept = {n for _, n in program.outputs}
    last = {a: i for i, unit in enumerate(units) for a in _args(unit)}
    return {a: i for a, i in last.items() if a not in kept}
