"""A torch module, or a training step over it, as one program.

The forward pass is traced on fake CPU tensors, op by op, and gradients come from weft's own vjps: a whole op's backward is
then a whole op too, and half of the tracing is saved. Only a model with an autograd function of its own, whose
gradient is not that of what it computes, is traced jointly: torch's autograd runs under the trace, and every op heard
above ATen enters it with weft's vjp as its backward. Layers alike are traced once (`blocks`); optimizers are not traced
at all (`optimizers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.autodiff import backward
from weft.core.errors import CaptureError
from weft.core.node import Node, constant, toposort
from weft.core.program import Program, new_program
from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.optimizers import rule_of
from weft.frontend.capture.tape import Tape, tracing
from weft.ops import pointwise as w
from weft.ops.norm import to_dtype
from weft.ops.reduce import sum_

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Captured:
    """A program, and how its inputs and outputs hang together with the module and the optimizer it came from.

    Inputs are named by what they are: `param.NAME`, `buffer.NAME`, `batch.KEY`, `constant.0`, the optimizer's `exp_avg.NAME`
    and so on, `lr.0` per parameter group, `step`, `seed`. An output of the same name is the input's next value.
    """

    program: Program
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]
    blocks: tuple[tuple[Instance, ...], ...]
    opaque: Mapping[str, Sequence[str]]
    assumed: tuple[str, ...]
    states: Mapping[str, str] = field(default_factory=dict)  # `exp_avg.NAME` -> `param.NAME`
    rates: tuple[float, ...] = ()

    def inputs(self, batch: Any, seed: int = 0, step: int = 0, rates: Sequence[float] | None = None) -> dict[str, Tensor]:
        """A value for every input: the module's tensors, the batch, zeros for a new optimizer's state."""
        values = {**self.parameters, **self.buffers, **self.constants, **named_batch(batch)}
        values = {k: v.detach() for k, v in values.items()}
        values |= {k: torch.zeros_like(self.parameters[p].detach()) for k, p in self.states.items()}
        values |= {f"lr.{i}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(rates or self.rates)}
        values |= {"seed": torch.tensor(seed), "step": torch.tensor(step)}
        return {name: values[name] for name in self.program.input_names}


def named_batch(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by the names their inputs have."""
    if isinstance(batch, Tensor):
        return {"batch.0": batch}
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {f"batch.{k}": v for k, v in pairs if isinstance(v, Tensor)}


def capture(
    model: nn.Module,
    example: Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    gradients: bool = False,
    precision: torch.dtype | None = None,
    name: str | None = None,
) -> Captured:
    """The program of a module on a batch, of its loss, of its gradients, or of a whole training step.

    Without `loss` the program gives what the module returns. With `loss(model, batch)` it gives `loss`; with `gradients`,
    also `d.NAME` of every parameter; with an optimizer, the next value of all parameters and state instead.
    `accumulate` splits the batch and sums the gradients; `clip` limits their global norm; `precision` is autocast's dtype.
    """
    with tracing(model) as tape:
        batch = tape.batch(example)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            result = _forward(model, batch) if loss is None else _losses(tape, model, loss, batch, accumulate)
    outputs = dict(_named("out", result, tape)) if loss is None else {"loss": result}
    step = Step(tape, outputs)
    if loss is not None and (gradients or optimizer is not None):
        step.differentiate(result, clip)
        step.update(optimizer) if optimizer is not None else step.give_gradients()
    step.keep_buffers()
    return step.finish(name or type(model).__name__)


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


