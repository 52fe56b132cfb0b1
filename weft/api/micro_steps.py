"""The captured step of one micro-batch: derived from the full batch's step or, for the mean over micro-batches, captured by itself."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import PlanError
from weft.core.node import user_level
from weft.frontend.capture import capture
from weft.frontend.capture.batches import named_batch
from weft.frontend.capture.micro import Micro, batch_dims_of, in_micro_batches, micro_batch, require_gradients, require_parts
from weft.frontend.capture.step import Captured
from weft.plan.spec import Spec
from weft.runtime.agree import rank

Loss = Callable[[nn.Module, Any], Tensor]


def micro_steps(
    model: nn.Module, example: Any, loss: Loss, optimizer: torch.optim.Optimizer, *, mean: bool = False, **settings: Any
) -> Callable[[int], Micro]:
    """Gives the step of one of so many micro-batches, derived from the full batch's or, for the mean over them, captured by itself."""
    full = functools.cache(lambda: capture(model, example, loss, optimizer, **settings))

    def one(parts: int) -> Micro:
        if parts == 1:
            return in_micro_batches(full(), 1, {})
        samples, dims = batch_dims_of(example)
        require_parts(samples, parts)
        if mean:
            return _alone(model, example, parts, dims, loss, optimizer, settings)
        return _derived(full(), parts, dims, example)

    return one


def of_plan_or_fewer(plan: Spec, steps: Callable[[int], Micro], example: Any) -> Micro:
    """The step in as many micro-batches as the plan has, or in fewer: where it gives none, and for a batch of another size than the example.

    Where samples cannot be distinguished, or the loss is no sum over them, the full batch goes through the stages at once."""
    try:
        samples, _ = batch_dims_of(example)
        most = next((n for n in range(plan.micro_batches, 0, -1) if samples % n == 0 and plan.pipeline.may_take(plan.pp, n)), plan.micro_batches)
        return steps(most)
    except PlanError as e:
        if not plan.pipeline.may_take(plan.pp, 1):
            raise
        full = steps(1)
        if plan.pp > 1 and rank() == 0:
            warnings.warn(
                f"{plan}: the full batch goes through the stages at once, which wait for each other ({e.message}: {e.found})", stacklevel=user_level()
            )
        return full


def _alone(
    model: nn.Module, example: Any, parts: int, dims: Mapping[str, int], loss: Loss, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> Micro:
    """The step of a micro-batch by itself, its loss an even part of the mean."""
    part = micro_batch(example, 0, parts)
    try:
        captured = capture(model, part, lambda m, b: loss(m, b) / parts, optimizer, **settings)
    except IndexError as e:
        cut = ", ".join(f"{n.removeprefix('batch.')} {list(x.shape)}" for n, x in named_batch(part).items())
        raise PlanError(
            "the model cannot take a micro-batch", needed="every tensor of the batch to be sharded along its samples",
            found=f"{e} with {cut}", try_="a batch whose number of samples no other dim has, or a plan without pp and micro",
        ) from e  # fmt: skip
    require_gradients(captured)
    return Micro(captured, parts, dims)


def _derived(captured: Captured, parts: int, dims: Mapping[str, int], example: Any) -> Micro:
    """The same; a refusal names the tensors that were not sharded."""
    try:
        return in_micro_batches(captured, parts, dims)
    except PlanError as e:
        left = [f"{n.removeprefix('batch.')} {list(x.shape)}" for n, x in named_batch(example).items() if n not in dims and x.ndim]
        if left:
            e.found = f"{e.found}; {', '.join(left)} of the batch has no dim of its samples and is taken in full"
        raise e.at(None) from None
