"""When the values of a program take memory of their own, on a clock that ticks once per node.

Views share the storage of what they view. Results that replace an input of the next step are written in place. Pointwise ops
are fused with a pointwise reader of their own and leave nothing behind.
"""

from __future__ import annotations

from weft.core.node import Node
from weft.core.program import Program
from weft.ops.registry import Kind

Span = tuple[int, int]  # half open


class Lifetimes:
    """Spans of the values of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.time = {n: t for t, n in enumerate(program.nodes)}
        self.end = len(program.nodes)
        self._inputs = frozenset(program.inputs)
        self._replaced = {output for output, _ in program.state}

    def of(self, node: Node, index: int) -> Span | None:
        """From when to when result `index` of a node takes memory; None where it takes none."""
        if node.op.kind is Kind.VIEW:
            return None
        if node in self._inputs:
            return 0, self.end
        readers, outputs = self._readers(node, index)
        fused = node.op.kind is Kind.POINTWISE and not outputs and len(readers) == 1 and readers[0].op.kind is Kind.POINTWISE
        in_place = not readers and outputs and all(name in self._replaced for name in outputs)
        if fused or in_place or not (readers or outputs):
            return None
        last = self.end - 1 if outputs else max(self.time[r] for r in readers)
        return self.time[node], last + 1

    def _readers(self, node: Node, index: int) -> tuple[list[Node], list[str]]:
        """Nodes that read a value's storage, through views too, and the outputs that hold it."""
        readers: list[Node] = []
        outputs = self.program.outputs_of(node)
        todo = [u for u in self.program.users[node] if not u.op.is_item or u.attr("index") == index]
        while todo:
            user = todo.pop()
            if user.op.kind is Kind.VIEW:
                outputs += self.program.outputs_of(user)
                todo += self.program.users[user]
            else:
                readers.append(user)
        return readers, outputs
