"""What every writer of fused kernels needs: which values a kernel loads, keeps and stores, and how to write an expression.

A kernel works on vertex v and column j. Passes over the edges of v split it: level i comes before the i-th pass.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from weft.dynamic import ops
from weft.dynamic.kernel import SEGMENT, Access, Kernel, operands
from weft.dynamic.phases import base, domain
from weft.dynamic.store import Pointer, Row, Stores

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}


class Emitter:
    """One kernel on its way to text. A subclass says what the language is like."""

    calls: ClassVar[dict[str, str]] = {}  # function -> its name in the language

    def __init__(self, kernel: Kernel, stores: Stores, name: str) -> None:
        self.kernel, self.stores, self.name = kernel, stores, name
        self.pointers: list[Pointer] = []
        self.level = kernel.level()
        self.edges = {n for n in kernel.nodes if domain(n) == "edge"}
        every = [*kernel.nodes, *kernel.loads]
        self.dtype = next((n.meta["val"].dtype for n in every if n.meta["val"].dtype.is_floating_point), torch.float32)

    def at(self, pointer: Pointer) -> str:
        """The name of an argument."""
        if pointer not in self.pointers:
            self.pointers.append(pointer)
        return f"p{self.pointers.index(pointer)}"

    def index(self, name: str) -> str:
        return self.at(Pointer("index", name))

    def vertices(self, level: int) -> list[fx.Node]:
        """Vertex ops of a level that are computed there (sums over edges come out of the pass before)."""
        return [n for n in self.kernel.nodes if n not in self.edges and self.level[n] == level and n.target not in SEGMENT]

    def sums(self, level: int) -> list[fx.Node]:
        """Sums and maxima that the pass after a level makes."""
        return [n for n in self.kernel.nodes if n.target in SEGMENT and self.level[n] == level + 1]

    def edge_ends(self, level: int) -> list[fx.Node]:
        """Edge values stored in the pass after a level."""
        return [n for n in self.kernel.stored if n in self.edges and self.level[n] == level]

    def levels(self) -> range:
        return range(max(self.level.values(), default=0) + 1)

    def gradients(self) -> list[fx.Node]:
        """Gradients of states that the kernel reads: sums over the readers of the vertex."""
        found = {base(n) for n in self.kernel.loads} & set(self.stores.gradients)
        return sorted(found, key=lambda n: n.name)

    def needed(self, ends: list[fx.Node]) -> list[fx.Node]:
        """The edge ops that `ends` depend on, in order."""
        found: set[fx.Node] = set()
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in self.edges and node not in found:
                found.add(node)
                todo += operands(node)
        return [n for n in self.kernel.nodes if n in found]

    def kept(self) -> set[fx.Node]:
        """Vertex values read in another level or in a pass over edges than the one that makes them."""
        out = {n for n in self.kernel.nodes if n.target in SEGMENT}
        for node in self.kernel.nodes:
            if node in self.edges:
                out |= {a for a in operands(node) if node.target is ops.spread and a in self.level}
            else:
                out |= {a for a in operands(node) if a in self.level and a not in self.edges and self.level[a] != self.level[node]}
        return out

    def place(self, node: fx.Node) -> tuple[str, Pointer, Row, int]:
        """(argument, pointer, row, columns) of a stored value."""
        pointer, row = self.stores.where(node)
        return self.at(pointer), pointer, row, self.stores.columns(node)

    def write(self, e: Any, value: Any) -> str:
        """An expression as text; `value(node)` gives the text of an operand."""
        if isinstance(e, fx.Node):
            return value(e)
        if not isinstance(e, tuple):
            return self.number(float(e))
        function, *args = e
        texts = [self.write(a, value) for a in args]
        if function in INFIX:
            return f"({texts[0]} {INFIX[function]} {texts[1]})"
        if function == "neg":
            return f"(-{texts[0]})"
        return self.calls[function].format(*texts)

    def number(self, x: float) -> str:
        raise NotImplementedError


def column(access: Access, lane: str, over: str = "/") -> str:
    """The address of a column: offset + sum over dims of (column / after % size) * stride."""
    terms = [str(access.offset)] if access.offset else []
    for i, (after, size, stride) in enumerate(access.dims):
        if stride:
            at = lane if after == 1 else f"({lane} {over} {after})"
            at = at if i == 0 else f"({at} % {size})"
            terms.append(at if stride == 1 else f"{at} * {stride}")
    return " + ".join(terms) or "0"


def is_bool(node: fx.Node) -> bool:
    return node.meta["val"].dtype is torch.bool
