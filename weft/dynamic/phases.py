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

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from weft.dynamic.lower import Traced, aten
from weft.dynamic.sizes import EDGES, ROWS
from weft.dynamic.vertex import Source

FORWARD = ("weights", "eager", "rounds", "late")
BACKWARD = ("before", "back", "after", "sums")

VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.select.int,
    aten.unbind.int, aten.as_strided.default, aten.diagonal.default,
}  # fmt: skip


def is_view(node: fx.Node) -> bool:
    """Whether the node only looks at another one. Views run wherever they are needed and are never stored."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    return node.target in VIEWS


def base(node: fx.Node) -> fx.Node:
    """What a chain of views looks at."""
    while is_view(node):
        node = node.args[0]
    return node


def domain(node: fx.Node) -> str:
    """`row` or `edge` when the value has one slice per vertex or per edge, `` when it has neither."""
    value = node.meta["val"]
    sizes = (value[0] if isinstance(value, (list, tuple)) else value).shape
    return "row" if any(n and n % ROWS == 0 for n in sizes) else "edge" if any(n and n % EDGES == 0 for n in sizes) else ""


@dataclass
class Phased:
    """A traced function and the phase of each of its ops; `back` also names what reads the gradients of which child."""

    traced: Traced
    phase: dict[fx.Node, str] = field(default_factory=dict)

    def nodes(self, phase: str) -> list[fx.Node]:
        """The computed ops of a phase, in order."""
        return [n for n in self.traced.graph.nodes if self.phase.get(n) == phase]


def assign(traced: Traced) -> Phased:
    """Split the graph into phases by what each op depends on and what depends on it."""
    nodes = [n for n in traced.graph.nodes if n.op == "call_function"]
    roles: dict[fx.Node, set[str]] = {n: {_effect(s)} for s, n in traced.sources.items()}
    for node in nodes:
        roles[node] = set().union(*(roles[a] for a in node.all_input_nodes))
    reach = _reach(traced, nodes)
    out = Phased(traced)
    for node in nodes:
        if node.target is operator.getitem and not is_view(node):
            out.phase[node] = out.phase[node.args[0]]  # one of several results, there when they all are
        elif not is_view(node):
            out.phase[node] = _phase(node, roles[node], reach[node])
    return out


def _effect(source: Source) -> str:
    return {"slot": "child", "edge": "child", "at": "index"}.get(source.role, source.role)


def _reach(traced: Traced, nodes: list[fx.Node]) -> dict[fx.Node, set[str]]:
    """Which results depend on each node."""
    out: dict[fx.Node, set[str]] = {n: set() for n in traced.graph.nodes}
    for node in traced.states.values():
        out[node].add("state")
    for node in traced.outputs.values():
        out[node].add("output")
    for node in traced.messages.values():
        out[node].add("d_child")
    for node in traced.grads.values():
        out[node].add("grad")
    for node in reversed(nodes):
        for arg in node.all_input_nodes:
            out[arg] |= out[node]
    return out


def _phase(node: fx.Node, roles: set[str], reach: set[str]) -> str:
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


def is_sized(node: fx.Node) -> bool:
    """Whether some argument of the op names the number of rows or edges."""
    flat, _ = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    return any(isinstance(a, int) and not isinstance(a, bool) and a and (a % ROWS == 0 or a % EDGES == 0) for a in flat)
