"""A captured step made short: one of its repeated blocks, or of the groups that do, between what stands before the first and behind the last.

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
from weft.plan.layers import ATTENTION, FFN, WHOLE, Layers

FIRST, LAYER, LAST = range(3)  # parts of it
MOST_OF_IT = 0.75  # of all blocks that a row must hold for a model to be a stack
WAYS = ("activation", "ffn", "selective", "per-op")  # of running a part of a block again


@dataclass(frozen=True, eq=False)
class Short:
    """A captured step with one of its repeated blocks, and the part of every node."""

    program: Program
    part: Mapping[Node, int]
    active: frozenset[Node]  # forward nodes that read both batch and parameters
    repeats: int
    boundary: tuple[Node, ...]
    ways: Mapping[tuple[str, int], frozenset[Node]]  # what runs again of the block, or of half of it
    half: frozenset[Node]  # of the block, up to the place where it may be cut in two; empty where it may not


def short_of(captured: Captured) -> Short:
    """The short step; refused where too little repeats."""
    layers = Layers(captured)
    ahead, row = layers.forward, layers.row
    if row.count < 2 or row.blocks < MOST_OF_IT * layers.count:
        found = f"{layers.count} blocks, of which {row.blocks} in a row are alike"
        raise PlanError("the model is no stack of equal blocks", needed="most of its blocks isomorphic, or in groups that are", found=found)
    unit = range(row.start, row.start + row.period)
    end, last = (ahead.given(layers.blocks[i]) for i in (unit[-1], row.start + row.blocks - 1))
    made = remade([ahead.loss], dict(zip(last, end, strict=True)))
    loss = made[ahead.loss]
    order = toposort([loss])
    kept = set(order)
    part = _parts(order, {n for k in unit for n in layers.nodes(k)}, set(end))
    active = frozenset(made[n] for n in ahead.active if n in made) & kept
    forward = new_program(captured.program.name, captured.program.mesh, [n for n in captured.program.inputs if n in kept], {"loss": loss})
    wanted = [name for name, x in captured.parameters.items() if name in forward.input_names and x.requires_grad and x.is_floating_point()]
    program = grad(forward, "loss", wanted)
    ways = {
        (way, half): frozenset(n for k in unit for r in layers.again(k, way, half) for n in r.nodes)
        for way in WAYS for half in (ATTENTION, FFN, WHOLE)
    }  # fmt: skip
    half = frozenset(layers.nodes(row.start, ATTENTION)) if row.period == 1 and layers.middle(row.start) is not None else frozenset[Node]()
    return Short(program, _backward_parts(program, part, active), active, row.count, end, ways, half)


def _parts(order: Sequence[Node], block: Collection[Node], ends: Collection[Node]) -> dict[Node, int]:
    """Forward nodes by part: behind the block what reads it, before it the rest."""
    part: dict[Node, int] = {}
    for n in order:
        behind = any(a in ends or part[a] == LAST for a in n.args)
        part[n] = LAYER if n in block else LAST if behind else FIRST
    return part


def _backward_parts(program: Program, part: Mapping[Node, int], active: Collection[Node]) -> dict[Node, int]:
    """A backward node belongs to the part of what it needs of the forward pass, and never to a later one than its cotangent."""
    found = dict(part)
    for n in program.nodes:
        if n in found:
            continue
        needs = [found[a] for a in n.args if a in active]
        cotangents = [found[a] for a in n.args if a not in part]
        found[n] = min([*cotangents, max(needs)]) if needs else min(cotangents, default=LAST)
    return found
