"""Runs a scheduled batch: what is eager at once, then round by round, then what may wait; backwards likewise.

The whole batch is one node of autograd. Its backward replays the rounds from the last to the first and forms every weight
gradient at the end, in one product over all vertices of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.dynamic.cell import Cell
from weft.dynamic.frame import Compiled, Frame
from weft.dynamic.native import Ints
from weft.dynamic.schedule import Block, Schedule
from weft.dynamic.store import Home, Key
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Pool, Workspace

CellKey = tuple[str, bool]  # type, has children


@dataclass
class Plan:
    """All classes of a model compiled for one kind of call."""

    cells: dict[CellKey, Cell]
    states: dict[str, tuple[int, ...]]
    outputs: tuple[str, ...]
    compiled: Compiled
    weights: list[Tensor]
    sent: set[Key]
    dtype: torch.dtype
    backward: bool


@dataclass
class Batch:
    """One run of a plan on one schedule."""

    plan: Plan
    schedule: Schedule
    pool: Pool
    inputs: Mapping[str, Tensor]
    wanted: Mapping[str, Ints]  # output -> places whose rows are returned
    frames: dict[int, Frame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workspace: Workspace = self.pool.take()
        self.index = {k: torch.from_numpy(v) for k, v in _arrays(self.schedule, self.plan.sent).items()}
        s = self.schedule
        for k, block in s.blocks.items():
            name = s.structure.kinds[block.kind]
            cell = self.plan.cells[name, block.has_children]
            label = f"{name}{'+' if block.has_children else ''}"
            self.frames[k] = Frame(
                label, cell, block, s.structure.vertices + 1, len(s.edge_child), (0, 0), self.index, self.workspace,
                self.plan.compiled,
            )  # fmt: skip

    def forward(self, weights: list[Tensor]) -> list[Tensor]:
        known = {id(w): v for w, v in zip(self.plan.weights, weights, strict=True)}
        for frame in self.frames.values():
            own = frame.cell.traced.weights
            frame.supply({Source("weight", str(i)): known[id(w)] for i, w in enumerate(own)})
            self._pull(frame)
            self._clear(frame)
            frame.whole("weights")
            frame.whole("eager")
        for r in self.schedule.rounds:
            self.frames[r.klass].run("rounds", r.start, r.stop)
        for frame in self.frames.values():
            frame.whole("late")
        return [self._output(name) for name in self.plan.outputs]

    def backward(self, grads: list[Tensor]) -> dict[Source | int, Tensor]:
        """Gradients of inputs (by source) and of weights (by identity)."""
        for frame in self.frames.values():
            for name, grad in zip(self.plan.outputs, grads, strict=True):
                self._push(frame, name, grad)
            self._clear_messages(frame)
            frame.whole("before")
        for r in reversed(self.schedule.rounds):
            self.frames[r.klass].run("back", r.start, r.stop)
        out: dict[Source | int, Tensor] = {}
        for frame in self.frames.values():
            frame.whole("after")
            self._gradients(frame, out)
        return out

    def release(self) -> None:
        """Give the memory back; the batch cannot run again."""
        if self.frames:
            self.pool.give(self.workspace)
            self.frames = {}

    def _pull(self, frame: Frame) -> None:
        """Rows of the inputs in the order of the class."""
        for source, node in frame.cell.traced.sources.items():
            if source.role != "pull":
                continue
            home, block = frame.cell.stores.homes[node], frame.block
            rows = self.index["row"][block.start : block.start + block.count]
            buffer = frame.buffer(home)
            if block.count and int(rows.min()) < 0:
                has = (rows >= 0).nonzero().flatten()
                buffer.zero_()
                buffer.index_copy_(0, has, self.inputs[source.name].index_select(0, rows[has]))
            else:
                torch.index_select(self.inputs[source.name], 0, rows, out=buffer)

    def _clear(self, frame: Frame) -> None:
        """States this class does not scatter are zero, and so is the row that stands for an absent child."""
        for name, shape in self.plan.states.items():
            home = Home("state", (name,), "row", shape, self.plan.dtype)
            frame._buffer(home)[-1].zero_()
            if name not in frame.cell.traced.states:
                frame.buffer(home).zero_()

    def _clear_messages(self, frame: Frame) -> None:
        """Messages that other classes send and this one does not."""
        for state, how in self.plan.sent - set(frame.cell.traced.messages):
            home = Home("message", (state, how), "edge" if how == "edge" else "row", self.plan.states[state], self.plan.dtype)
            frame.buffer(home).zero_()

    def _output(self, name: str) -> Tensor:
        """The asked-for rows of an output, in the order asked for."""
        places = self.wanted[name]
        like = next(c.traced.outputs[name].meta["val"] for c in self.plan.cells.values() if name in c.traced.outputs)
        out = torch.empty((len(places), *like.shape[1:]), dtype=like.dtype)
        for frame in self.frames.values():
            node = frame.cell.traced.outputs.get(name)
            inside, rows = _within(places, frame.block)
            if node is not None and len(inside):
                values = frame.fetch(node, 0, frame.block.count)
                if len(inside) == len(places):
                    return torch.index_select(values, 0, rows, out=out)
                out.index_copy_(0, inside, values.index_select(0, rows))
        return out

    def _push(self, frame: Frame, name: str, grad: Tensor) -> None:
        """The gradient of an output, at the rows of the class that gave it; zero elsewhere."""
        node = frame.cell.traced.sources.get(Source("d_push", name))
        if node is None:
            return
        buffer = frame.buffer(frame.cell.stores.homes[node]).zero_()
        inside, rows = _within(self.wanted[name], frame.block)
        if len(inside):
            buffer.index_add_(0, rows, grad if len(inside) == len(grad) else grad.index_select(0, inside))

    def _gradients(self, frame: Frame, out: dict[Source | int, Tensor]) -> None:
        block = frame.block
        for source, node in frame.cell.traced.grads.items():
            value = frame.fetch(node, 0, block.count)
            if source.role == "weight":
                weight = id(frame.cell.traced.weights[int(source.name)])
                out[weight] = out[weight] + value if weight in out else value
            elif source.role == "pull":
                rows = self.index["row"][block.start : block.start + block.count]
                total = out.setdefault(source, torch.zeros_like(self.inputs[source.name]))
                has = (rows >= 0).nonzero().flatten()
                total.index_add_(0, rows[has], value[has])


class Run(torch.autograd.Function):
    """A batch as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.batch, ctx.names = batch, names
        outputs = batch.forward([t.detach() for t in tensors[len(names) :]])
        if not batch.plan.backward:
            batch.release()
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = ctx.batch.backward([g.contiguous() for g in grads])
        inputs = [found.get(Source("pull", name)) for name in ctx.names]
        weights = [found.get(id(w)) for w in ctx.batch.plan.weights]
        ctx.batch.release()
        return None, None, *inputs, *weights


def _within(places: Ints, block: Block) -> tuple[Tensor, Tensor]:
    """Which of the places are in a block, and their rows in it."""
    inside = np.flatnonzero((places >= block.start) & (places < block.start + block.count))
    return torch.from_numpy(inside), torch.from_numpy(places[inside] - block.start)


def _arrays(s: Schedule, sent: set[Key]) -> dict[str, Ints]:
    """The index arrays of a schedule, by the names kernels use."""
    out = {
        "edge_first": s.edge_first, "edge_child": s.edge_child, "edge_vertex": s.edge_parent,
        "row": s.structure.row[s.vertex],
    }  # fmt: skip
    out |= {f"slot{k}": child for k, child in enumerate(s.slot_child)}
    if any(how in ("edge", "vertex") for _, how in sent):
        first, edge = s.readers
        out |= {"reader_first": first, "reader_edge": edge, "reader_vertex": s.edge_parent[edge]}
    for k in range(len(s.slot_child)):
        if any(how == f"slot{k}" for _, how in sent):
            out[f"slot{k}_first"], out[f"slot{k}_reader"] = s.slot_readers(k)
    return out
