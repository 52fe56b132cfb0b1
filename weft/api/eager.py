"""One step of plain torch, on a copy of the user's module and optimizer, which nothing else notices.

Torch and weft draw random numbers in different orders. Here both draw stand-ins that depend on an element's place in its tensor alone,
so a dropout drops the same elements on either side and all the rest can be compared.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import ScriptModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from weft import interp
from weft.core.node import Node, make
from weft.core.program import Program, new_program
from weft.frontend.capture import Captured
from weft.frontend.capture.handlers import ATEN
from weft.frontend.capture.micro import micro_batch
from weft.frontend.capture.modes import _twin, norms_of_full_batch
from weft.frontend.capture.optimizer_settings import COUNT, settings_home
from weft.frontend.capture.optimizers import counted_before, kept_state, put_state
from weft.frontend.capture.recorder import Recorder
from weft.ops.pointwise import uniform_at

Loss = Callable[[nn.Module, Any], Tensor]
Pair = tuple[nn.Module, Any]


@dataclass(frozen=True)
class How:
    """What a step does besides the loss: clips, adds up the gradients of equal parts of the batch, casts."""

    clip: float | None = None
    parts: int = 1
    precision: torch.dtype | None = None


# -- random numbers ------------------------------------------------------------------------------------------------------------------


def stood_in(program: Program) -> Program:
    """The program, every random number drawn by its place in its tensor alone; its seed is to be 0."""
    if not any("site" in dict(n.attrs) for n in program.nodes):
        return program
    made: dict[Node, Node] = {}
    for n in program.nodes:
        attrs = dict(n.attrs)
        attrs |= {"site": 0} if "site" in attrs else {}
        made[n] = n if not n.args else make(n.op, tuple(made[a] for a in n.args), attrs)
    lines = {made[n]: line for n, line in program.lines.items() if n in made}
    return new_program(program.name, program.mesh, program.inputs, {k: made[n] for k, n in program.outputs}, state=program.state, lines=lines)


class Drawn(TorchDispatchMode):
    """Inside, torch's random ops give what `stood_in` does."""

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func is torch.ops.aten.native_dropout.default:
                return _dropped(*args)
            if func is torch.ops.aten.rrelu_with_noise.default:
                return _leaked(*args)
            twin = _twin(func) if func._schema.is_mutable else func
            if twin in ATEN:
                value = _as_captured(ATEN[twin], args, {k: v for k, v in kwargs.items() if k != "out"})
                target = kwargs.get("out", args[0]) if func._schema.is_mutable else None
                return value.to(_device(args, kwargs)) if target is None else target.copy_(value)
        return func(*args, **kwargs)


@contextlib.contextmanager
def drawn(captured: Captured) -> Iterator[None]:
    """Inside, torch draws stand-ins, if the program draws anything."""
    if "seed" not in captured.program.input_names:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), Drawn():
        yield


