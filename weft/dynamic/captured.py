"""Batches whose shapes are fixed by a template, so that a run is two replays: one forward, one backward.

A new batch of graphs is put into the rows of a template that has room; its index arrays go to the device in one copy. When none
has room a wider template is recorded, so after a few batches of a kind all fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.dynamic.engine import Batch, Plan
from weft.dynamic.layout import Layout, Template, padded, template
from weft.dynamic.native import Ints
from weft.dynamic.schedule import Schedule
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Workspace
from weft.runtime import replay

KEPT = 4  # templates per plan


class Captured:
    """One template, recorded."""

    def __init__(self, plan: Plan, t: Template, s: Schedule, layout: Layout, device: torch.device, sizes: Mapping[str, Tensor]) -> None:
        self.template, self.plan, self.device, self.busy = t, plan, device, False
        kinds = s.structure.kinds
        self.rows = {name: _room(len(x)) for name, x in sizes.items()}
        self.inputs = {n: torch.zeros((self.rows[n], *x.shape[1:]), dtype=x.dtype, device=device) for n, x in sizes.items()}
        self.asked = {name: _room(0) for name in plan.outputs}
        self._slices = layout.slices()
        self._host = replay.pinned(len(layout.packed), torch.int64, device)
        self._device = torch.empty(len(self._host), dtype=torch.int64, device=device)
        self._copied = replay.mark(device)
        self.batch = Batch(plan, layout, kinds, Workspace(device), [w.detach() for w in plan.weights])
        self._weights_at = [w.data_ptr() for w in plan.weights]
        self._forward = self._backward = None
        self._wanted: dict[str, Tensor] = {}

    def has_room(self, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints]) -> bool:
        """Whether inputs and outputs fit, and the weights are still where they were."""
        enough = all(len(x) <= self.rows[n] for n, x in inputs.items())
        enough = enough and self._weights_at == [w.data_ptr() for w in self.plan.weights]
        return enough and all(len(w) <= self.asked[n] for n, w in wanted.items() if self._forward is not None)

    def forward(self, layout: Layout, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints]) -> list[Tensor]:
        """Load a batch of graphs and replay."""
        self.counts = {n: len(w) for n, w in wanted.items()}
        self._load(layout, inputs, wanted)
        if self._forward is None:
            self._forward = replay.record(self._run_forward, self.device)
        self._forward()
        return [out[: self.counts[n]].clone() for n, out in zip(self.plan.outputs, self._outputs, strict=True)]

    def backward(self, grads: list[Tensor], ready: Callable[[Tensor], Any] | None = None) -> dict[Source | int, Tensor]:
        for (name, into), grad in zip(self._grads.items(), grads, strict=True):
            into[: self.counts[name]].copy_(grad)
            into[self.counts[name] :].zero_()
        if self._backward is None:
            self._backward = replay.record(self._run_backward, self.device)
        self._backward()
        found = {key: value.clone() for key, value in self._found.items()}
        for handle in [ready(value) for key, value in found.items() if ready is not None and not isinstance(key, Source)]:
            handle.wait()
        return found

    def _load(self, layout: Layout, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints]) -> None:
        self._copied()  # the copy before this one must have left the host's memory
        self._host.copy_(torch.from_numpy(layout.packed))
        self._device.copy_(self._host, non_blocking=True)
        self._copied = replay.mark(self.device)
        for name, x in inputs.items():
            self.inputs[name][: len(x)].copy_(x)
        if not self._wanted:
            self._prepare(wanted)
        for name, vertices in wanted.items():
            rows = layout.place[vertices]
            padding = torch.full((self.asked[name] - len(rows),), layout.rows, dtype=torch.int64)
            self._wanted[name].copy_(torch.cat([torch.from_numpy(rows), padding]), non_blocking=True)

    def _prepare(self, wanted: Mapping[str, Ints]) -> None:
        """Buffers for outputs, and the batch bound to all buffers."""
        self.asked = {name: _room(len(v)) for name, v in wanted.items()}
        self._wanted = {n: torch.zeros(size, dtype=torch.int64, device=self.device) for n, size in self.asked.items()}
        shapes = {n: (self.asked[n], *h.shape) for n, h in self.plan.outputs.items()}
        floats = {n: h for n, h in self.plan.outputs.items() if h.dtype.is_floating_point}
        self._grads = {n: torch.zeros(shapes[n], dtype=h.dtype, device=self.device) for n, h in floats.items()}
        index = {name: self._device[low:high] for name, (low, high) in self._slices.items()}
        self.batch.load(index, self.inputs, self._wanted)

    def _run_forward(self) -> None:
        self._outputs = self.batch.forward()

    def _run_backward(self) -> None:
        self._found = self.batch.backward(list(self._grads.values()))


class Templates:
    """The recorded templates of one plan on one device."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device, self.kept = plan, device, list[Captured]()

    def take(self, s: Schedule, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints]) -> tuple[Captured, Layout]:
        """A free template with room for the schedule, the smallest there is, or a new one."""
        free = [c for c in self.kept if not c.busy and c.has_room(inputs, wanted) and c.template.holds(s) is not None]
        captured = min(free, key=lambda c: c.template.cost()) if free else self._new(s, inputs)
        return captured, self._padded(s, captured.template)

    def fit(self, s: Schedule) -> None:
        """Put the schedule into the rows of the template that `take` would choose, ahead of time."""
        fitting = [c for c in self.kept if c.template.holds(s) is not None]
        if fitting:
            self._padded(s, min(fitting, key=lambda c: c.template.cost()).template)

    def _padded(self, s: Schedule, t: Template) -> Layout:
        return s.keep(("padded", t), lambda: padded(s, t, t.holds(s) or [], self.plan.sent))

    def _new(self, s: Schedule, inputs: Mapping[str, Tensor]) -> Captured:
        """Record a template wider than the last one, or one of its own where the two do not join."""
        wider = template(s, self.kept[-1].template if self.kept else None)
        wider = wider if wider.holds(s) is not None else template(s)
        made = Captured(self.plan, wider, s, self._padded(s, wider), self.device, inputs)
        idle = [c for c in self.kept if not c.busy]
        if len(self.kept) >= KEPT and idle:
            self.kept.remove(idle[0])
        self.kept.append(made)
        return made


def _room(size: int) -> int:
    return -(-int(size * 1.1 + 1) // 64) * 64

