"""A torch module, or a training step over it, as one program.

The forward pass is traced on fake CPU tensors, op by op, and gradients come from weft's own vjps: an opaque op's backward is
then an opaque op too, and half of the tracing is saved. Only a model with an autograd function of its own, whose
gradient is not that of what it computes, is traced jointly (`joint`). Isomorphic layers are traced once (`blocks`); optimizers
are not traced at all (`optimizers`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.core.errors import CaptureError
from weft.core.names import part
from weft.frontend.capture.batch_numbers import SharedLayer
from weft.frontend.capture.caches import CacheNeeded
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.joint import CustomGradient, has_old_hooks, require_no_node_hooks
from weft.frontend.capture.micro import batch_dims_of, in_micro_batches, micro_batch, require_parts, unrolled
from weft.frontend.capture.numbers import NumberNeeded
from weft.frontend.capture.places import holds_traced
from weft.frontend.capture.step import Captured, Step
from weft.frontend.capture.tape import Tape, tracing

Loss = Callable[[nn.Module, Any], Tensor]


def capture(
    model: nn.Module,
    example: Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: int = 1,
    allow_micro_mean: bool = False,
    clip: float | None = None,
    gradients: bool = False,
    precision: torch.dtype | None = None,
    capacity: float | None = None,
    name: str | None = None,
    given: Collection[str] = (),
    reads: Reads | None = None,
) -> Captured:
    """The program of a module on a batch, of its loss, of its gradients, or of a full training step.

    Without `loss` the program gives what the module returns. With `loss(model, batch)` it gives `loss`; with `gradients`,
    also `d.param.NAME` of every parameter; with an optimizer, the next value of all parameters and state instead.
    `accumulate` takes the batch in so many parts, one after another, where that gives the full batch's loss and gradients, and else is
    refused; with `allow_micro_mean` they are the means over what the parts give by themselves.
    `clip` limits the global norm of the gradients; `precision` is autocast's dtype.
    `capacity` gives experts so many times their even share of the tokens, for planning; without it no token is dropped.
    `given` names settings of the optimizer, besides the learning rate, that are inputs of the program: "momentum", "decay", ...
    `reads` notes what the trace reads from Python, and what it leaves changed there.
    """
    require_torchs(model, optimizer)
    _require(isinstance(accumulate, int) and accumulate >= 1, "accumulate", "an integer, 1 or more", accumulate)
    _require(precision is None or isinstance(precision, torch.dtype), "precision", "a dtype such as torch.bfloat16", precision)
    model = uncompiled(model)
    learns = loss is not None and (gradients or optimizer is not None)
    if accumulate > 1 and learns and not allow_micro_mean:
        more = {"clip": clip, "gradients": gradients, "precision": precision, "capacity": capacity, "name": name, "given": given, "reads": reads}
        full = capture(model, example, loss, optimizer, **more)
        samples, dims = batch_dims_of(example)
        require_parts(samples, accumulate)
        return unrolled(in_micro_batches(full, accumulate, dims))
    parts = accumulate if allow_micro_mean else 1

    def run(step: Step, batch: Any) -> None:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            if loss is None:
                step.give("out", called(model, batch))
                return
            value = _losses(step.tape, model, loss, batch, parts)
        step.give("loss", value)
        if learns:
            step.backward(value)
            _require_gradients(step)
            step.note_gradients()
            if clip is not None:
                step.give("grad_norm", nn.utils.clip_grad_norm_(list(step.tape.parameters.values()), clip))
            step.give_gradients() if optimizer is None else step.update(optimizer)

    return _traced(model, example, run, capacity, name, given, reads)


def capture_unchanged(model: nn.Module, example: Any, needed: str, try_: str) -> Captured:
    """The forward pass of a module that leaves Python as it was; refused where it does not."""
    reads = Reads(model, None, example)
    captured = capture(model, example, reads=reads)
    reads.undo()
    left = [c.words for c in reads.left if not holds_traced(c.now)] + ["random numbers drawn in Python"] * reads.drew
    if left:
        raise CaptureError(f"the model changes Python as it runs ({left[0]})", needed=needed, found=left[0], try_=try_)
    return captured


def require_torchs(model: Any, optimizer: Any) -> None:
    """Refuse what is no module of torch's, or has no values yet, or no optimizer."""
    _require(isinstance(model, nn.Module), "model", "a torch.nn.Module", model)
    lazy = [name for named in (model.named_parameters(), model.named_buffers()) for name, x in named if is_lazy(x)]
    if lazy:
        raise CaptureError(
            "the model has parameters without a shape yet",
            needed="a model that has run once, so that its lazy modules know their sizes",
            found=", ".join(lazy[:3]) + (f" and {len(lazy) - 3} more" if len(lazy) > 3 else ""),
            try_="call model(...) once on an example, make the optimizer after it, then call weft",
        )
    require_no_node_hooks(model)
    optimizers = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    _require(optimizers, "optimizer", "a torch.optim.Optimizer over model.parameters()", optimizer)


