"""Random programs: a few ops drawn from the table of makers, often upon a motif that schedules are made for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.core.layout import Mesh
from weft.core.node import Node
from weft.core.program import Program, new_program
from weft.testing.comm_makers import MAKERS, Grow
from weft.testing.maker import Maker, Stuck
from weft.testing.motifs import MOTIFS
from weft.testing.values import draw_inputs

MESHES = (
    Mesh(a=2), Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=1), Mesh(dp=2, tp=2), Mesh(dp=2, tp=2), Mesh(dp=2, tp=3), Mesh(dp=3, tp=2),
    Mesh(pp=2, dp=2, tp=2),
)  # fmt: skip
OFTEN = ("all_reduce", "all_gather", "add", "mul", "matmul", "sum")  # what most verbs look for
MOST_OUTPUTS = 6


@dataclass(frozen=True)
class Sample:
    """A program and how its inputs are drawn."""

    program: Program
    kinds: dict[str, str]
    seed: int

    def inputs(self) -> dict[str, torch.Tensor]:
        return draw_inputs(self.program, self.seed, self.kinds)


def random_program(rng: random.Random, ops: Sequence[str] = (), motifs: Sequence[str] | None = None) -> Sample:
    """A valid program; `ops` are drawn more often than others, `motifs` are the only ones used."""
    maker = Maker(rng, rng.choice(MESHES), rng.randrange(2**31))
    chosen = [f for f in MOTIFS if motifs is None or f.__name__ in motifs]
    if chosen and rng.random() < 0.5:
        _grow(maker, rng.choice(chosen))
    names = [*MAKERS, *OFTEN * 4, *tuple(ops) * (len(MAKERS) // max(1, len(ops)))]
    wanted = rng.randint(2, 6)
    for _ in range(3 * wanted):
        wanted -= _grow(maker, MAKERS[rng.choice(names)])
        if not wanted:
            break
    return Sample(_program(maker), dict(maker.kinds), maker.seed)


def _grow(maker: Maker, grow: Grow) -> bool:
    """Whether something grew."""
    try:
        grow(maker)
    except Stuck:
        return False
    return True


def _program(m: Maker) -> Program:
    read = {a for n in m.pool for a in n.args}
    ends = [n for n in m.pool if n not in read and not (n.op.is_input or n.op.is_number)]
    rest = [n for n in m.pool if n in read and not (n.op.is_input or n.op.is_number)]
    ends = m.rng.sample(ends, min(len(ends), MOST_OUTPUTS))
    chosen = list(dict.fromkeys([n for n, _ in m.state] + ends + m.rng.sample(rest, min(len(rest), m.rng.choice((0, 0, 1, 2))))))
    chosen = chosen or [_fallback(m)]
    outputs = {f"y{k}": n for k, n in enumerate(chosen)}
    needed = _needed(chosen)
    inputs = [n for n in m.inputs if n in needed or m.rng.random() < 0.1]
    return new_program("p", m.mesh, inputs, outputs, state=_state(m, outputs, inputs))


def _fallback(m: Maker) -> Node:
    node: Node = m.keep(m.input(m.shape(), {}) * 2.0)
    return node


def _needed(roots: Sequence[Node]) -> set[Node]:
    seen, stack = set(roots), list(roots)
    while stack:
        for a in stack.pop().args:
            if a not in seen:
                seen.add(a)
                stack.append(a)
    return seen


def _state(m: Maker, outputs: dict[str, Node], inputs: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """What the motif calls state, and now and then any output with the type of an input."""
    pairs = dict(m.state)
    for n in outputs.values():
        same = [i for i in inputs if i.type == n.type and i not in pairs.values()]
        if n not in pairs and same and m.rng.random() < 0.3:
            pairs[n] = m.rng.choice(same)
    return tuple((name, str(pairs[n].attr("name"))) for name, n in outputs.items() if n in pairs and pairs[n] in inputs)
