"""A step while it is traced: gradients asked for, parameters updated, and at the end the program of it all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.autodiff import backward
from weft.core.errors import CaptureError
from weft.core.evaluate import values_of
from weft.core.names import readable
from weft.core.node import Node, constant, remade, toposort, user_line
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.frontend.capture.batch_numbers import SharedLayer
from weft.frontend.capture.batches import named_batch, tensors
from weft.frontend.capture.blocks import Instance
from weft.frontend.capture.calls import ModuleCall
from weft.frontend.capture.complexes import refuse_complex
from weft.frontend.capture.constants import unheard as real
from weft.frontend.capture.errors import explained_backward
from weft.frontend.capture.guards import Reads, unheard
from weft.frontend.capture.handlers import function
from weft.frontend.capture.joint import CustomGradient, Handle, asking_modules, hooked, hooked_gradient, refuse_graph, run_after_gradient
from weft.frontend.capture.numbers import evaluate
from weft.frontend.capture.optimizer_settings import COUNT, OWN, Settings, all_settings, settings_home
from weft.frontend.capture.optimizers import Update, Updates, captured_updates, kept_state, require_own_step, steps_taken
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.tape import Tape
from weft.frontend.capture.values import TAG
from weft.ops import pointwise as w
from weft.ops.custom_gradient import own_gradient
from weft.ops.fill import full_op, zeros_like
from weft.ops.norm import to_dtype as cast_to
from weft.ops.optimizers import aligned
from weft.ops.optimizers import update as update_op
from weft.ops.source import const, input_op


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
    groups: Mapping[str, Settings] = field(default_factory=dict)  # the optimizer's, as they were captured
    updates: Mapping[str, Update] = field(default_factory=dict)  # `param.NAME`, or `group.0` -> how it is updated
    guards: Mapping[Node, bool] = field(default_factory=dict)  # what the optimizer asked about its settings, and the answers the program is for
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
        values |= {k: self.begun[k] if k in self.begun else self._zeros(k) for k in self.states if k in self.program.input_names}
        values |= {f"{k}.{i}": torch.tensor(x, dtype=torch.float64) for i, group in self.groups.items() for k, x in group.numbers.items()}
        values |= {f"lr.{i}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(rates or self.rates)}
        values |= {f"{COUNT}.{p.removeprefix('param.')}": torch.tensor(step) for p in self.states.values()}
        values |= {"seed": torch.tensor(seed), "step": torch.tensor(step), **self.numbers(batch)}
        return {name: values[name] for name in self.program.input_names}

    def _zeros(self, state: str) -> Tensor:
        node, param = self.program.input_names[state], self.parameters[self.states[state]]
        return torch.zeros(node.shape, dtype=node.dtype, device=param.device)

    def numbers(self, batch: Any) -> dict[str, Tensor]:
        """Inputs that are numbers in Python, as they are now."""
        lifted = self.reads.lifted if self.reads is not None else {}
        return {n: torch.tensor(x, dtype=lifted[n][1]) for n, x in self.reads.numbers(batch).items()} if self.reads is not None and lifted else {}

    def holds(self, settings: Mapping[str, float]) -> bool:
        """Whether the optimizer, asked the same of its settings now, would answer the same."""
        return all(bool(evaluate(question, settings)) == answer for question, answer in self.guards.items())

    def report(self) -> str:
        """What a user should know: ops weft does not know, with the lines that would register them, and what was assumed."""
        notes = [f"assumed: {what}" for what in self.assumed]
        for target, lines in self.opaque.items():
            places = ", ".join(dict.fromkeys(line for line in lines if line)) or "the model"
            notes.append(f"{target} has no entry: it stays replicated on every rank ({len(lines)} times, {places}). To register it:")
            notes.append(lesson(target))
        return "\n".join(notes)


def lesson(target: str) -> str:
    """The lines that register the lowering of a torch op."""
    name = target.split(".")[1]
    return f"""
    import torch, weft
    from weft.frontend.capture import register_lowering
    from weft.ops.registry import Kind

    {name} = weft.lang.define(
        "{name}", kind=Kind.COMPOSITE,
        equation="a b -> a b",              # the dims of every operand and result; what may be cut follows
        run=torch.ops.{target},
        vjp=lambda n, ct: (...,),           # one gradient per operand, in weft ops
    )
    register_lowering(torch.ops.{target})({name})