def require_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Refuse a training step without one, or with one that updates nothing of the model, made for another or before the model was copied."""
    if optimizer is None:
        raise CaptureError(
            "a training step needs an optimizer",
            needed="a torch.optim.Optimizer over model.parameters()",
            found="None",
            try_=[
                "torch.optim.AdamW(model.parameters())",
                "weft.shard(model, example, plan) in a loop of your own",
                "weft.compile(model, plan, batch) for inference",
            ],
        )
    own = {id(p) for p in model.parameters()}
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    if own and theirs and not any(id(p) in own for p in theirs):
        raise CaptureError(
            "the optimizer updates no parameter of this model",
            needed="a torch.optim.Optimizer over model.parameters()",
            found=f"{type(optimizer).__name__} over {len(theirs)} other tensors",
            try_="make the optimizer after the model has its final parameters",
        )


def _require(right: bool, what: str, needed: str, found: Any) -> None:
    if not right:
        tip = "weft.parallelize(model, loss, optimizer, batch)" if what == "optimizer" and callable(found) else None
        raise CaptureError(f"this is not {'an' if what[0] in 'aeiou' else 'a'} {what}", needed=needed, found=repr(found)[:80], try_=tip)


def capture_step(
    function: Callable[[Any], Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Any,
    *,
    capacity: float | None = None,
    name: str | None = None,
) -> Captured:
    """The program of a user's own training step: `function(batch)` calls the model, `.backward()` and `optimizer.step()`.

    Accumulation, clipping, autocast and several losses are whatever the function does. What it returns is `out`.
    """

    require_torchs(model, optimizer)

    def run(step: Step, batch: Any) -> None:
        with step.stepping(optimizer):
            step.give("out", function(batch))

    return _traced(model, example, run, capacity, name or part(getattr(function, "__name__", "step").strip("<>")))


def _traced(
    model: nn.Module, example: Any, run: Callable[[Step, Any], None], capacity: float | None, name: str | None, given: Collection[str] = (),
    reads: Reads | None = None,
) -> Captured:  # fmt: skip
    """Trace forward only, isomorphic layers without their empty caches; again with autograd, the caches, or numbers that are computed, where needed."""
    joint, cacheless, numbers = has_old_hooks(model), True, False
    while True:
        try:
            with tracing(model, joint, capacity, given, cacheless, reads, numbers) as tape:
                step = Step(tape)
                run(step, tape.batch(example))
                step.keep_state()
            if reads is not None:
                reads.finish(tape.left)
            return step.finish(name or type(model).__name__)
        except BaseException as error:
            if reads is not None:
                reads.undo()
            if not isinstance(error, (CustomGradient, CacheNeeded, NumberNeeded, SharedLayer)):
                raise
            if reads is not None and isinstance(error, SharedLayer):
                reads.shared = False
            joint, cacheless = joint or isinstance(error, CustomGradient), cacheless and not isinstance(error, CacheNeeded)
            numbers = numbers or isinstance(error, NumberNeeded)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module itself, where torch.compile wraps it; one that already runs on several ranks is refused."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise CaptureError(
            "the model is already made parallel",
            needed="a plain torch.nn.Module: weft brings the communication",
            found=type(model).__name__,
            try_="pass model.module",
        )
    return model


def called(model: nn.Module, batch: Any) -> Any:
    """What a module returns for a batch: keywords, arguments or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _require_gradients(step: Step) -> None:
    if all(t.grad is None for t in step.tape.parameters.values()):
        raise CaptureError("the loss depends on no parameter", needed="a loss computed from the module", found="none reached")


# -- the loss, of the batch or of its parts ----------------------------------------------------------------------------


class _Part(nn.Module):
    """The loss of one part of a batch, as a module, so that isomorphic parts are traced once."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def _losses(tape: Tape, model: nn.Module, loss: Loss, batch: Any, parts: int) -> Tensor:
    """The loss, or the mean of the losses of equal parts of the batch."""
    if parts == 1:
        return _scalar(loss(model, batch))
    full = _Part(model, loss)
    if not tape.recorder.joint:
        tape.blocks.isomorphic[full] = [full]
    return torch.stack([_scalar(full(micro_batch(batch, i, parts))) for i in range(parts)]).mean()


def _scalar_try(loss: Any) -> str:
    """What to write where a loss is of the wrong kind."""
    if loss is None:
        return "return the loss"
    return "mean() of it" if isinstance(loss, Tensor) else "return the tensor itself, without item() or float()"


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError("the loss is not a scalar", needed="a float tensor of one element", found=found, try_=_scalar_try(loss))
    return loss if loss.shape == () else loss.reshape(())
