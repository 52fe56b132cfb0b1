"""One class of one batch while it runs: its buffers, its index arrays, and its steps bound to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.node import Node
from weft.dynamic.cell import Cell
from weft.dynamic.compiled import Bound, Code, Span
from weft.dynamic.kernel import Kernel
from weft.dynamic.lower import reads, run
from weft.dynamic.phases import base, domain, is_view
from weft.dynamic.schedule import Block
from weft.dynamic.store import Home, Pointer
from weft.dynamic.workspace import Workspace
from weft.runtime import split_matmul

GLOBAL = ("state", "message", "push", "output")  # buffers over all classes
Compiled = Mapping[int, Code]  # by the id of the kernel


@dataclass
class Frame:
    """Its buffers come from the workspace when they are first asked for."""

    name: str
    cell: Cell
    block: Block
    places: int  # rows of buffers over all classes: all vertices and one row of zeros
    edges: int
    index: Mapping[str, Tensor]
    workspace: Workspace
    compiled: Compiled
    in_parts: bool = False  # float32 matmuls as several of fewer bits

    def __post_init__(self) -> None:
        self.fixed: dict[Node, Tensor] = {}  # weights, and what is made of weights alone
        self.local: dict[Node, Any] = {}
        self.constants: dict[Node, Tensor] = {}
        self.split: dict[Node, split_matmul.Halves] = {}
        self.span: Span = (0, self.block.count, 0, self.block.edge_count)
        self._bound: dict[str, list[Bound]] = {}
        self._buffers: dict[Home, Tensor] = {}

    def run(self, phase: str, span: Span) -> None:
        """All steps of a phase on a range of rows."""
        for step in self.bind(phase):
            step(span)
        if phase == "weights":
            for node, copy in self.constants.items():
                copy.copy_(self.fetch(node, span))
            for node, halves in self.split.items():
                halves.fill(self.fetch(node, span))

    def bind(self, phase: str) -> list[Bound]:
        """The steps of a phase with their buffers."""
        steps = self._bound.get(phase)
        if steps is None:
            copies = [self._copy(*found) for found in self.cell.copies.get(phase, ())]
            steps = self._bound[phase] = [*map(self._bind, self.cell.steps[phase]), *copies]
        return steps

    def run_all_rows(self, phase: str) -> None:
        """A phase on all rows of the class."""
        if self.block.count or phase == "weights":
            self.run(phase, self.span)

    def total(self, node: Node) -> Tensor:
        """A sum over all rows of the class, a weight gradient say, worked out when it is asked for."""
        phased = self.cell.phased
        if phased.phase.get(node) != "sums" and node not in phased.again and not (is_view(node) and not domain(node)):
            return self.fetch(node, self.span)
        if node not in self.local:
            args = self._args(node, self.total)
            if self.in_parts and _is_matmul(node) and split_matmul.fits(args[0].t(), args[1]):
                self.local[node] = split_matmul.over_rows(args[0].t(), args[1])
            else:
                self.local[node] = run(node, args, self._sizes(node, self.span))
        return self.local[node]

    def forget_totals(self) -> None:
        self.local = {}

    # --- where values are

    def buffer(self, home: Home) -> Tensor:
        """The rows of a home that belong to this class (or, for scratch, to the current round)."""
        found = self._buffers.get(home)
        if found is None:
            found = self.everywhere(home)
            if home.kind in GLOBAL:
                block = self.block
                start, count = (block.start, block.count) if home.domain == "row" else (block.edge_start, block.edge_count)
                found = found[start : start + count]
            self._buffers[home] = found
        return found

    def everywhere(self, home: Home) -> Tensor:
        """The full buffer of a home, over all classes where it is shared."""
        edges = home.domain == "edge"
        if home.kind in GLOBAL:
            rows = self.edges if edges else self.places
            return self.workspace.take((home.kind, home.key), (rows, *home.shape), home.dtype)
        rows = self.block.edge_count if edges else self.block.count
        return self.workspace.take((self.name, home.kind, home.key), (rows, *home.shape), home.dtype)

    def slice(self, home: Home, span: Span) -> Tensor:
        """The rows of a home for a range of rows."""
        lo, hi = (span[0], span[1]) if home.domain == "row" else (span[2], span[3])
        return self.buffer(home)[: hi - lo] if home.kind == "scratch" else self.buffer(home)[lo:hi]

    def fetch(self, node: Node, span: Span) -> Tensor:
        """The value of a node for a range of rows."""
        if node in self.fixed:
            return self.fixed[node]
        stores = self.cell.stores
        if node in stores.homes:
            return stores.homes[node].show(self.slice(stores.homes[node], span))
        if node in self.local:
            return self.local[node]
        if node in stores.children:
            return self._gather(node, span)
        if node in stores.gradients:
            return self._collect(node, span)
        if node.op.is_input:
            return self._edge_rows(span)
        out = self._call(node, span)
        if base(node).op.is_input and not domain(node):
            self.fixed[node] = out  # a view of a weight stays what it is
        return out

    def _gather(self, node: Node, span: Span) -> Tensor:
        """States of children; a view where they already lie in order."""
        home, row = self.cell.stores.children[node]
        edges = row.index == "edge_child"
        start = self.block.edge_start if edges else self.block.start
        lo, hi = span[2:] if edges else span[:2]
        at = self.index[row.index][start + lo : start + hi]
        states = self.everywhere(home)
        first = _run(at)
        return states.index_select(0, at) if first is None else states[first : first + len(at)]

    def _collect(self, node: Node, span: Span) -> Tensor:
        """The gradient of a state: the sum of the messages its readers sent."""
        lo, hi = span[:2]
        out = torch.zeros((hi - lo, *node.shape[1:]), dtype=node.dtype, device=self.workspace.device)
        for via in self.cell.stores.gradients[node]:
            first = self.index[via.first][self.block.start + lo : self.block.start + hi + 1]
            at = self.index[via.index][int(first[0]) : int(first[-1])]
            to = torch.repeat_interleave(torch.arange(hi - lo, device=at.device), first[1:] - first[:-1])
            out.index_add_(0, to, self.everywhere(via.home).index_select(0, at))
        return out

    def _edge_rows(self, span: Span) -> Tensor:
        """For each edge the row it belongs to, counted from the first of the range."""
        start = self.block.edge_start
        return self.index["edge_vertex"][start + span[2] : start + span[3]] - (self.block.start + span[0])

    # --- steps

    def _bind(self, step: Kernel | Node) -> Bound:
        if isinstance(step, Kernel):
            return self._kernel(step)
        home = self.cell.stores.homes.get(step)
        if _is_matmul(step) and home is not None and not domain(step.args[1]) and _in_order(home):
            return self._matmul(step, home)
        return self._other(step, home)

    def _kernel(self, kernel: Kernel) -> Bound:
        code = self.compiled[id(kernel)]
        return code.bind([self.argument(p) for p in code.pointers], self.block.edge_start)

    def _matmul(self, node: Node, home: Home) -> Bound:
        """Rows times a matrix, straight into its buffer."""
        left, right = node.args
        out, scratch = self.buffer(home), home.kind == "scratch"
        shape = None if not home.folded and len(home.shape) == 1 else (-1, node.shape[1])
        a, b = (0, 1) if home.domain == "row" else (2, 3)
        halves = self.halves(right) if self.in_parts and home.dtype is torch.float32 else None

        def step(span: Span) -> None:
            into = out[: span[b] - span[a]] if scratch else out[span[a] : span[b]]
            into, x, matrix = into if shape is None else into.view(shape), self.fetch(left, span), self.fetch(right, span)
            if halves is not None and split_matmul.fits(x, into):
                split_matmul.rows(x, matrix, halves, into)
            else:
                torch.mm(x, matrix, out=into)

        return step

    def halves(self, node: Node) -> split_matmul.Halves:
        """A matrix without rows, split; filled anew in each run."""
        if node not in self.split:
            self.split[node] = split_matmul.Halves.of(self.fetch(node, self.span))
        return self.split[node]

    def _other(self, node: Node, home: Home | None) -> Bound:
        has_rows = bool(domain(node))

        def step(span: Span) -> None:
            value = self._call(node, span)
            if not has_rows:
                self.fixed[node] = value
            elif home is None:
                self.local[node] = value
            else:
                home.keep(self.slice(home, span), value)

        return step

    def _call(self, node: Node, span: Span) -> Any:
        return run(node, self._args(node, lambda n: self.fetch(n, span)), self._sizes(node, span))

    def _sizes(self, node: Node, span: Span) -> tuple[int, int] | None:
        return (span[1] - span[0], span[3] - span[2]) if node in self.cell.sized else None

    @staticmethod
    def _args(node: Node, find: Callable[[Node], Any]) -> list[Any]:
        """Numbers as they are; what is never computed is None."""
        found = {a: find(a) for a in reads(node)}
        return [a.attr("value") if a.op.is_number else found.get(a) for a in node.args]

    def _copy(self, node: Node, home: Home) -> Bound:
        def step(span: Span) -> None:
            home.keep(self.slice(home, span), self.fetch(node, span))

        return step

    def argument(self, pointer: Pointer) -> Tensor:
        """What a kernel gets for a pointer."""
        to = pointer.to
        if isinstance(to, str):
            by_place = to in ("edge_first", "reader_first") or (to.startswith("slot") and not to.endswith("_reader"))
            return self.index[to][self.block.start :] if by_place else self.index[to]
        if isinstance(to, Home):
            return self.buffer(to) if pointer.own else self.everywhere(to)
        return self._constant(to)

    def _constant(self, node: Node) -> Tensor:
        """A value without rows where kernels can find it in every run: the weight itself, or a copy made in each run."""
        value = self.fetch(node, self.span)
        if base(node).op.is_input and value.is_contiguous():
            return value
        if node not in self.constants:
            self.constants[node] = value.clone(memory_format=torch.contiguous_format)
        return self.constants[node]


def _in_order(home: Home) -> bool:
    """Whether a value's rows lie in the buffer as they do in the value."""
    return not home.at and (home.folded is None or home.folded[0] == 1)


def _is_matmul(node: Node) -> bool:
    return node.op.name == "matmul" and node.args[0].ndim == node.args[1].ndim == 2


def _run(at: Tensor) -> int | None:
    """The first number if the others follow one by one."""
    if at.device.type != "cpu" or len(at) == 0:
        return None
    array = at.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1 or not (np.diff(array) == 1).all():
        return None
    return first
