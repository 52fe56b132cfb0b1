"""A program as the list of things one rank does: local shapes, spans of what is cut, groups, and who waits when.

Every rank derives its own list from the same program, in the same order, so collectives meet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from weft.codegen.blocks import Block, blocks_of, in_blocks
from weft.codegen.forms import Form, forms_of
from weft.core.layout import Atom, Layout, O, P, _atom_positions
from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.ops.registry import Kind

PREFETCH = 8  # how many computations ahead a gather of inputs may be started


@dataclass(frozen=True)
class Step:
    """One statement of a rank: a node to compute, or to start, or several at once, and the collectives to finish first."""

    what: Node | Block | Form
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


def is_wire(node: Node) -> bool:
    """A collective that really sends."""
    return node.op.kind is Kind.COMM and node.op.wire(2) > 0 and node.mesh.size(node.attr("axis")) > 1


def takes_part(node: Node, coords: Mapping[str, int]) -> bool:
    """Whether the rank has anything to do with the node: it holds the result, or an operand that is sent."""
    here = any(t.layout.present(coords) for t in node.types)
    return here or (is_wire(node) and any(t.layout.present(coords) for a in node.args for t in a.types))


def order(program: Program) -> list[Node]:
    """Collectives as soon as their operands are there, those of inputs a little ahead; forward as written, backward early."""
    nodes = [n for n in program.nodes if n.op.name != "input"]
    early = _after_results(program)
    at: dict[Node, tuple[float, float]] = {}
    for i, n in enumerate(nodes):
        made = [at[a] for a in n.args if a in at]
        if is_wire(n):
            base, depth = max(made) if made else (max(-0.5, i - PREFETCH - 0.5), 0.0)
            at[n] = base, depth + 0.5
        elif n in early and made and not any(is_wire(a) for a in n.args):
            base, depth = max(made)
            at[n] = base, depth + 1.0
        else:
            at[n] = float(i), 0.0
    number = {n: i for i, n in enumerate(nodes)}
    return sorted(nodes, key=lambda n: (at[n], number[n]))


def _after_results(program: Program) -> set[Node]:
    """Nodes that only state needs: gradients and updates. Done as soon as they can be, they let go of what they read,
    and their collectives have the rest of the step to hide behind."""
    kept = dict(program.state)
    results = [n for name, n in program.outputs if name not in kept]
    if not results or len(results) == len(program.outputs):
        return set()
    return set(program.nodes) - set(toposort(results))


def rank_program(
    program: Program, rank: int, fuse: Collection[str | None] = (), donate: bool = False, target: str = "cpu", device: str = "cpu"
) -> RankProgram:
    """The steps of one rank. Groups along an axis in `fuse` become kernels over peer memory."""
    coords = program.mesh.coords(rank)
    blocks, reasons = blocks_of(program, rank, fuse, donate, target)
    grouped = {n for b in blocks for n in b.nodes}
    forms = forms_of(program, grouped, coords, donate, device)
    nodes = [n for n in order(program) if n in grouped or takes_part(n, coords)]
    units = in_blocks(_placed(nodes, forms), [*blocks, *forms])
    last, mine = _last_use(program, units), {n for n in nodes if takes_part(n, coords)}
    pending: dict[Node, None] = {}
    steps = []
    for i, unit in enumerate(units):
        args = dict.fromkeys(_args(unit))
        waits = tuple(a for a in args if a in pending)
        for a in waits:
            del pending[a]
        if isinstance(unit, Form) and unit.starts:
            pending |= dict.fromkeys(unit.outputs)
        elif isinstance(unit, Node) and is_wire(unit):
            pending[unit] = None
        steps.append(Step(unit, waits, tuple(a for a in args if last.get(a) == i and a in mine and a.op.name != "const")))
    return RankProgram(program, coords, tuple(steps), tuple(pending), reasons)


def _placed(nodes: Sequence[Node], forms: Sequence[Form]) -> list[Node]:
    """The order of nodes with every form where the last of its nodes is, and those that overwrite at the end."""
    home = {n: f for f in forms for n in f.nodes}
    final = {home[n]: n for n in nodes if n in home}
    here = [n for n in nodes if n not in home or final[home[n]] is n]
    return sorted(here, key=lambda n: n in home and home[n].last)


def _args(unit: Node | Block | Form) -> tuple[Node, ...]:
    return unit.args if isinstance(unit, Node) else unit.inputs


def _last_use(program: Program, units: Sequence[Node | Block | Form]) -> dict[Node, int]:
    kept = {n for _, n in program.outputs}
    last = {a: i for i, unit in enumerate(units) for a in _args(unit)}
    return {a: i for a, i in last.items() if a not in kept}


# -- how cut things lie in local memory ------------------------------------------------------------------------------------------


def local_size(atom: Atom, layout: Layout, coords: Mapping[str, int], without: str | None = None) -> int:
    """Indices of the atom that the rank holds, as if one axis did not cut it."""
    bare = Atom(atom.size, tuple(a for a in atom.cut if a != without))
    start, stop = _atom_positions(bare, layout.mesh, tuple(coords.items()))
    return stop - start


@dataclass(frozen=True)
class Lie:
    """How the part an axis cuts lies in a rank's local tensor: [before, mine, after], of `whole` were it not cut."""

    before: int
    mine: int
    after: int
    whole: int
    start: int  # of this rank's piece within the whole part


def lie_of(layout: Layout, axis: str, coords: Mapping[str, int]) -> Lie:
    at = layout.where_cut(axis)
    assert at is not None
    d, k = at
    local = layout.local_shape(coords)
    atoms = layout.dims[d]
    before = math.prod(local[:d]) * math.prod(local_size(a, layout, coords) for a in atoms[:k])
    after = math.prod(local_size(a, layout, coords) for a in atoms[k + 1 :]) * math.prod(local[d + 1 :])
    mine = local_size(atoms[k], layout, coords)
    innermost = atoms[k].cut[-1] == axis
    whole = local_size(atoms[k], layout, coords, without=axis) if innermost else mine * layout.mesh.size(axis)
    step = -(-whole // layout.mesh.size(axis))
    return Lie(before, mine, after, whole, min(coords[axis] * step, whole))


def pending_op(layout: Layout, axis: str) -> str:
    place = layout.placement(axis)
    assert isinstance(place, P)
    return place.op


def root_of(layout: Layout, axis: str) -> int:
    place = layout.placement(axis)
    assert isinstance(place, O)
    return place.root
