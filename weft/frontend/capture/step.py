"""A step while it is traced: gradients asked for, parameters updated, and at the end the program of it all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.autodiff import backward
from weft.core.errors import CaptureError
from weft.core.names import readable
from weft.core.node import Node, constant, toposort, user_line
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture.batches import tensors
from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.calls import ModuleCall
from weft.frontend.capture.complexes import refuse_complex
from weft.frontend.capture.guards import Reads, unheard
from weft.frontend.capture.joint import OwnGradient, asking_modules, refuse_graph, run_after_gradient
from weft.frontend.capture.modes import function
from weft.frontend.capture.optimizers import COUNT, Rule, kept_state, number, require_no_hooks, rule_of, steps_taken
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.tape import Tape
from weft.frontend.capture.values import TAG
from weft.ops import pointwise as w
from weft.ops.fill import zeros_like
from weft.ops.source import input_op


@dataclass(frozen=True)
class Captured:
    """A program, and how its inputs and outputs hang together with the module and the optimizer it came from.

    Inputs are named by what they are: `param.NAME`, `buffer.NAME`, `batch.KEY`, `constant.0`, the optimizer's `exp_avg.NAME`
    and so on, `lr.0` per parameter group, `step`, `seed`. An output of the same name is the input's next value.
    Any other setting of a group is a number in the program, or an input such as `momentum.0` where it is among `given`.
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
    gradients: Mapping[str, Node] = field(default_factory=dict)  # `param.NAME` -> its gradient before clipping, where vjps made it
    rules: tuple[Rule, ...] = ()  # of every parameter group, as it was captured
    given: frozenset[str] = frozenset()  # settings of the groups that are inputs
    begun: Mapping[str, Tensor] = field(default_factory=dict)  # state the optimizer had already, by input name
    counts: Mapping[str, int] = field(default_factory=dict)  # updates a parameter had before, where it had some
    reads: Reads | None = None  # what was read from Python
    calls: tuple[ModuleCall, ...] = ()  # of modules, as they were heard
    joint: bool = False  # torch's autograd ran in the trace, with Python in it

    def inputs(self, batch: Any, seed: int = 0, step: int = 0, rates: Sequence[float] | None = None) -> dict[str, Tensor]:
        """A value for every input: the module's tensors, the batch, zeros for a new optimizer's state."""
        values = {**self.parameters, **self.buffers, **self.constants, **named_batch(batch)}
        values = {k: v.detach() for k, v in values.items()}
        values |= {k: self.begun.get(k, torch.zeros_like(self.parameters[p].detach())) for k, p in self.states.items()}
        values |= {f"lr.{i}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(rates or self.rates)}
        values |= {f"{k}.{i}": torch.tensor(x, dtype=torch.float64) for i, rule in enumerate(self.rules) for k, x in rule.settings.items()}
        values |= {f"{COUNT}.{p.removeprefix('param.')}": torch.tensor(step) for p in self.states.values()}
        values |= {"seed": torch.tensor(seed), "step": torch.tensor(step), **self.numbers(batch)}
        return {name: values[name] for name in self.program.input_names}

    def numbers(self, batch: Any) -> dict[str, Tensor]:
        """Inputs that are numbers in Python, as they are now."""
        lifted = self.reads.lifted if self.reads is not None else {}
        return {n: torch.tensor(x, dtype=lifted[n][1]) for n, x in self.reads.numbers(batch).items()} if self.reads is not None and lifted else {}

    def report(self) -> str:
        """What a user should know: ops weft does not know, with the lines that would teach them, and what was assumed."""
        told = [f"assumed: {what}" for what in self.assumed]
        for target, lines in self.opaque.items():
            places = ", ".join(dict.fromkeys(line for line in lines if line)) or "the model"
            told.append(f"{target} has no entry: it stays whole on every rank ({len(lines)} times, {places}). To teach it:")
            told.append(lesson(target))
        return "\n".join(told)


def lesson(target: str) -> str:
    """The lines that teach weft a torch op."""
    name = target.split(".")[1]
    return f"""
    import torch, weft
    from weft.frontend.capture import teach
    from weft.ops.registry import Kind

    {name} = weft.define(
        "{name}", kind=Kind.WHOLE,
        equation="a b -> a b",              # the dims of every operand and result; what may be cut follows
        run=torch.ops.{target},
        vjp=lambda n, ct: (...,),           # one gradient per operand, in weft ops
    )
    teach(torch.ops.{target})({name})
"""


def named_batch(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by the names their inputs have."""
    return tensors("batch.0" if isinstance(batch, Tensor) else "batch", batch)


class Step:
    """Puts a program together while torch is listened to. Gradients live where torch has them, in `.grad`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.outputs: dict[str, Node] = {}
        self.states: dict[str, Node] = {}  # optimizer state by input name, its value now
        self.owners: dict[str, str] = {}
        self.rates: list[float] = []
        self.rules: list[Rule] = []
        self.begun: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.noted: dict[str, Node] = {}
        tape.recorder.step = self

    @property
    def recorder(self) -> Recorder:
        return self.tape.recorder

    # -- gradients -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """loss.backward(): gradients of the parameters that move and are reached, added to `.grad`."""
        moving = {n: t for n, t in self.tape.parameters.items() if self.recorder.differentiable[self.recorder.inputs[n]]}
        for (name, tensor), grad in zip(moving.items(), self.gradients([loss], moving.values(), [gradient]), strict=True):
            if grad is not None:
                tensor.grad = grad if tensor.grad is None else tensor.grad + grad
                run_after_gradient(self.tape.reals[name], tensor)

    def gradients(self, of: Iterable[Tensor], wrt: Iterable[Tensor], cts: Iterable[Tensor | None]) -> list[Tensor | None]:
        recorder = self.recorder
        if recorder.joint:
            return list(torch.autograd.grad(list(of), list(wrt), list(cts), allow_unused=True))
        seeds: dict[Node, Node] = {}
        for loss, ct in zip(of, cts, strict=True):
            node = recorder.node(loss)
            one = recorder.node(ct) if ct is not None else constant(1.0, node.dtype, recorder.mesh)
            seeds[node] = w.add(seeds[node], one) if node in seeds else one
        with unheard():
            found = backward(seeds, [recorder.ref(t).read() for t in wrt])
        return [recorder.wrap(found[n], t) if (n := recorder.ref(t).read()) in found else None for t in wrt]

    def note_gradients(self) -> None:
        """Remember the gradients as they are now; those of a joint trace are not vjps of the forward pass, and stay unknown."""
        if not self.recorder.joint:
            grads = {name: t.grad for name, t in self.tape.parameters.items()}
            self.noted = {name: self.recorder.ref(g).read() for name, g in grads.items() if g is not None}

    def give_gradients(self) -> None:
        for name, tensor in self.tape.parameters.items():
            if tensor.grad is not None:
                self.outputs[f"d.{name}"] = self.recorder.ref(tensor.grad).read()

    # -- updates -------------------------------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.step(): the next value of every parameter that has a gradient, by one op each."""
        require_no_hooks(optimizer)
        names = {id(t): name for name, t in self.tape.parameters.items()}
        self.rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
        self.rates = [number(group["lr"]) for group in optimizer.param_groups]
        step = self.states["step"] = w.add(self._held("step", (), torch.int64), 1)
        for i, (group, rule) in enumerate(zip(optimizer.param_groups, self.rules, strict=True)):
            given = [self._held(f"{k}.{i}", (), torch.float64) for k in rule.settings if k in self.recorder.given]
            rate = self._held(f"lr.{i}", (), torch.float64)
            for p in group["params"]:
                traced = self.tape.traced.get(id(p))
                if traced is not None and traced.grad is not None:
                    name = names[id(traced)]
                    self._take_over(name, p, rule, optimizer)
                    self._update_one(name, traced, rule, [*given, rate, self._count(name, step) if rule.state else step])
                elif traced is None and id(p) in self.recorder.outside:
                    raise CaptureError(
                        "the optimizer trains a tensor that is no parameter of the module",
                        needed="parameters that model.parameters() has",
                        found=f"one of shape {tuple(p.shape)} in group {i}",
                        try_="register it, as in self.weight = nn.Parameter(...), or in an nn.ParameterList",
                    )

    def _take_over(self, name: str, p: Tensor, rule: Rule, optimizer: torch.optim.Optimizer) -> None:
        """State that the optimizer has already: of a run that was loaded, or what it starts with."""
        self.begun |= {f"{s}.{name.removeprefix('param.')}": x for s, x in kept_state(optimizer, p, rule).items()}
        before = steps_taken(optimizer, p, rule)
        if before:
            self.counts[name] = before

    def _count(self, name: str, step: Node) -> Node:
        """Which update of the parameter this is: the step, or where parameters count apart its own number, and what it had before."""
        if COUNT in self.recorder.given:
            step = w.add(self._held(f"{COUNT}.{name.removeprefix('param.')}", (), torch.int64), 1)
        return w.add(step, self.counts[name]) if name in self.counts else step

    def _held(self, name: str, shape: Sequence[int], dtype: torch.dtype, role: Role = Role.SETTING) -> Node:
        """The value now of something the optimizer keeps."""
        if name not in self.states:
            self.states[name] = self.recorder.declare(name, shape, dtype, role)
        return self.states[name]

    def _update_one(self, name: str, traced: Tensor, rule: Rule, numbers: Sequence[Node]) -> None:
        ref, grad = self.recorder.ref(traced), self.recorder.ref(traced.grad).read()
        keys = [f"{s}.{name.removeprefix('param.')}" for s in rule.state]
        held = [self._held(key, traced.shape, traced.dtype, Role.STATE) for key in keys]
        with unheard():
            made = rule.op(ref.read(), grad, *held, *numbers, **rule.with_given(self.recorder.given))
            new, *states = [made] if len(made.types) == 1 else list(made)
        ref.write(new)
        self.states |= dict(zip(keys, states, strict=True))
        self.owners |= dict.fromkeys(keys, name)

    def zero_grad(self) -> None:
        for tensor in self.tape.parameters.values():
            tensor.grad = None

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer's own methods are this step's."""
        mine = {"step": lambda closure=None: self.update(optimizer), "zero_grad": lambda set_to_none=True: self.zero_grad()}
        for group in optimizer.param_groups:
            rule_of(optimizer, group)
        for method in mine.values():
            method.of_weft = True  # type: ignore[attr-defined]
        kept = {k: optimizer.__dict__[k] for k in mine if k in optimizer.__dict__}
        try:
            optimizer.__dict__.update(mine)
            yield
        finally:
            for k in mine:
                del optimizer.__dict__[k]
            optimizer.__dict__.update(kept)

    # -- the program ---------------------------------------------------------------------------------------------------

    def give(self, key: str, value: Any) -> None:
        """The tensors in what the user's code returned, named by their place in it."""
        for name, tensor in tensors(key, value, objects=False).items():
            if tensor.is_complex():
                raise refuse_complex(f"what the module returns ({name})", tensor)
            self.outputs[name] = self.recorder.node(tensor)

    def keep_state(self) -> None:
        """What the step leaves in parameters, buffers and the optimizer; called while the module is still traced."""
        self.outputs |= self.tape.written()
        self.outputs |= {k: n for k, n in self.states.items() if n.op is not input_op}

    def finish(self, name: str) -> Captured:
        tape, recorder = self.tape, self.recorder
        if not self.outputs:
            raise CaptureError("nothing was computed", needed="a result, a loss or an update", found="none", where=user_line())
        used = set(toposort(self.outputs.values()))
        inputs = [n for name, n in recorder.inputs.items() if n in used or name in self.outputs]  # state may be written and never read
        kept = {n.attr("name") for n in inputs}
        lines = {n: line for n, line in recorder.lines.items() if n in used and line}
        state = tuple((k, k) for k in self.outputs if k in kept)
        program = new_program(name, recorder.mesh, inputs, self.outputs, state=state, lines=lines)
        named = (("param", tape.model.named_parameters()), ("buffer", tape.model.named_buffers()))
        real = {readable(f"{kind}.{k}"): v for kind, tensors in named for k, v in tensors}
        return Captured(
            program, {k: real[k] for k in tape.parameters}, {k: real[k] for k in tape.buffers}, recorder.constants,
            tape.found_blocks(), recorder.opaque, tuple(recorder.assumed), self.owners, tuple(self.rates),
            self.noted, tuple(self.rules), frozenset(recorder.given), self.begun, self.counts, recorder.reads,
            tuple(tape.blocks.calls.noted), recorder.joint,
        )  # fmt: skip


@function(Tensor.backward, tensors=True)
def _backward(r: Recorder, loss: Tensor, gradient: Any = None, *_: Any, **__: Any) -> None:
    r.step.backward(loss, gradient)


@function(Tensor.register_hook, tensors=True)
def _register_hook(r: Recorder, x: Tensor, hook: Any) -> Any:
    """A hook of an activation: autograd must run for it to be heard."""
    if not r.joint:
        raise OwnGradient("register_hook")
    return Tensor.register_hook(x, hook)


class _Refused:
    """Stands for a node of torch's graph, of which a trace has none: whoever would hook or follow it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise refuse_graph(f"grad_fn.{name}")


@function(Tensor.grad_fn.__get__, tensors=True)  # type: ignore[attr-defined]
def _grad_fn(r: Recorder, x: Tensor) -> Any:
    """Torch's own code reads it where autograd runs; to the user's it says whether there is a gradient, and no more."""
    caller = next(asking_modules(), "")
    if caller.startswith("torch.autograd.graph"):
        raise refuse_graph("register_multi_grad_hook")
    if caller.startswith("torch.") or not hasattr(x, TAG):
        with torch._C.DisableTorchFunction():
            return x.grad_fn
    leaf = r.ref(x).read().op is input_op
    return _Refused() if not leaf and r.moves(r.ref(x).read()) else None


@function(torch.autograd.grad, tensors=True)
def _grad(r: Recorder, outputs: Any, inputs: Any, grad_outputs: Any = None, *_: Any, **more: Any) -> Any:
    of = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wrt = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    cts = [None] * len(of) if grad_outputs is None else [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    found = r.step.gradients(of, wrt, cts)
    if more.get("allow_unused") or more.get("materialize_grads"):
        return tuple(found)
    return tuple(r.wrap(zeros_like(r.node(t))) if g is None else g for g, t in zip(found, wrt, strict=True))


@function(Tensor.requires_grad_, tensors=True)
def _require_grad(r: Recorder, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """From here on it is a leaf that gradients are asked of: others that have its values, as what it was detached from has, are not it."""
    if r.joint or not hasattr(tensor, TAG):
        with torch._C.DisableTorchFunction():
            return tensor.requires_grad_(requires_grad)
    if requires_grad and not r.moves(r.node(tensor)):
        r.make_leaf(tensor)
    return tensor


@function(Tensor.requires_grad.__set__, tensors=True)
def _set_requires_grad(r: Recorder, tensor: Tensor, value: bool) -> None:
    _require_grad(r, tensor, value)


@function(Tensor.requires_grad.__get__, tensors=True)
def _requires_grad(r: Recorder, tensor: Tensor) -> bool:
    if r.joint or not hasattr(tensor, TAG):
        with torch._C.DisableTorchFunction():
            return tensor.requires_grad
    return r.moves(r.node(tensor))
