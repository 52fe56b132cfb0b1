"""What the busiest rank holds while a program runs, and what a device must have for it."""

from __future__ import annotations

import itertools

from weft.core.node import Node
from weft.core.program import Program
from weft.ops.experts import left_out, sent
from weft.ops.host import COPIES
from weft.ops.registry import Kind, nbytes

FRAGMENTATION = 0.04  # of what is allocated; the caching allocator keeps blocks it cannot hand out again
RESIDENT = 1.5e9  # context, kernels, and buffers of the communication library, none of it seen by the allocator


def needed(stored: float) -> float:
    """Bytes a device must have where so many are in use."""
    return stored * (1 + FRAGMENTATION) + RESIDENT


def room(memory: float) -> float:
    """Bytes that may be in use on a device that has so many."""
    return (memory - RESIDENT) / (1 + FRAGMENTATION)


def peak_bytes(program: Program) -> int:
    """The most bytes the busiest rank holds at any time."""
    return max(live_bytes(program), default=0)


def least_bytes(program: Program) -> int:
    """What the busiest rank holds at the least, however well elementwise ops are fused: of these, only what others read."""
    return max(live_bytes(program, Lifetimes(program, len(program.nodes))), default=0)


def live_bytes(program: Program, spans: Lifetimes | None = None) -> list[int]:
    """What the busiest rank holds while each node runs."""
    spans, change = spans or Lifetimes(program), [0] * (len(program.nodes) + 1)
    for node in program.nodes:
        for index, type_ in enumerate(node.types):
            span = spans.of(node, index)
            if span is not None:
                change[span[0]] += nbytes(type_)
                change[span[1]] -= nbytes(type_)
    return list(itertools.accumulate(change[:-1]))


Span = tuple[int, int]  # half open


class Lifetimes:
    """When the values of a program take memory of their own, on a clock that ticks once per node.

    Inputs do throughout, every other value but numbers from its making to its last use, through views too, which share its storage. Of what one
    kernel makes only that is kept which others read, and the next value of a state is written over the last. `joined` elementwise readers, or
    fewer, are taken to be fused with the elementwise op they read, and next values of state to be written in place.
    """

    def __init__(self, program: Program, joined: int = 0) -> None:
        self.program, self.joined = program, joined
        self.time = {n: t for t, n in enumerate(program.nodes)}
        self.end = len(program.nodes)
        self._inputs = frozenset(program.inputs)
        self._replaced = {output for output, _ in program.state}
        self._of_results: dict[Node, list[list[Node]]] = {}
        made = dict(sent(program))  # which need no room for what they gather, nor for the sum of all tokens
        self._unmade = left_out(program) - {s.made[-1] for s in made.values()}
        self._sent = made.keys()
        self._kernel = {n: kernel for g in program.groups if g.kind == "fuse" for kernel in [frozenset(g.nodes)] for n in kernel}

    def of(self, node: Node, index: int) -> Span | None:
        """From when to when result `index` of a node takes memory; None where it takes none."""
        if node in self._inputs:
            return 0, self.end
        if node.op.kind is Kind.VIEW or not node.args or node in self._unmade or index == 0 and node in self._sent:
            return None
        readers, outputs = self._readers(node, index)
        if not (readers or outputs) or self._is_fused(node, readers, outputs):
            return None
        last = self.end - 1 if outputs else max(self.time[r] for r in readers)
        return self.time[node], last + 1

    def _is_fused(self, node: Node, readers: list[Node], outputs: list[str]) -> bool:
        """Whether a kernel keeps it to itself, or writes it over what it replaces."""
        kernel = self._kernel.get(node)
        if outputs:
            return all(name in self._replaced for name in outputs) and bool(kernel or self.joined and not readers)
        if kernel and kernel.issuperset(readers):
            return True
        return node.op.kind is Kind.POINTWISE and len(readers) <= self.joined and all(r.op.kind is Kind.POINTWISE for r in readers)

    def _by_result(self, node: Node) -> list[list[Node]]:
        """The readers of each result of a node: of all of them at once, since an update has hundreds."""
        if node not in self._of_results:
            found: list[list[Node]] = [[] for _ in node.types]
            for user in self.program.users[node]:
                for of_one in [found[user.attr("index")]] if user.op.is_item else found:
                    of_one.append(user)
            self._of_results[node] = found
        return self._of_results[node]

    def _readers(self, node: Node, index: int) -> tuple[list[Node], list[str]]:
        """Nodes that read a value's storage, through views too, and the outputs that hold it; a copy to the host's memory is no view of it."""
        readers: list[Node] = []
        outputs = self.program.outputs_of(node)
        todo = list(self._by_result(node)[index]) if len(node.types) > 1 else list(self.program.users[node])
        while todo:
            user = todo.pop()
            if user.op.kind is Kind.VIEW and user.op not in COPIES or user in self._unmade:
                outputs += self.program.outputs_of(user)
                todo += self.program.users[user]
            else:
                readers.append(user)
        return readers, outputs
