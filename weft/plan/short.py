"""A captured step made short: one of its repeated blocks, or of the groups that do, between what stands before the first and behind the last.
Of a model with several rows of blocks, an encoder's and a decoder's, one of each: row i is part 2 i + 1, and what follows it the next.

All that is priced of a stack of equal blocks follows from it, so it costs as little to plan a hundred layers as two. Values that many blocks
read (rotary tables, masks, an encoder's output) are read by the one that is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from weft.autodiff import grad
from weft.core.errors import PlanError
from weft.core.node import Node, remade, toposort
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.plan.layers import ATTENTION, FFN, FULL, MOST_OF_IT, ROWS, Layers, Row

FIRST, LAYER = 0, 1  # parts of it: what stands before all rows, and the first row
WAYS = ("activation", "ffn", "selective", "per-op")  # of running a part of a block again


@dataclass(frozen=True, eq=False)
class Short:
    """A captured step with one of its repeated blocks, and the part of every node."""

    program: Program
    part: Mapping[Node, int]
    active: frozenset[Node]  # forward nodes that read both batch and parameters
    repeats: tuple[int, ...]  # of each row
    boundary: tuple[tuple[Node, ...], ...]  # what the block of each row hands on
    ways: Mapping[tuple[int, str, int], frozenset[Node]]  # what is recomputed of the block of a part, or of half of it
    half: frozenset[Node]  # of the block, up to the place where it may be split into two; empty where it may not

    @property
    def rows(self) -> range:
        """The parts that repeat."""
        return range(LAYER, self.last, 2)

    @property
    def last(self) -> int:
        """The part behind all rows."""
        return 2 * len(self.repeats)


def short_of(captured: Captured) -> Short:
    """The short step; refused where too little repeats."""
    layers = Layers(captured)
    ahead, rows = layers.forward, layers.rows
    blocks = sum(row.blocks for row in rows if row.count > 1)
    if not 0 < len(rows) <= ROWS or blocks < max(2, MOST_OF_IT * layers.count):
        found = f"{layers.count} blocks, of which {blocks} in {len(rows)} rows are the same"
        raise PlanError("the model is no stack of equal blocks", needed="most of its blocks isomorphic, or in groups that are", found=found)
    became = _shortened(layers, rows)
    units = [range(row.start, row.start + row.period) for row in rows]
    ends = tuple(tuple(became[n] for n in ahead.given(layers.blocks[unit[-1]])) for unit in units)
    loss = became[ahead.loss]
    order = toposort([loss])
    kept = set(order)
    part = _parts(order, [{became[n] for k in unit for n in layers.nodes(k)} for unit in units], ends)
    active = frozenset(became[n] for n in ahead.active if n in became) & kept
    forward = new_program(captured.program.name, captured.program.mesh, [n for n in captured.program.inputs if n in kept], {"loss": loss})
    wanted = [name for name, x in captured.parameters.items() if name in forward.input_names and x.requires_grad and x.is_floating_point()]
    program = grad(forward, "loss", wanted)
    modes = {
        (2 * i + 1, mode, half): frozenset(became[n] for k in unit for r in layers.again(k, mode, half) for n in r.nodes)
        for i, unit in enumerate(units) for mode in WAYS for half in (ATTENTION, FFN, FULL)
    }  # fmt: skip
    row = rows[0]
    halved = len(rows) == row.period == 1 and layers.middle(row.start) is not None
    half = frozenset(layers.nodes(row.start, ATTENTION)) if halved else frozenset[Node]()
    return Short(program, _backward_parts(program, part, active), active, tuple(row.count for row in rows), ends, modes, half)


def _shortened(layers: Layers, rows: Sequence[Row]) -> dict[Node, Node]:
    """What becomes of every forward node that is left when each row is but its first unit."""
    ahead, became = layers.forward, {n: n for n in layers.forward.main}
    for row in rows:
        first, last = (ahead.given(layers.blocks[row.start + k - 1]) for k in (row.period, row.blocks))
        swap = {became[b]: became[a] for a, b in zip(first, last, strict=True)}
        made = remade([became[ahead.loss]], swap)
        became = {n: made[m] for n, m in became.items() if m in made}
    return became


def _parts(order: Sequence[Node], blocks: Sequence[Collection[Node]], ends: Sequence[Collection[Node]]) -> dict[Node, int]:
    """Forward nodes by part: of a row its block, behind it what reads what it hands on, before all rows the rest."""
    inside = {n: 2 * i + 1 for i, block in enumerate(blocks) for n in block}
    given = {n: 2 * i + 2 for i, end in enumerate(ends) for n in end}
    part: dict[Node, int] = {}
    for n in order:
        behind = [max(given.get(a, FIRST), part[a] if part[a] % 2 == 0 else FIRST) for a in n.args]
        part[n] = inside.get(n, max(behind, default=FIRST))
    return part


def _backward_parts(program: Program, part: Mapping[Node, int], active: Collection[Node]) -> dict[Node, int]:
    """A backward node belongs to the part of what it needs of the forward pass, and never to a later one than its cotangent; what leads to the
    gradient of a weight alone, to no part before the weight's."""
    found, weights = dict(part), _weights(program, part)
    for n in program.nodes:
        if n in found:
            continue
        needs = [found[a] for a in n.args if a in active]
        cotangents = [found[a] for a in n.args if a not in part]
        found[n] = min([*cotangents, max(needs)]) if needs else min(cotangents, default=max(part.values()))
        if n in weights:
            found[n] = max(found[n], min([*cotangents, weights[n]]))
    return found


def _weights(program: Program, part: Mapping[Node, int]) -> dict[Node, int]:
    """Nodes that lead to the gradient of one weight and nothing else, with the part that reads the weight first."""
    found: dict[Node, int] = {}
    for name, n in program.outputs:
        readers = [part[u] for u in program.users[program.input_names[name[2:]]] if u in part] if name.startswith("d.") else []
        found |= {n: min(readers)} if readers else {}
    for n in reversed(program.nodes):
        homes = {found.get(u) for u in program.users[n]}
        if n not in part and n not in found and len(homes) == 1 and (home := homes.pop()) is not None:
            found[n] = home
    return found
