"""When each op of a differentiated vertex function runs. Only what the recurrence forces runs round by round.

weights   no rows: once                                forward
eager     does not depend on the children: once over all vertices, before the rounds
rounds    depends on children, and parents depend on it: once per round
late      depends on children, only outputs depend on it: once over all vertices, after the rounds
before    does not depend on the gradient of states: once, before the rounds run backwards
back      depends on it, and the gradients for children depend on it: once per round, last round first
after     the rest with rows: once over all vertices at the end
sums      without rows, weight gradients above all: one matmul over all vertices, when it is asked for
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from weft.core.node import Node
from weft.dynamic.lower import Graph, domain_of, reads
from weft.dynamic.vertex import Source

FORWARD = ("weights", "eager", "rounds", "late")
BACKWARD = ("before", "back", "after", "sums")

VIEWS = frozenset({"reshape", "permute", "narrow", "expand"})


def is_view(node: Node) -> bool:
    """Whether the node only looks at another one. Views run wherever they are needed and are never stored."""
    return node.op.name in VIEWS and seen(node) is not None


@lru_cache(maxsize=1 << 14)
def seen(node: Node) -> Tensor | None:
    """A chain of views on what it looks at, without numbers, for its strides; None where elements must be copied."""
    if node.op.name not in VIEWS:
        return torch.empty(node.types[0].shape, device="meta")
    inner = seen(node.args[0])
    inner = torch.empty(node.args[0].shape, device="meta") if inner is None else inner
    if node.op.name != "reshape":
        return node.op.run(inner, **dict(node.attrs))  # type: ignore[no-any-return]
    try:
        return inner.view(node.shape)
    except RuntimeError:  # a view that the stored layout does not allow
        return None


def base(node: Node) -> Node:
    """What a chain of views looks at."""
    while is_view(node):
        node = node.args[0]
    return node


def domain(node: Node) -> str:
    """`row` or `edge` when the value has one slice per vertex or per edge, `` when it has neither."""
    return next((found for t in node.types if (found := domain_of(t.shape))), "")


@dataclass
class Phased:
    """A function and the phase of each of its ops."""

    graph: Graph
    phase: dict[Node, str] = field(default_factory=dict)
    again: set[Node] = field(default_factory=set)  # ops of `back` that also run over all vertices, for results that are sums over these

    def nodes(self, phase: str) -> list[Node]:
        """The computed ops of a phase, in order."""
        return [n for n in self.graph.nodes if self.phase.get(n) == phase]


def assign(graph: Graph) -> Phased:
    """Split the graph into phases by what each op depends on and what depends on it."""
    roles: dict[Node, set[str]] = {**{n: set() for n in graph.weights}, **{n: {_effect(s)} for s, n in graph.sources.items()}}
    for node in graph.nodes:
        roles[node] = set().union(*(roles[a] for a in reads(node)))
    reach = _reach(graph)
    out = Phased(graph)
    for node in graph.nodes:
        if node.op.is_item:
            (op,) = node.args
            out.phase[node] = out.phase[op]  # one of several results, there when they all are
            if out.phase[op] == "back" and not domain(node):
                out.phase[node] = "sums"
                out.again.add(op)
        elif not is_view(node):
            out.phase[node] = _phase(node, roles[node], reach[node])
    return out


def _effect(source: Source) -> str:
    return {"slot": "child", "edge": "child", "at": "index"}.get(source.role, source.role)


def _reach(graph: Graph) -> dict[Node, set[str]]:
    """Which results depend on each node."""
    out: dict[Node, set[str]] = {n: set() for n in graph.names}
    results = {"state": graph.states.values(), "output": graph.outputs.values(), "d_child": graph.messages.values(), "grad": graph.gradients()}
    for what, nodes in results.items():
        for node in nodes:
            out[node].add(what)
    for node in reversed(graph.nodes):
        for arg in reads(node):
            out[arg] |= out[node]
    return out


def _phase(node: Node, roles: set[str], reach: set[str]) -> str:
    rows = domain(node) != ""
    if not roles & {"d_state", "d_push"}:
        if not rows:
            return "weights"
        if "child" not in roles:
            return "eager"
        return "rounds" if "state" in reach else "late" if "output" in reach else "before"
    if not rows:
        return "sums"
    if "d_state" not in roles:
        return "before" if reach & {"d_child"} else "after"
    return "back" if "d_child" in reach else "after"
