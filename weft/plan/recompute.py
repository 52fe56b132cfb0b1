"""Recomputation: of a repeated block only its inputs are kept, and it runs again before its backward pass.

Nodes are values, so running a block again needs inputs that are other nodes of the same value. Block i is remade over the items
of one tuple, `together(its inputs, what its backward pass starts from)`: the same values, there once all that stands after the
tuple's name is computed. Its backward pass then reads the second run, and of the first only the outputs outlive the block.

For a node b of the backward pass let l(b) be the least block it reads anything inside of, itself or through others. What b reads
has a level of l(b) or more, so what block i starts from, the nodes of a level above i that nodes of level i read and the gradients
of the next level, never waits for its second run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from weft.core.errors import PlanError
from weft.core.node import Node, make, op_named, toposort
from weft.core.program import Program
from weft.frontend.capture import Captured
from weft.plan.split import Stage, remade

Block = Collection[Node]


def recomputed(captured: Captured) -> Captured:
    """The captured step with every repeated block run twice."""
    blocks = [set(b.nodes) for group in captured.blocks for b in group]
    if not blocks or not captured.gradients:
        raise PlanError(
            "nothing can be recomputed",
            needed="repeated blocks, whose gradients follow from the forward pass",
            found="no block that repeats" if not blocks else "a model traced together with its backward pass",
            try_="leave out recompute",
        )
    kept = [name for name in captured.program.output_names if name == "loss" or name.startswith("buffer.")]
    program, made = recompute(captured.program, blocks, kept, list(captured.gradients.values()))
    return replace(captured, program=program, gradients={name: made[g] for name, g in captured.gradients.items()})


def recomputed_stage(stage: Stage, weights_apart: bool) -> Stage:
    """A pipeline stage with its repeated blocks run twice; where weight gradients come later, no block waits for them."""
    if not stage.blocks or stage.step is stage.forward:
        return stage
    gradients = [n for name, n in stage.step.outputs if name.startswith("d.")]
    program, _ = recompute(stage.step, stage.blocks, list(stage.forward.output_names), gradients, not weights_apart)
    return replace(stage, step=program)


def recompute(
    p: Program, blocks: Sequence[Block], forward: Sequence[str], gradients: Sequence[Node], before: bool = True
) -> tuple[Program, Mapping[Node, Node]]:
    """The program with blocks run again for their backward pass, and what became of its nodes.

    `forward` names the outputs of the forward pass. With `before`, a block waits for the gradients of the next one's parameters,
    which then need not wait with all they read.
    """
    made = _Again(p, blocks, forward, gradients, before).made()
    everything = remade([n for _, n in p.outputs], made)
    new = p.with_outputs([(name, everything[n]) for name, n in p.outputs], "recompute")
    return replace(new, lines={everything[n]: line for n, line in p.lines.items() if n in everything}), everything


class _Again:
    def __init__(self, p: Program, blocks: Sequence[Block], forward: Sequence[str], gradients: Sequence[Node], before: bool) -> None:
        self.ahead = set(toposort(p.output_names[name] for name in forward))
        at = {n: i for i, n in enumerate(p.nodes)}
        found = [sorted((n for n in b if n in self.ahead), key=at.__getitem__) for b in blocks]
        self.blocks = sorted((b for b in found if b), key=lambda b: at[b[0]])
        self.inside = self._inside(p, {p.output_names[name] for name in forward})
        self.back = [n for n in toposort(gradients) if n not in self.ahead]
        self.level = self._levels()
        self.starts = self._starts(gradients if before else ())
        self._second: dict[int, dict[Node, Node]] = {}
        self._made: dict[Node, Node] = {}

    def _inside(self, p: Program, roots: set[Node]) -> dict[Node, int]:
        """The block of everything only one block reads in the forward pass: what it makes on its way, and its parameters."""
        owner = {n: i for i, block in enumerate(self.blocks) for n in block}
        found = {}
        for n in self.ahead - roots:
            readers = {owner.get(u) for u in p.users[n] if u in self.ahead}
            block = next(iter(readers)) if len(readers) == 1 else None
            if block is not None and (owner.get(n) == block or n.op.name == "input"):
                found[n] = block
        return found

    def _levels(self) -> dict[Node, float]:
        level: dict[Node, float] = {}
        for n in self.back:
            level[n] = min((level.get(a, self.inside.get(a, math.inf)) for a in n.args), default=math.inf)
        return level

    def _starts(self, gradients: Iterable[Node]) -> dict[int, list[Node]]:
        """What each block's second run waits for."""
        starts: dict[int, dict[Node, None]] = {i: {} for i in range(len(self.blocks))}
        for n in self.back:
            for a in n.args:
                if self.level[n] < math.inf and self.level.get(a, -1) > self.level[n] and len(a.types) == 1:
                    starts[int(self.level[n])][a] = None
        levels = sorted({*self.level.values(), math.inf})
        for g in gradients:
            if g in self.level:
                below = [x for x in levels if x < self.level[g]]
                if below:
                    starts[int(below[-1])][g] = None
        return {i: list(nodes) for i, nodes in starts.items()}

    def made(self) -> dict[Node, Node]:
        """The backward pass over second runs, later blocks first."""
        for n in sorted(self.back, key=lambda n: -self.level[n]):
            args = tuple(self._read(a) for a in n.args)
            self._made[n] = make(n.op, args, dict(n.attrs))
        return self._made

    def _read(self, a: Node) -> Node:
        if a in self.inside:
            return self._run_again(self.inside[a])[a]
        return self._made.get(a, a)

    def _run_again(self, i: int) -> dict[Node, Node]:
        if i not in self._second:
            block = set(self.blocks[i])
            outer = dict.fromkeys(a for n in self.blocks[i] for a in n.args if a not in block and _is_value(a))
            tied = make(op_named("together"), (*outer, *(self._made[s] for s in self.starts[i])), {})
            second = {a: make(op_named("item"), (tied,), {"index": k}) for k, a in enumerate(outer)}
            for n in self.blocks[i]:
                second[n] = make(n.op, tuple(second.get(a, a) for a in n.args), dict(n.attrs))
            self._second[i] = second
        return self._second[i]


def _is_value(a: Node) -> bool:
    """Neither made from nothing nor a tuple."""
    return len(a.types) == 1 and (bool(a.args) or a.op.name == "input")
