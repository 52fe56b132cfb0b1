"""2. Nodes: a program is a graph of them. A node is never changed and made only once: asking for the same op on the same operands gives
the same node, so equal expressions are one object. Its type is worked out as it is made, so a wrong program fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .layouts import Placement, Type


@dataclass(frozen=True, eq=False)
class Op:
    """`infer(types, *attrs)` gives the type of the result; `run(*tensors, *attrs)` is what one rank does."""

    name: str
    infer: Callable[..., Type]
    run: Callable[..., Any] | None = None
    labels: Callable[[Sequence[Type]], tuple[list[list[str]], list[str]]] | None = None
    moves: tuple[Callable[..., Placement], Callable[..., Placement]] | None = None  # communication: from, to

    def __call__(self, *args: Any) -> Node:
        """Values first, then attributes."""
        nodes = tuple(a for a in args if isinstance(a, Node))
        return make(self, nodes, args[len(nodes) :])


@dataclass(frozen=True, eq=False)
class Node:
    op: Op
    args: tuple[Node, ...]
    attrs: tuple[Any, ...]
    type: Type


@cache
def make(op: Op, args: tuple[Node, ...], attrs: tuple[Any, ...]) -> Node:
    return Node(op, args, attrs, op.infer([a.type for a in args], *attrs))


def needed(roots: Iterable[Node]) -> list[Node]:
    """The roots and all they are made from, operands before their readers."""
    seen: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in seen:
            for a in node.args:
                visit(a)
            seen[node] = None

    for node in roots:
        visit(node)
    return list(seen)


INPUT = Op("input", infer=lambda types, name, type_: type_)


@dataclass(frozen=True)
class Program:
    """Named outputs. An output that has the name of an input is what that input becomes for the next step."""

    outputs: Mapping[str, Node]

    @property
    def nodes(self) -> list[Node]:
        return needed(self.outputs.values())

    @property
    def inputs(self) -> dict[str, Node]:
        return {n.attrs[0]: n for n in self.nodes if n.op is INPUT}

    def readers(self, node: Node) -> list[Node]:
        return [n for n in self.nodes if node in n.args]

    def __str__(self) -> str:
        names = {n: f"%{n.attrs[0]}" if n.op is INPUT else f"%{i}" for i, n in enumerate(self.nodes)}
        lines = []
        for n in self.nodes:
            given = [names[a] for a in n.args] + [repr(a) for a in n.attrs if n.op is not INPUT]
            lines.append(f"  {names[n]} = {n.op.name}({', '.join(given)})".ljust(40) + str(n.type))
        return "\n".join([*lines, f"  return {', '.join(f'{k}={names[n]}' for k, n in self.outputs.items())}"])


def trace(fn: Callable[..., Mapping[str, Node]], **inputs: Type) -> Program:
    return Program(fn(**{name: INPUT(name, t) for name, t in inputs.items()}))
