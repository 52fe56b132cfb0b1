"""Which nodes of a program play the same part in repeated blocks, so that one choice serves them all.

Nodes of equal place in instances of a block correspond. All other nodes, the gradients of a block among them, are distinguished
by op and shapes, then by the parts their operands and readers play, a few rounds over. Tying only ever forgoes choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from weft.core.node import Node
from weft.core.program import Program

ROUNDS = 3


class Instance(Protocol):
    """Where a block stands in a program."""

    @property
    def parameters(self) -> tuple[Node, ...]: ...

    @property
    def nodes(self) -> tuple[Node, ...]: ...


def parts(program: Program, blocks: Sequence[Sequence[Instance]]) -> dict[Node, int]:
    """A number for the part each node plays; without blocks every node plays its own."""
    if not blocks:
        return {n: i for i, n in enumerate(program.nodes)}
    placed = _placed(program, blocks)
    part: Mapping[Node, object] = {n: placed.get(n, _looks(n)) for n in program.nodes}
    for _ in range(ROUNDS):
        seen = {n: placed.get(n, (part[n], *(part[a] for a in n.args), _readers(program, part, n))) for n in program.nodes}
        part = _numbered(program, seen)
    return _numbered(program, part)


def _placed(program: Program, blocks: Sequence[Sequence[Instance]]) -> dict[Node, object]:
    """Nodes by their place in the outermost block they belong to."""
    placed: dict[Node, object] = {}
    for b, instances in sorted(enumerate(blocks), key=lambda item: -max(len(i.nodes) for i in item[1])):
        for instance in instances:
            for i, n in enumerate((*instance.parameters, *instance.nodes)):
                if n in program.node_set:
                    placed.setdefault(n, ("block", b, i))
    return placed


def _looks(node: Node) -> object:
    attrs = tuple((k, str(v)) for k, v in node.attrs if k not in ("site", "name", "mesh"))
    return node.op.name, attrs, tuple((t.shape, str(t.dtype)) for t in node.types)


def _readers(program: Program, part: Mapping[Node, object], node: Node) -> tuple[object, ...]:
    return tuple(sorted({str(part[u]) for u in program.users[node]}))


def _numbered(program: Program, keys: Mapping[Node, object]) -> dict[Node, int]:
    numbers: dict[object, int] = {}
    return {n: numbers.setdefault(keys[n], len(numbers)) for n in program.nodes}
