"""Batches whose shapes are fixed by a template, so that a run is two replays: one forward, one backward.

A new batch of graphs is put into the rows of a template that has room, where vertices may wait for a later round than their depth's; its
index arrays go to the device in one copy. When none has room a wider template is recorded, so after a few batches of a kind all fit.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
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

KEPT = 4  # templates
STAGED = 3  # batches whose index arrays are on their way to the device
Weights = list[Tensor] | None  # none: the model's own


class Captured:
    """One template, recorded."""

    def __init__(
        self,
        plan: Plan,
        t: Template,
        s: Schedule,
        layout: Layout,
        device: torch.device,
        sizes: Mapping[str, Tensor],
        weights: Weights = None,
    ) -> None:
        self.weights = None if weights is None else [w.clone() for w in weights]  # copies, where others than the model's own are given
        self.template, self.plan, self.device, self.busy = t, plan, device, False
        kinds = s.structure.kinds
        self.rows = {name: _room(len(x)) for name, x in sizes.items()}
        self.inputs = {n: torch.zeros((self.rows[n] + 1, *x.shape[1:]), dtype=x.dtype, device=device) for n, x in sizes.items()}
        self.asked = {name: _room(0) for name in plan.outputs}
        self._slices = layout.slices()
        self.batch = Batch(plan, layout, kinds, Workspace(device), self.weights or [w.detach() for w in plan.weights], True)
        self._weights_at = [w.data_ptr() for w in plan.weights]
        self._forward = self._backward = None
        self._pieces: list[Callable[[], None]] = []
        self._totals: dict[int, Tensor] = {}
        self._wanted: dict[str, slice] = {}

    def has_room(self, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], given: bool) -> bool:
        """Whether inputs and outputs fit, and the weights, where they are not given, are still where they were."""
        enough = all(len(x) <= self.rows[n] for n, x in inputs.items()) and given == (self.weights is not None)
        enough = enough and (given or self._weights_at == [w.data_ptr() for w in self.plan.weights])
        return enough and all(len(w) <= self.asked[n] for n, w in wanted.items() if self._forward is not None)

    def forward(self, layout: Layout, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], weights: list[Tensor]) -> list[Tensor]:
        """Load a batch of graphs and replay."""
        for own, given in zip(self.weights or (), weights, strict=False):
            own.copy_(given)
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
        if ready is not None:
            return self._one_by_one(ready)
        if self._backward is None:
            self._backward = replay.record(self._run_backward, self.device)
        self._backward()
        return {key: value.clone() for key, value in self._found.items()}

    def _one_by_one(self, ready: Callable[[Tensor], Any]) -> dict[Source | int, Tensor]:
        """Rounds and weights recorded apart, so that the reduction of a gradient runs overlapped with the matmul for the next one."""
        trained = [w for w in self.plan.weights if w.requires_grad]
        if not self._pieces:
            self._pieces = [replay.record(self._run_rounds_back, self.device)]
            self._pieces += [replay.record(functools.partial(self._run_weight, w), self.device) for w in trained]
        self._pieces[0]()
        found = {key: value.clone() for key, value in self._found.items()}
        pending = []
        for weight, piece in zip(trained, self._pieces[1:], strict=True):
            piece()
            found[id(weight)] = self._totals[id(weight)].clone()
            pending.append(ready(found[id(weight)]))
        for handle in pending:
            handle.wait()
        return found

    def _load(self, layout: Layout, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints]) -> None:
        if not self._wanted:
            self._prepare(layout, wanted)
        host, copied = self._staged.popleft()
        copied()  # the copy before this one must have left the host's memory
        array = host.numpy()
        array[: len(layout.packed)] = layout.packed
        for name, vertices in wanted.items():
            rows = array[self._wanted[name]]
            rows[: len(vertices)] = layout.place[vertices]
            rows[len(vertices) :] = layout.rows
        self._device.copy_(host, non_blocking=True)
        self._staged.append((host, replay.mark(self.device)))
        for name, x in inputs.items():
            self.inputs[name][: len(x)].copy_(x)

    def _prepare(self, layout: Layout, wanted: Mapping[str, Ints]) -> None:
        """Buffers for index arrays and outputs, and the batch bound to all buffers."""
        self.asked, at = {name: _room(len(v)) for name, v in wanted.items()}, len(layout.packed)
        for name, size in self.asked.items():
            self._wanted[name], at = slice(at, at + size), at + size
        self._device = torch.zeros(at, dtype=torch.int64, device=self.device)
        self._staged = deque((replay.pinned(at, torch.int64, self.device), replay.mark(self.device)) for _ in range(STAGED))
        shapes = {n: (self.asked[n], *h.shape) for n, h in self.plan.outputs.items()}
        floats = {n: h for n, h in self.plan.outputs.items() if h.dtype.is_floating_point}
        self._grads = {n: torch.zeros(shapes[n], dtype=h.dtype, device=self.device) for n, h in floats.items()}
        index = {name: self._device[low:high] for name, (low, high) in self._slices.items()}
        self.batch.load(index, self.inputs, {name: self._device[part] for name, part in self._wanted.items()})

    def _run_forward(self) -> None:
        self._outputs = self.batch.forward()

    def _run_backward(self) -> None:
        self._found = self.batch.backward(list(self._grads.values()))

    def _run_rounds_back(self) -> None:
        self.batch.rounds_back(list(self._grads.values()))
        self._found = self.batch.input_gradients()

    def _run_weight(self, weight: Tensor) -> None:
        self._totals[id(weight)] = self.batch.weight_gradient(weight)


class Templates:
    """The recorded templates of one plan on one device."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device, self.kept = plan, device, list[Captured]()

    def take(self, s: Schedule, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], weights: Weights) -> tuple[Captured, Layout]:
        """A free template with room for the schedule, the smallest there is, or a new one."""
        given = weights is not None
        free = (c for c in self.kept if not c.busy and c.has_room(inputs, wanted, given))
        captured = self._smallest(s, free) or self._new(s, inputs, weights)
        self.kept = [*(c for c in self.kept if c is not captured), captured]  # the last used is the last to go
        return captured, self._padded(s, captured.template)

    def fit(self, s: Schedule) -> None:
        """Put the schedule into the rows of the template that `take` would choose, ahead of time."""
        if found := self._smallest(s, self.kept):
            self._padded(s, found.template)

    @staticmethod
    def _smallest(s: Schedule, among: Iterable[Captured]) -> Captured | None:
        return next((c for c in sorted(among, key=lambda c: c.template.cost) if _fit(s, c.template)), None)

    def _padded(self, s: Schedule, t: Template) -> Layout:
        return s.keep(("padded", t), lambda: padded(*(_fit(s, t) or (s, [])), t, self.plan.sent))

    def _new(self, s: Schedule, inputs: Mapping[str, Tensor], weights: Weights) -> Captured:
        """Record a template wider than the last one, or one of its own where the two do not join."""
        last = max(self.kept, key=lambda c: c.template.cost, default=None)
        wider = template(s, last and last.template)
        wider = wider if wider.holds(s) is not None else template(s)
        made = Captured(self.plan, wider, s, self._padded(s, wider), self.device, inputs, weights)
        idle = [c for c in self.kept if not c.busy]
        if len(self.kept) >= KEPT and idle:
            self.kept.remove(idle[0])
        return made


def _fit(s: Schedule, t: Template) -> tuple[Schedule, list[int]] | None:
    return s.keep(("fit", t), lambda: t.fit(s))


def _room(size: int) -> int:
    return -(-int(size * 1.1 + 1) // 64) * 64
