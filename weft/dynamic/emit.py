"""What every writer of fused kernels needs: which values a kernel loads, keeps and stores, and how to write an expression.

A kernel works on vertex v and column j. Passes over the edges of v split it: level i comes before the i-th pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.codegen import expr
from weft.codegen.expr import Slot, Value
from weft.codegen.text import Writer, bare
from weft.core.node import DTYPE_NAMES, Node
from weft.dynamic.kernel import Access, Kernel, operands, statement
from weft.dynamic.lower import is_segment, is_spread
from weft.dynamic.phases import base, domain
from weft.dynamic.store import Pointer, Row, Stores


class Emitter:
    """One kernel on its way to text. A subclass says what the language is like."""

    def __init__(self, kernel: Kernel, stores: Stores, name: str) -> None:
        self.kernel, self.stores, self.name = kernel, stores, name
        self.pointers: list[Pointer] = []
        self.level = kernel.level()
        self.edges = {n for n in kernel.nodes if domain(n) == "edge"}
        self.dtype = kernel.real or torch.float32

    def name_of(self, node: Node) -> str:
        return self.stores.names[node]

    def at(self, pointer: Pointer) -> str:
        """The name of an argument."""
        if pointer not in self.pointers:
            self.pointers.append(pointer)
        return f"p{self.pointers.index(pointer)}"

    def index(self, name: str) -> str:
        return self.at(Pointer("index", name))

    def vertices(self, level: int) -> list[Node]:
        """Vertex ops of a level that are computed there (sums over edges come out of the pass before)."""
        return [n for n in self.kernel.nodes if n not in self.edges and self.level[n] == level and not is_segment(n)]

    def sums(self, level: int) -> list[Node]:
        """Sums and maxima that the pass after a level makes."""
        return [n for n in self.kernel.nodes if is_segment(n) and self.level[n] == level + 1]

    def edge_ends(self, level: int) -> list[Node]:
        """Edge values stored in the pass after a level."""
        return [n for n in self.kernel.stored if n in self.edges and self.level[n] == level]

    def levels(self) -> range:
        return range(max(self.level.values(), default=0) + 1)

    def gradients(self) -> list[Node]:
        """Gradients of states that the kernel reads: sums over the readers of the vertex."""
        found = {base(n) for n in self.kernel.loads} & set(self.stores.gradients)
        return sorted(found, key=self.name_of)

    def needed(self, ends: list[Node]) -> list[Node]:
        """The edge ops that `ends` depend on, in order."""
        found: set[Node] = set()
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node in self.edges and node not in found:
                found.add(node)
                todo += operands(node)
        return [n for n in self.kernel.nodes if n in found]

    def kept(self) -> set[Node]:
        """Vertex values read in another level or in a pass over edges than the one that makes them."""
        out = {n for n in self.kernel.nodes if is_segment(n)}
        for node in self.kernel.nodes:
            if node in self.edges:
                out |= {a for a in operands(node) if is_spread(node) and a in self.level}
            else:
                out |= {a for a in operands(node) if a in self.level and a not in self.edges and self.level[a] != self.level[node]}
        return out

    def place(self, node: Node) -> tuple[str, Pointer, Row, int]:
        """(argument, pointer, row, columns) of a stored value."""
        pointer, row = self.stores.where(node)
        return self.at(pointer), pointer, row, self.stores.columns(node)

    def write(self, node: Node, text: Callable[[Node], str], writer: Writer) -> str:
        """What is computed for an op, as text; `text` gives that of an operand."""

        def leaf(n: Node) -> Value:
            value = expr.load(Slot(self.name_of(n), DTYPE_NAMES[n.dtype]))
            writer.name(value, text(n))
            return value

        value = statement(node, leaf)
        assert value is not None, "no kernel has such an op"
        return bare(writer.text(value))


def sums_up(node: Node) -> bool:
    """Whether edges are added up, rather than their maximum taken."""
    return node.op.name == "put"


def column(access: Access, lane: str, over: str = "/") -> str:
    """The address of a column: offset + sum over dims of (column / after % size) * stride."""
    terms = [str(access.offset)] if access.offset else []
    for i, (after, size, stride) in enumerate(access.dims):
        if stride:
            at = lane if after == 1 else f"({lane} {over} {after})"
            at = at if i == 0 else f"({at} % {size})"
            terms.append(at if stride == 1 else f"{at} * {stride}")
    return " + ".join(terms) or "0"


def is_bool(node: Node) -> bool:
    return node.dtype is torch.bool
