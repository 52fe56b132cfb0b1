"""4. Meaning: a program is walked in three ways that differ only in what `compute` and `communicate` do: on one device, where communication
is nothing at all; on simulated ranks in this process; and, in `processes`, as one of many real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from .layouts import Mesh, collect, pieces, shards_of, tensor, together
from .nodes import INPUT, Node, Program, make


def walk(p: Program, values: Mapping[str, Any], compute: Callable[..., Any], communicate: Callable[[Node, Any], Any]) -> dict[str, Any]:
    have: dict[Node, Any] = {}
    for node in p.nodes:
        if node.op is INPUT:
            have[node] = values[node.attrs[0]]
        elif node.op.moves:
            have[node] = communicate(node, have[node.args[0]])
        else:
            have[node] = compute(node, *(have[a] for a in node.args))
    return {name: have[node] for name, node in p.outputs.items()}


def compute(node: Node, *xs: Tensor) -> Tensor:
    assert node.op.run is not None
    return node.op.run(*xs, *node.attrs)


def on_one_device(p: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the program means."""
    return walk(p, values, compute, lambda node, x: x)


def on_simulated_ranks(p: Program, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What all ranks together compute, each seeing only what it holds."""
    locals_ = {name: shards_of(values[name], node.type) for name, node in p.inputs.items()}
    parts = walk(p, locals_, lambda node, *lists: [compute(node, *xs) for xs in zip(*lists, strict=True)], exchange)
    return {name: collect(parts[name], node.type) for name, node in p.outputs.items()}


def exchange(node: Node, parts: list[Tensor]) -> list[Tensor]:
    """In each group of ranks along the axis: put the value together from its old layout, split it into the new one."""
    axis, *dim = node.attrs
    before, after = node.op.moves  # type: ignore[misc]
    out = list(parts)
    for group in groups(node.type.mesh, axis):
        value = together(before(*dim), [parts[r] for r in group])
        for r, piece in zip(group, pieces(after(*dim), value, len(group)), strict=True):
            out[r] = piece
    return out


def groups(m: Mesh, axis: str) -> Iterator[list[int]]:
    """The ranks that differ along one axis only."""
    inner = math.prod(n for _, n in m.axes[[a for a, _ in m.axes].index(axis) + 1 :])
    n = m.size(axis)
    for start in range(m.ranks):
        if start // inner % n == 0:
            yield [start + i * inner for i in range(n)]


# -- erasure -----------------------------------------------------------------------------------------------------------------
#
# Take out all communication and all layouts: what is left is the program for one device. Each op, in every layout its type
# accepts, computes its global value; communication changes no value. So two programs that type and leave the same behind
# mean the same, whatever was done to them. Nodes are made once, so "the same" is one comparison of objects.


@cache
def erase(node: Node) -> Node:
    if node.op is INPUT:
        name, t = node.attrs
        return INPUT(name, tensor(t.mesh, *t.shape))
    if node.op.moves:
        return erase(node.args[0])
    return make(node.op, tuple(erase(a) for a in node.args), node.attrs)


def same_meaning(p: Program, q: Program) -> bool:
    return {k: erase(n) for k, n in p.outputs.items()} == {k: erase(n) for k, n in q.outputs.items()}
