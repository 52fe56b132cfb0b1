"""One call of a model as one node of autograd, on whatever device its inputs are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import StructureError
from weft.dynamic.captured import Templates, Weights
from weft.dynamic.engine import Batch, Plan
from weft.dynamic.layout import exact
from weft.dynamic.native import Ints
from weft.dynamic.schedule import Schedule
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Pool

Ready = Callable[[Tensor], Any] | None  # told each weight gradient as soon as it is complete; gives something to wait for


class Call:
    """One batch, which holds memory until its backward pass is done, or until a result is dropped without one."""

    plan: Plan
    is_released = False

    def _give_back(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self._give_back()

    def __del__(self) -> None:
        self.release()


class Once(Call):
    """A batch run in place, with memory borrowed from a pool: nothing is recorded, so any shape will do."""

    def __init__(self, plan: Plan, s: Schedule, pool: Pool) -> None:
        self.plan, self.pool, self.workspace = plan, pool, pool.take()
        self.layout = exact(s, plan.sent)
        self.kinds = s.structure.kinds

    def forward(self, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], weights: list[Tensor]) -> list[Tensor]:
        self.batch = Batch(self.plan, self.layout, self.kinds, self.workspace, weights)
        rows = {name: torch.from_numpy(self.layout.place[v]) for name, v in wanted.items()}
        device = self.workspace.device
        index = {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in self.layout.arrays.items()}
        self.batch.load(index, inputs, {name: r.to(device) for name, r in rows.items()})
        return self.batch.forward()

    def backward(self, grads: list[Tensor], ready: Ready) -> dict[Source | int, Tensor]:
        return self.batch.backward(grads, ready)

    def _give_back(self) -> None:
        self.pool.give(self.workspace)


class Replay(Call):
    """A batch that replays a template."""

    def __init__(
        self, templates: Templates, s: Schedule, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], weights: Weights = None
    ) -> None:
        self.plan, self.is_released = templates.plan, True
        self.captured, self.layout = templates.take(s, inputs, wanted, weights)
        self.captured.busy, self.is_released = True, False

    def forward(self, inputs: Mapping[str, Tensor], wanted: Mapping[str, Ints], weights: list[Tensor]) -> list[Tensor]:
        return self.captured.forward(self.layout, inputs, wanted, weights)

    def backward(self, grads: list[Tensor], ready: Ready) -> dict[Source | int, Tensor]:
        return self.captured.backward(grads, ready)

    def _give_back(self) -> None:
        self.captured.busy = False


class Run(torch.autograd.Function):
    """The node. Its inputs are the model's inputs and weights."""

    @staticmethod
    def forward(ctx: Any, call: Once | Replay, names: tuple[str, ...], wanted: Mapping[str, Ints], ready: Ready, *tensors: Tensor) -> Any:
        inputs = {name: t.detach() for name, t in zip(names, tensors, strict=False)}
        ctx.call, ctx.ready, ctx.rows = call, ready, {name: len(x) for name, x in inputs.items()}
        outputs = call.forward(inputs, wanted, [t.detach() for t in tensors[len(names) :]])
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.dtype.is_floating_point))
        if not call.plan.backward:
            call.release()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.saved_tensors  # noqa: B018 - refused by torch where an input or weight was written into since, or where the graph was freed
        if torch.is_grad_enabled():
            raise StructureError(
                "a gradient of a dynamic model's gradient is not there", needed="backward without create_graph=True", found="create_graph=True",
                try_="the terms that need it through plain torch modules",
            )  # fmt: skip
        if ctx.call.is_released:
            raise StructureError(
                "a result of a dynamic model is differentiated a second time", needed="one backward for each call: its memory is used again after it",
                found="a second, with retain_graph=True", try_="the sum of the losses, or the model called once for each",
            )  # fmt: skip
        given = [g for g, home in zip(grads, ctx.call.plan.outputs.values(), strict=True) if home.dtype.is_floating_point]
        found = ctx.call.backward([g.contiguous() for g in given], ctx.ready)
        inputs = [(found.get(Source("pull", name)), rows) for name, rows in ctx.rows.items()]
        weights = [found.get(id(w)) for w in ctx.call.plan.weights]
        ctx.call.release()
        return None, None, None, None, *(x if x is None else x[:rows] for x, rows in inputs), *weights