def _dropped(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    keep = uniform_at(index, torch.zeros((), dtype=torch.int64, device=x.device), 0) >= (p if train is not False else 0.0)
    return torch.where(keep, x / (1 - p), x * 0) if p < 1 else x * 0, keep


def _leaked(x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any) -> Tensor:
    """What a randomised ReLU gives, after it has written its slopes."""
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    drawn = uniform_at(index, torch.zeros((), dtype=torch.int64, device=x.device), 0).to(x.dtype) * (upper - lower) + lower
    noise.copy_(torch.where(x <= 0, drawn if training else (lower + upper) / 2, 1.0))
    return x * noise


def _as_captured(handler: Any, args: Any, kwargs: Any) -> Tensor:
    """What capture makes of a random op, run."""
    recorder, given = Recorder(), dict[str, Tensor]()

    def node(x: Tensor) -> Node:
        given[name := f"x{len(given)}"] = x.detach().cpu()
        return recorder.declare(name, x.shape, x.dtype)

    nodes = tree_map_only(Tensor, node, (args, kwargs))
    made = handler(recorder, *nodes[0], **nodes[1])
    program = stood_in(new_program("drawn", recorder.mesh, list(recorder.inputs.values()), {"y": made}))
    return interp.run_global(program, {**given, "seed": torch.tensor(0)})["y"]


def _device(args: Any, kwargs: Any) -> Any:
    tensor = next((x for x in args if isinstance(x, Tensor)), None)
    return kwargs.get("device") or (tensor.device if tensor is not None else torch.get_default_device())


@dataclass(frozen=True)
class Moment:
    """The state of Python's, numpy's and torch's random numbers."""

    python: Any
    numpy: Any
    torch: Tensor

    @staticmethod
    def now() -> Moment:
        numpy = sys.modules.get("numpy")
        return Moment(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state())

    def rerun(self) -> None:
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


@contextlib.contextmanager
def unnoticed(moment: Moment, device: torch.device) -> Iterator[None]:
    """Inside, random numbers are those of the moment and nothing is printed; afterwards they go on as before."""
    before, cudnn = Moment.now(), torch.backends.cudnn
    exactly = cudnn.flags(cudnn.enabled, cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False)
    devices = {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    with torch.random.fork_rng(**devices), exactly, norms_of_full_batch():
        try:
            moment.rerun()
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            before.rerun()


# -- whose step ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copied(model: nn.Module, optimizer: Any, device: torch.device) -> Iterator[Pair]:
    """A copy of both, on the device; a model that cannot be copied raises."""
    left = [x for m in model.modules() for x in vars(m).values() if isinstance(x, FakeTensor)]  # by a trace; torch cannot copy them
    mine, own = copy.deepcopy((model, optimizer), {id(x): x for x in left})
    if any(t.device != device for t in (*mine.parameters(), *mine.buffers())):
        mine.to(device)
        for state in own.state.values() if own is not None else ():
            state.update({k: x.to(device) for k, x in state.items() if isinstance(x, Tensor) and x.ndim})
    _count_as_captured(optimizer, own)
    yield mine, own


def _count_as_captured(optimizer: Any, own: Any) -> None:
    """Let a copy of an optimizer, or itself, count what a program counts as before its first step."""
    for group, mine in zip(optimizer.param_groups, own.param_groups, strict=True) if optimizer is not None else ():
        for p, q in zip(group["params"], mine["params"], strict=True):
            if "step" in optimizer.state.get(p, {}):
                before = own.state[q]["step"]
                count = counted_before(optimizer, p)
                own.state[q]["step"] = torch.full_like(before, count) if isinstance(before, Tensor) else count


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Inside, modules may change; afterwards they have the tensors and plain attributes that they had."""
    modules = [(m, dict(m._parameters), dict(m._buffers), dict(m.__dict__)) for m in model.modules()]
    try:
        yield
    finally:
        for m, parameters, buffers, attributes in modules:
            m.__dict__.clear()
            m.__dict__.update(attributes)
            if not isinstance(m, ScriptModule):
                m._parameters.update(parameters)
                m._buffers.update(buffers)


@contextlib.contextmanager
def itself(model: nn.Module, optimizer: Any, device: torch.device) -> Iterator[Pair]:
    """Both as they are; afterwards every tensor, its version too, and every plain attribute is what it was."""
    kept = [] if optimizer is None else [(p, state, dict(state)) for p, state in optimizer.state.items()]
    settings = [] if optimizer is None else [(home, dict(home)) for home in (vars(optimizer), *optimizer.param_groups)]
    of_optimizer = [x for _, _, own in kept for x in own.values() if isinstance(x, Tensor)]
    tensors = [(t, t.detach().clone(), t.grad) for t in (*model.parameters(), *model.buffers(), *of_optimizer)]
    with torch.autograd._unsafe_preserve_version_counter(tuple(t for t, _, _ in tensors)):
        try:
            _count_as_captured(optimizer, optimizer)
            with attributes_kept(model):
                yield model, optimizer
        finally:
            with torch.no_grad():
                for t, value, grad in tensors:
                    t.copy_(value)
                    t.grad = grad
            if optimizer is not None:
                optimizer.state.clear()
                for p, state, own in kept:
                    state.clear()
                    state.update(own)
                    optimizer.state[p] = state
            for home, before in settings:
                home.clear()
                home.update(before)


# -- the step --------------------------------------------------------------------------------------------------------------------------


def stepped(
    captured: Captured, original: nn.Module, pair: Pair, loss: Loss, batch: Any, how: How, device: torch.device
) -> dict[str, Tensor | None]:
    """What torch makes of the batch: the loss, `d.` gradients before clipping, parameters, buffers and the optimizer's state, by name."""
    model, optimizer = pair
    own = dict(zip(names_of(captured, original), (*model.parameters(), *model.buffers()), strict=True))
    paths = dict(zip(own, (n for n, _ in (*model.named_parameters(), *model.named_buffers())), strict=True))
    moving = {n: t for n, t in own.items() if isinstance(t, nn.Parameter)}
    for t in moving.values():
        t.grad = None
    out: dict[str, Tensor | None] = {}
    with drawn(captured), _before_hooks(moving) as seen:
        with torch.autocast(device.type, how.precision, enabled=how.precision is not None):
            value = _loss(model, loss, on(batch, device), how.parts)
        value.backward()
    out |= {f"d.{n}": None if t.grad is None else _dense(seen.get(n, t.grad).detach()).clone() for n, t in moving.items()}
    if how.clip is not None:
        out["grad_norm"] = nn.utils.clip_grad_norm_(list(model.parameters()), how.clip)
    if optimizer is not None:
        type(optimizer).step(optimizer)
        out |= _kept(captured, optimizer, own)
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # a forward may put another tensor in a buffer's place
    return {**out, "loss": value.detach(), **{n: now.get(paths[n], t).detach().clone() for n, t in own.items()}}


@contextlib.contextmanager
def _before_hooks(moving: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Inside, gradients of parameters with hooks are noted as they are before these."""
    seen: dict[str, Tensor] = {}
    handles = []
    for n, t in moving.items():
        if t.requires_grad and (t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None)):
            others = dict(t._backward_hooks or {})
            handles.append(t.register_hook(lambda g, n=n: seen.update({n: g.clone()})))
            for k, hook in others.items():  # torch calls them as they were put there
                del t._backward_hooks[k]  # type: ignore[attr-defined]
                t._backward_hooks[k] = hook  # type: ignore[index]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def load(captured: Captured, original: nn.Module, pair: Pair, given: Mapping[str, Tensor]) -> None:
    """Put a state reached meanwhile into both: tensors by the names they have in the program, and the steps taken."""
    model, optimizer = pair
    own = dict(zip(names_of(captured, original), (*model.parameters(), *model.buffers()), strict=True))
    with torch.no_grad():
        for n, t in own.items():
            if n in given:
                t.copy_(given[n])
    taken = given.get("step", torch.tensor(0))
    for name, update in captured.updates.items():
        at, before = name.removeprefix("param."), ""
        steps = float(given.get(f"{COUNT}.{at}", taken))
        if not steps:
            continue
        if name.startswith("group."):
            before = f"group_{name.removeprefix('group.')}_"
            at = next(k for k in captured.states if k.startswith(before)).partition(".")[2]
        kept = settings_home(optimizer, name.removeprefix("group.")) if before else optimizer.state[own[name]]
        device = torch.device("cpu") if before else own[name].device
        values = {s: given[k] for s in update.outputs if (k := f"{before}{s}.{at}") in given and s != "param"}
        values |= {s: torch.tensor(steps + captured.counts.get(name, 0)) for s in update.counted}
        put_state(kept, update, values, device)


def names_of(captured: Captured, model: nn.Module) -> list[str]:
    """The names that captured inputs have, of all parameters and then all buffers; those it does not read have names of their own."""
    known = {id(t): n for n, t in (*captured.parameters.items(), *captured.buffers.items())}
    named = [(f"param.{n}", t) for n, t in model.named_parameters()] + [(f"buffer.{n}", t) for n, t in model.named_buffers()]
    return [known.get(id(t), n) for n, t in named]


def _loss(model: nn.Module, loss: Loss, batch: Any, parts: int) -> Tensor:
    if parts == 1:
        value = loss(model, batch)
        return value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else value
    return torch.stack([loss(model, micro_batch(batch, i, parts)) for i in range(parts)]).mean()


def _dense(grad: Tensor) -> Tensor:
    """A gradient as a program has it, that of a sparse embedding too."""
    return grad.to_dense() if grad.layout is not torch.strided else grad


def _kept(captured: Captured, optimizer: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The optimizer's state, by the names the program has for it."""
    out: dict[str, Tensor | None] = {}
    counts = set()
    for name, update in captured.updates.items():
        if name.startswith("group."):
            continue
        kept = kept_state(optimizer, own[name])
        out |= {f"{s}.{name.removeprefix('param.')}": _tensor(kept.get(s)) for s in update.outputs if s != "param" and s not in update.counted}
        counts |= {float(kept[s]) - captured.counts.get(name, 0) for s in update.counted if s in kept}
    return {**out, **({"step": torch.tensor(int(max(counts)))} if counts else {})}


def _tensor(x: Any) -> Tensor | None:
    return x if x is None or isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)


def on(batch: Any, device: torch.device) -> Any:
    """A batch of one's own on the device, whatever holds it."""
    if isinstance(batch, Tensor):
        return batch.detach().to(device, copy=True)
    if isinstance(batch, Mapping):
        return {k: on(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [on(v, device) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return copy.copy(batch)