"""


class Step:
    """Puts a program together while torch is listened to. Gradients live where torch has them, in `.grad`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.outputs: dict[str, Node] = {}
        self.states: dict[str, Node] = {}  # optimizer state by input name, its value now
        self.owners: dict[str, str] = {}
        self.rates: list[float] = []
        self.groups: dict[str, Settings] = {}
        self.updates: dict[str, Update] = {}
        self.guards: Mapping[Node, bool] = {}
        self.begun: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.noted: dict[str, Node] = {}
        self.raw: dict[str, Node] = {}  # gradients of parameters with hooks, before these
        self.again: list[Callable[[], bool]] = []  # whether hooks, asked again, do the same
        tape.recorder.step = self

    @property
    def recorder(self) -> Recorder:
        return self.tape.recorder

    # -- gradients -----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, gradient: Tensor | None = None, graph: bool = False, only: Iterable[Tensor] | None = None) -> None:
        """loss.backward(): gradients of the parameters that move and are reached, added to `.grad`; constants, but with a `graph`."""
        wanted = None if only is None else {id(t) for t in only}
        if wanted is not None and (extra := wanted - {id(t) for t in self.tape.parameters.values()}):
            raise CaptureError("backward() is asked for gradients of other tensors", needed="inputs= of the module's parameters", found=f"{len(extra)} others",
                               try_="torch.autograd.grad, which gives them", where=user_line())  # fmt: skip
        asked = {n: t for n, t in self.tape.parameters.items() if wanted is None or id(t) in wanted}
        moving = {n: t for n, t in asked.items() if self.recorder.differentiable[self.recorder.inputs[n]]}
        for (name, tensor), grad in zip(moving.items(), self.gradients([loss], moving.values(), [gradient]), strict=True):
            if grad is None:
                continue
            if not self.recorder.joint:
                node = self.recorder.ref(grad).read()
                self.raw[name] = w.add(self.raw[name], node) if name in self.raw else node
                grad = hooked_gradient(self.tape.reals[name], grad)
            with torch.set_grad_enabled(graph or self.recorder.joint):
                grad = grad if tensor.grad is None else tensor.grad + grad
            tensor.grad = grad if graph or self.recorder.joint else self.recorder.still(grad)
            run_after_gradient(self.tape.reals[name], tensor)

    def gradients(self, of: Iterable[Tensor], wrt: Iterable[Tensor], cts: Iterable[Tensor | None]) -> list[Tensor | None]:
        recorder = self.recorder
        if recorder.joint:
            with explained_backward():
                return list(torch.autograd.grad(list(of), list(wrt), list(cts), allow_unused=True))
        seeds: dict[Node, Node] = {}
        for loss, ct in zip(of, cts, strict=True):
            node = recorder.node(loss)
            one = recorder.node(ct) if ct is not None else constant(1.0, node.dtype, recorder.mesh)
            seeds[node] = w.add(seeds[node], one) if node in seeds else one
        _require_hooked(seeds)
        self.require_same_hooks()
        with unheard():
            found = backward(seeds, [recorder.ref(t).read() for t in wrt])
        return [recorder.wrap(found[n], t) if (n := recorder.ref(t).read()) in found else None for t in wrt]

    def require_same_hooks(self) -> None:
        if not all(same() for same in self.again):
            raise CustomGradient("a hook that does not always do the same")

    def note_gradients(self) -> None:
        """Remember the gradients as they are before hooks of parameters; those of a joint trace are not vjps of the forward pass, and stay unknown."""
        if not self.recorder.joint:
            self.noted = dict(self.raw)

    def give_gradients(self) -> None:
        for name, tensor in self.tape.parameters.items():
            if tensor.grad is not None:
                self.outputs[f"d.{name}"] = self.recorder.ref(tensor.grad).read()

    # -- updates -------------------------------------------------------------------------------------------------------

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """optimizer.step(): the next value of every parameter that has a gradient, and of the optimizer's state, as its own step makes them."""
        self._run_hooks(optimizer)
        names = {id(t): name for name, t in self.tape.parameters.items()}
        moving: list[tuple[int, Tensor, Tensor]] = []
        for i, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                traced = self.tape.traced.get(id(p))
                if traced is not None and traced.grad is not None:
                    moving.append((i, p, traced))
                elif traced is None and id(p) in self.recorder.outside:
                    raise _no_parameter(i, p)
        grads = [self.recorder.ref(t.grad).read() for _, _, t in moving]
        with unheard():
            made = captured_updates(optimizer, [(i, p, g.dtype) for (i, p, _), g in zip(moving, grads, strict=True)], self.recorder.given)
            self.groups, self.guards = all_settings(optimizer), made.guards
            self.rates = [group.numbers.get("lr", 0.0) for g, group in self.groups.items() if g != OWN]
            self._apply(optimizer, made, [(i, names[id(t)], p, t) for i, p, t in moving], grads)

    def _run_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Hooks that run before the optimizer's step, on what stands for its parameters."""
        groups, traced = optimizer.param_groups, self.tape.traced
        kept = [group["params"] for group in groups]
        try:
            for hook in getattr(optimizer, "_optimizer_step_pre_hooks", {}).values():
                for group, params in zip(groups, kept, strict=True):
                    group["params"] = [traced.get(id(p), p) for p in params]
                with torch.no_grad():
                    given = hook(optimizer, (), {})
                if given is not None:
                    raise CaptureError("a hook gives the optimizer's step other arguments", needed="None", found=repr(given)[:80])
        finally:
            for group, params in zip(groups, kept, strict=True):
                group["params"] = params

    def _apply(self, optimizer: torch.optim.Optimizer, made: Updates, moving: Sequence[tuple[int, str, Tensor, Tensor]], grads: Sequence[Node]) -> None:
        step = self.states["step"] = w.add(self._value_of_state("step", (), torch.int64), 1)
        swap = {n: self._value_of_state(name, (), torch.float64) for name, n in made.settings.items()}
        first = {str(at): name for at, name, _, _ in reversed(moving)}
        first[OWN] = moving[0][1] if moving else ""
        for g, group in made.groups.items():
            swap |= self._state_of(group, first[g], f"group_{g}_", {k: x for k, x in settings_home(optimizer, g).items() if k in group.nest}, None)
            self.updates[f"group.{g}"] = group
        swaps = []
        for (_, name, p, traced), update, grad in zip(moving, made.of, grads, strict=True):
            before = steps_taken(optimizer, p, update)
            if before:
                self.counts[name] = before
            count = self._count(name, step) if len(update.outputs) > 1 else step
            own = {update.inputs["param"]: self.recorder.ref(traced).read(), update.inputs["grad"]: grad}
            own |= {update.inputs[s]: cast_to(w.sub(count, 1), update.inputs[s].dtype) for s in update.counted if s in update.inputs}
            own |= {made.count: cast_to(count, made.count.dtype)} if made.count is not None else {}
            own |= self._state_of(update, name, "", kept_state(optimizer, p), p)
            self.updates[name] = update
            swaps.append((own, count))
        for own, _ in swaps if not made.apart else ():
            swap |= own
        for (i, name, _, traced), update, (own, count) in zip(moving, made.of, swaps, strict=True):
            self._update_one(i, name, traced, update, {**swap, **own}, count)
        for g, group in made.groups.items():
            found = remade(group.outputs.values(), {**swap, **(swaps[0][0] if made.count is not None else {})})
            self.states |= {f"group_{g}_{s}.{first[g].removeprefix('param.')}": found[n] for s, n in group.outputs.items()}

    def _state_of(self, update: Update, name: str, before: str, kept: Mapping[str, Any], p: Tensor | None) -> dict[Node, Node]:
        """State as inputs of the program; what the optimizer has of it already, or begins with, is noted."""
        out: dict[Node, Node] = {}
        for s in update.outputs:
            if s == "param" or s in update.counted:
                continue
            key, inside = f"{before}{s}.{name.removeprefix('param.')}", update.inputs.get(s, update.outputs[s])
            state = self._value_of_state(key, inside.shape, inside.dtype, Role.STATE)
            self.owners[key] = name
            out |= {update.inputs[s]: state} if s in update.inputs else {}
            with real():
                value = kept[s] if s in kept else _begins(update, s, p)
                if value is not None:
                    self.begun[key] = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=inside.dtype)
        return out

    def _count(self, name: str, step: Node) -> Node:
        """Which update of the parameter this is: the step, or where parameters count apart its own number, and what it had before."""
        if COUNT in self.recorder.given:
            step = w.add(self._value_of_state(f"{COUNT}.{name.removeprefix('param.')}", (), torch.int64), 1)
        return w.add(step, self.counts[name]) if name in self.counts else step

    def _value_of_state(self, name: str, shape: Sequence[int], dtype: torch.dtype, role: Role = Role.SETTING) -> Node:
        """The value now of something the optimizer keeps."""
        if name not in self.states:
            self.states[name] = self.recorder.declare(name, shape, dtype, role)
        return self.states[name]

    def _update_one(self, group: int, name: str, traced: Tensor, update: Update, swap: Mapping[Node, Node], count: Node) -> None:
        """One op where the update is elementwise; else as it was traced, the gradient laid out as the state is."""
        ref, inputs, outputs = self.recorder.ref(traced), update.inputs, update.outputs
        states = [s for s in outputs if s != "param" and s not in update.counted]
        found = {s: outputs[s] for s in states if update.body is None or outputs[s].shape != outputs["param"].shape}
        if update.known is not None:
            known, attrs = update.known
            numbers = [self.states[f"{key}.{group}"] for key in known.given(self.recorder.given).values()]
            rate = self.states[f"lr.{group}"]
            made = known.op(*(swap[inputs[s]] for s in ("param", "grad", *known.states)), *numbers, rate, count, **known.with_given(attrs, self.recorder.given))
            states = list(known.states)
        elif update.body is not None:
            states = [s for s in states if s not in found]
            numbers = [remade(update.body.numbers, swap)[n] for n in update.body.numbers]
            made = update_op(*(swap[inputs[s]] for s in ("param", "grad", *states)), *numbers, body=update.body.text, numbers=len(numbers))
        else:
            like = next((swap[inputs[s]] for s in states if s in inputs and inputs[s].shape == inputs["param"].shape), swap[inputs["param"]])
            swap = {**swap, inputs["grad"]: aligned(swap[inputs["grad"]], like)}
            states, made, found = [], remade([outputs["param"]], swap)[outputs["param"]], {s: outputs[s] for s in states}
        new, *next_ = [made] if len(made.types) == 1 else list(made)
        ref.write(new)
        bare = name.removeprefix("param.")
        self.states |= {f"{s}.{bare}": n for s, n in zip(states, next_, strict=True)}
        self.states |= {f"{s}.{bare}": n for s, n in zip(found, [remade([n], swap)[n] for n in found.values()], strict=True)}

    def zero_grad(self) -> None:
        for tensor in self.tape.parameters.values():
            tensor.grad = None

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer's own methods are this step's."""
        mine = {"step": lambda closure=None: self.update(optimizer), "zero_grad": lambda set_to_none=True: self.zero_grad()}
        require_own_step(optimizer)
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
        if recorder.reads is not None and recorder.reads.shared and any(n in recorder.stands for n in used):
            raise SharedLayer
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
            self.noted, self.groups, self.updates, self.guards, frozenset(recorder.given), self.begun, self.counts, recorder.reads,
            tuple(tape.blocks.calls.noted), recorder.joint,
        )  # fmt: skip


def _begins(update: Update, state: str, p: Tensor | None) -> Any:
    """What a state begins with, if that is not zeros."""
    node = update.initial.get(state)
    if node is None:
        return None
    inputs = [n for n in toposort([node]) if n.op is input_op]
    if inputs:
        assert p is not None
        return values_of([node], dict.fromkeys(inputs, p.detach()))[0]
    if node.op in (full_op, const) and not isinstance(node.attr("value"), str):
        value = node.attr("value")
        return None if value == 0 else torch.full((), value, dtype=node.dtype).expand(node.shape)
    return values_of([node], {})[0]


def _no_parameter(group: int, p: Tensor) -> CaptureError:
    return CaptureError(
        "the optimizer trains a tensor that is no parameter of the module",
        needed="parameters that model.parameters() has",
        found=f"one of shape {tuple(p.shape)} in group {group}",
        try_="register it, as in self.weight = nn.Parameter(...), or in an nn.ParameterList",
    )


@function(Tensor.backward, tensors=True)
def _backward(r: Recorder, loss: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> None:
    if r.function:
        raise CustomGradient(r.function)  # autograd puts gradients of what the function is given into their .grad
    r.step.backward(loss, gradient, bool(create_graph), [inputs] if isinstance(inputs, Tensor) else inputs)


@function(Tensor.register_hook, tensors=True)
def _register_hook(r: Recorder, x: Tensor, hook: Any) -> Any:
    """A hook of an activation, through which all that reads the activation has it."""
    if r.joint:
        return Tensor.register_hook(x, hook)
    node = r.ref(x).read()
    if node.op is input_op or not r.moves(node):
        raise CustomGradient("register_hook")
    (made,) = hooked(r, (x,), [lambda grads: hook(*grads)], complete=True)
    r.ref(x).stand_for(r.ref(made).read())
    return Handle()


def _require_hooked(of: Iterable[Node]) -> None:
    """Autograd must run where a value was read before it was hooked."""
    nodes = toposort(of)
    full = {n.args[0]: n for n in nodes if n.op is own_gradient and n.attr("complete")}
    if any(full.get(a, n) is not n for n in nodes for a in n.args) or any(n in full for n in of):
        raise CustomGradient("register_hook")


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
def _grad(
    r: Recorder, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False, *_: Any, **more: Any
) -> Any:
    of = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    wrt = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    cts = [None] * len(of) if grad_outputs is None else [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    found = r.step.gradients(of, wrt, cts)
    if not create_graph and not r.joint:
        found = [g if g is None else r.still(g) for g in found]
    if more.get("allow_unused") or more.get("materialize_grads"):
        return tuple(found)
    return tuple(r.wrap(zeros_like(r.node(t))) if g is None else g for g, t in zip(found, wrt, strict=True))


@function(Tensor.requires_grad_, tensors=True)
def _require_grad(r: Recorder, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """From here on it is a leaf that gradients are asked of: others that have its values, as what it was detached from has, are not it.
    A parameter whose flag is taken away is a constant until it has it again."""
    if r.joint or not hasattr(tensor, TAG):
        with torch._C.DisableTorchFunction():
            return tensor.requires_grad_(requires_grad)
    ref = r.ref(tensor)
    if ref.read().op.is_input and r.moves(ref.read()):
        ref.stopped = not requires_grad
    elif requires_grad and not r.moves(r.node(tensor)):
        r.make_leaf(tensor)
    return tensor


@function(Tensor.requires_grad.__set__, tensors=True)
def _set_requires_grad(r: Recorder, tensor: Tensor, value: bool) -> None:
    _require_grad(r, tensor, value)


@function(Tensor.data.__set__, tensors=True)
def _set_data(r: Recorder, tensor: Tensor, value: Tensor) -> None:
    """`p.data = x` is a write that no gradient sees, where the values take each other's place."""
    if not hasattr(tensor, TAG) or tensor.shape != value.shape or tensor.dtype != value.dtype:
        raise CaptureError(
            "another tensor is put into .data", needed="one of the same shape and dtype, into a tensor of the step",
            found=f"{tuple(value.shape)} {value.dtype} into {tuple(tensor.shape)} {tensor.dtype}", where=user_line(),
        )  # fmt: skip
    with torch.no_grad():
        tensor.copy_(value)


@function(Tensor.requires_grad.__get__, tensors=True)
def _requires_grad(r: Recorder, tensor: Tensor) -> bool:
    if r.joint or not hasattr(tensor, TAG):
        with torch._C.DisableTorchFunction():
            return tensor.requires_grad
    return r.moves(r.node(tensor))
