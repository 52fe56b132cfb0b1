"""Runs a batch: what is eager at once, then round by round, then what may wait; backwards likewise.

The full batch is one node of autograd. Its backward replays the rounds from the last to the first and forms every weight
gradient at the end, in one matmul over all vertices of a class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.dynamic.cell import Cell
from weft.dynamic.frame import Compiled, Frame
from weft.dynamic.layout import Layout
from weft.dynamic.phases import BACKWARD, FORWARD
from weft.dynamic.store import Home, Key, message_home
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Workspace

T = TypeVar("T")
CellKey = tuple[str, bool]  # type, has children


@dataclass
class Plan:
    """All classes of a model compiled for one kind of call."""

    cells: dict[CellKey, Cell]
    states: dict[str, tuple[int, ...]]
    outputs: dict[str, Home]
    compiled: Compiled
    weights: list[Tensor]
    sent: set[Key]
    dtype: torch.dtype
    backward: bool
    in_parts: bool = False  # float32 matmuls as several of fewer bits, where torch is asked to keep full precision


def _where_it_runs(method: Callable[..., T]) -> Callable[..., T]:
    """What the method makes from nothing is on its own device, whatever is the default."""

    @functools.wraps(method)
    def call(self: Batch, *args: Any) -> T:
        device = self.workspace.device
        with nullcontext() if torch.get_default_device() == device else torch.device(device):
            return method(self, *args)

    return call


class Batch:
    """Buffers and bound steps for one layout. `load` gives it graphs, then it runs forward and, once, backward."""

    def __init__(
        self, plan: Plan, layout: Layout, kinds: tuple[str, ...], workspace: Workspace, weights: list[Tensor], ends_in_zeros: bool = False
    ) -> None:
        self.plan, self.layout, self.workspace = plan, layout, workspace
        self.ends_in_zeros = ends_in_zeros  # the last row of every input, so that row -1 is one of zeros
        self.index: dict[str, Tensor] = {}
        self.frames: dict[int, Frame] = {}
        self.kinds = kinds
        self._weights = {id(w): v for w, v in zip(plan.weights, weights, strict=True)}

    def load(self, index: Mapping[str, Tensor], inputs: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
        """Index arrays, inputs and the rows to return, all on the device; `wanted` gives rows by output."""
        self.index, self.inputs, self.wanted = dict(index), inputs, wanted
        for k, block in self.layout.blocks.items():
            cell = self.plan.cells[self.kinds[block.kind], block.has_children]
            frame = self.frames[k] = Frame(
                block.name(self.kinds), cell, block, self.layout.rows + 1, self.layout.edges, self.index,
                self.workspace, self.plan.compiled, self.plan.in_parts and torch.get_float32_matmul_precision() == "highest",
            )  # fmt: skip
            frame.fixed |= {node: self._weights.get(id(w), w) for node, w in cell.graph.weights.items()}

    @_where_it_runs
    def forward(self) -> list[Tensor]:
        """The wanted rows of every output."""
        self._clear_states()
        self._bind(FORWARD)
        for k, frame in self.frames.items():
            self._pull(frame, k in self.layout.gaps)
            frame.run_all_rows("weights")
            frame.run_all_rows("eager")
        self._rounds("rounds")
        for frame in self.frames.values():
            frame.run_all_rows("late")
        if self.plan.backward:
            self._bind(BACKWARD)
        return [self._full_buffer(home).index_select(0, self.wanted[name]) for name, home in self.plan.outputs.items()]

    def backward(self, grads: list[Tensor], ready: Callable[[Tensor], Any] | None = None) -> dict[Source | int, Tensor]:
        """Gradients of inputs (by source) and of weights (by identity). `ready` is given each weight gradient, and waited for."""
        self.rounds_back(grads)
        return {**self._weight_gradients(ready), **self.input_gradients()}

    @_where_it_runs
    def rounds_back(self, grads: list[Tensor]) -> None:
        """All that gradients are summed from."""
        floats = [(name, home) for name, home in self.plan.outputs.items() if home.dtype.is_floating_point]
        for (name, home), grad in zip(floats, grads, strict=True):
            self._full_buffer(Home("push", (name,), "row", home.shape, home.dtype)).zero_().index_add_(0, self.wanted[name], grad)
        for frame in self.frames.values():
            self._clear_messages(frame)
            frame.run_all_rows("before")
        self._rounds("back")
        for frame in self.frames.values():
            frame.run_all_rows("after")

    def _rounds(self, phase: str) -> None:
        """Round by round; backwards the other way round."""
        for r in reversed(self.layout.rounds) if phase == "back" else self.layout.rounds:
            self.frames[r.klass].run(phase, r.span)

    def _bind(self, phases: Iterable[str]) -> None:
        """Before a forward run is recorded: it also makes the copies of weights that kernels of these phases read."""
        for phase in phases:
            for frame in self.frames.values():
                frame.bind(phase)

    @_where_it_runs
    def _weight_gradients(self, ready: Callable[[Tensor], Any] | None) -> dict[Source | int, Tensor]:
        """One weight after the other, each complete when it is handed to `ready`; so its reduction overlaps with the next ones."""
        out: dict[Source | int, Tensor] = {}
        pending = []
        for frame in self.frames.values():
            frame.forget_totals()
        for weight in self.plan.weights:
            value = self._gradient_of(weight)
            if ready is not None and weight.requires_grad:  # also where no vertex used it: other ranks wait for this one
                value = (torch.zeros_like(weight) if value is None else value).contiguous()
                pending.append(ready(value))
            if value is not None:
                out[id(weight)] = value
        for handle in pending:
            handle.wait()
        return out

    @_where_it_runs
    def weight_gradient(self, weight: Tensor) -> Tensor:
        """The gradient of one weight alone, after `rounds_back`."""
        for frame in self.frames.values():
            frame.forget_totals()
        value = self._gradient_of(weight)
        return torch.zeros_like(weight) if value is None else value

    def _gradient_of(self, weight: Tensor) -> Tensor | None:
        """The sum over all classes that use a weight."""
        out: Tensor | None = None
        for frame in self.frames.values():
            for of, node in frame.cell.graph.weight_grads:
                if of is weight:
                    value = frame.total(node)
                    out = value if out is None else out + value
        return out

    def _full_buffer(self, home: Home) -> Tensor:
        """A buffer over all classes."""
        return self.workspace.take((home.kind, home.key), (self.layout.rows + 1, *home.shape), home.dtype)

    def _pull(self, frame: Frame, gaps: bool) -> None:
        """Rows of the inputs in the order of the class; vertices without one read zeros."""
        block = frame.block
        for source, node in frame.cell.graph.sources.items():
            if source.role == "pull":
                given, rows = self.inputs[source.name], self._rows(block.start, block.count)
                buffer = frame.buffer(frame.cell.stores.homes[node])
                if gaps and self.ends_in_zeros:
                    torch.index_select(given, 0, rows.remainder(len(given)), out=buffer)
                elif gaps:
                    keep = (rows >= 0).to(given.dtype).reshape(-1, *[1] * (given.dim() - 1))
                    torch.mul(given.index_select(0, rows.clamp(min=0)), keep, out=buffer)
                else:
                    torch.index_select(given, 0, rows, out=buffer)

    def _rows(self, start: int, count: int) -> Tensor:
        return self.index["row"][start : start + count]

    def _clear_states(self) -> None:
        """The row that stands for an absent child is zero, and so is what a class does not scatter."""
        for name, shape in self.plan.states.items():
            home = Home("state", (name,), "row", shape, self.plan.dtype)
            self._full_buffer(home)[-1].zero_()
            for frame in self.frames.values():
                if name not in frame.cell.graph.states:
                    frame.buffer(home).zero_()

    def _clear_messages(self, frame: Frame) -> None:
        """Messages that other classes send and this one does not."""
        for key in self.plan.sent - set(frame.cell.graph.messages):
            frame.buffer(message_home(key, self.plan.states[key[0]], self.plan.dtype)).zero_()

    @_where_it_runs
    def input_gradients(self) -> dict[Source | int, Tensor]:
        out: dict[Source | int, Tensor] = {}
        for frame in self.frames.values():
            for source, node in frame.cell.graph.grads.items():
                given, block = self.inputs[source.name], frame.block
                if source not in out:  # one row more, for vertices without input
                    out[source] = torch.zeros((len(given) + 1, *given.shape[1:]), dtype=given.dtype, device=given.device)
                rows = self._rows(block.start, block.count)
                out[source].index_add_(0, torch.where(rows < 0, len(given), rows), frame.fetch(node, frame.span))
        return out