class _Part(nn.Module):
    """The loss of one part of a batch, as a module, so that parts alike are traced once."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        return self.loss(self.model, batch)


def _losses(tape: Tape, model: nn.Module, loss: Loss, batch: Any, parts: int) -> Node:
    """The loss, or the mean of the losses of equal parts of the batch."""
    if parts == 1:
        return _scalar(tape, loss(model, batch))
    whole = _Part(model, loss)
    tape.blocks.alike[whole] = [whole]
    pieces = [_scalar(tape, whole(_part(batch, i, parts))) for i in range(parts)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = w.add(total, piece)
    return w.mul(total, 1.0 / parts)


def _part(batch: Any, i: int, parts: int) -> Any:
    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 0 or x.shape[0] % parts:
            raise CaptureError(
                f"the batch does not split into {parts} equal parts",
                needed=f"first dims divisible by {parts}",
                found=str(tuple(x.shape)),
            )
        return x.chunk(parts)[i].clone()

    if isinstance(batch, Mapping):
        return {k: cut(v) for k, v in batch.items()}
    return type(batch)(map(cut, batch)) if isinstance(batch, (tuple, list)) else cut(batch)


def _scalar(tape: Tape, loss: Any) -> Node:
    if not isinstance(loss, Tensor) or loss.shape != () or not loss.is_floating_point():
        found = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError("the loss is no number", needed="a float tensor of shape ()", found=found, try_="mean() of it")
    return tape.recorder.node(loss)


def _named(key: str, value: Any, tape: Tape) -> Iterator[tuple[str, Node]]:
    """The tensors in what a module returned, by their place in it."""
    if isinstance(value, Tensor):
        yield key, tape.recorder.node(value)
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _named(f"{key}.{k}", v, tape)
    elif isinstance(value, (tuple, list)):
        for i, v in enumerate(value):
            yield from _named(f"{key}.{i}", v, tape)
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from _named(f"{key}.{f.name}", getattr(value, f.name), tape)


class Step:
    """The outputs of a program as they are put together after the trace."""

    def __init__(self, tape: Tape, outputs: dict[str, Node]) -> None:
        self.tape, self.outputs = tape, outputs
        self.grads: dict[str, Node] = {}
        self.states: dict[str, str] = {}
        self.rates: list[float] = []

    def differentiate(self, loss: Node, clip: float | None) -> None:
        """Gradients of the parameters that move and are reached; the rest have none, as in torch."""
        recorder = self.tape.recorder
        wrt = {name: recorder.inputs[name] for name in self.tape.parameters if recorder.differentiable[recorder.inputs[name]]}
        found = backward({loss: constant(1.0, loss.dtype, recorder.mesh)}, wrt.values())
        self.grads = {name: found[node] for name, node in wrt.items() if node in found}
        if not self.grads:
            raise CaptureError("the loss depends on no parameter", needed="a loss computed from the module", found="none reached")
        if clip is not None:
            self._clip(clip)

    def _clip(self, most: float) -> None:
        """Torch's clip_grad_norm_: the norm of all gradients together brought to `most` at most."""
        total: Node | None = None
        for g in self.grads.values():
            square = sum_(w.square(to_dtype(g, torch.float32) if g.dtype != torch.float64 else g), dims=tuple(range(g.ndim)))
            total = square if total is None else w.add(total, to_dtype(square, total.dtype))
        assert total is not None
        norm = self.outputs["grad_norm"] = w.sqrt(total)
        scale = w.minimum(w.div(float(most), w.add(norm, 1e-6)), constant(1.0, norm.dtype, norm.mesh))
        self.grads = {k: w.mul(g, to_dtype(scale, g.dtype)) for k, g in self.grads.items()}

    def give_gradients(self) -> None:
        self.outputs |= {f"d.{name}": g for name, g in self.grads.items()}

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """The next value of every parameter that has a gradient, by one op each."""
        recorder = self.tape.recorder
        names = {id(t): name for name, t in self.tape.parameters.items()}
        step = w.add(recorder.declare("step", (), torch.int64), 1)
        self.outputs["step"] = step
        for i, group in enumerate(optimizer.param_groups):
            rule = rule_of(optimizer, group)
            rate = recorder.declare(f"lr.{i}", (), torch.float64)
            self.rates.append(float(group["lr"]))
            for p in group["params"]:
                traced = self.tape.traced.get(id(p))
                if traced is not None and names[id(traced)] in self.grads:
                    self._update_one(names[id(traced)], rule, rate, step)

    def _update_one(self, name: str, rule: Any, rate: Node, step: Node) -> None:
        recorder = self.tape.recorder
        p = recorder.inputs[name]
        state = [f"{s}.{name.removeprefix('param.')}" for s in rule.state]
        held = [recorder.declare(key, p.shape, p.dtype) for key in state]
        made = rule.op(p, self.grads[name], *held, rate, step, **rule.attrs)
        results = [made] if len(made.types) == 1 else list(made)
        self.outputs |= dict(zip((name, *state), results, strict=True))
        self.states |= dict.fromkeys(state, name)

    def keep_buffers(self) -> None:
        """Buffers, and parameters, that the forward pass wrote into."""
        for name, tensor in (*self.tape.buffers.items(), *self.tape.parameters.items()):
            cell = self.tape.recorder.ref(tensor).cell
            if cell.version and name not in self.outputs:
                self.outputs[name] = cell.node

    def finish(self, name: str) -> Captured:
        tape, recorder = self.tape, self.tape.recorder
        used = set(toposort(self.outputs.values()))
        inputs = [n for n in recorder.inputs.values() if n in used]
        kept = {n.attr("name") for n in inputs}
        state = tuple((k, k) for k in self.outputs if k in kept)
        lines = {n: line for n, line in recorder.lines.items() if n in used and line}
        program = new_program(name, recorder.mesh, inputs, self.outputs, state=state, lines=lines)
        real = {f"param.{k}": v for k, v in tape.model.named_parameters()} | {f"buffer.{k}": v for k, v in tape.model.named_buffers()}
        return Captured(
            program,
            {k: real[k] for k in tape.parameters},
            {k: real[k] for k in tape.buffers},
            recorder.constants,
            tape.found_blocks(),
            recorder.opaque,
            tuple(recorder.assumed),
            self.states,
            tuple(self.rates),
        )
