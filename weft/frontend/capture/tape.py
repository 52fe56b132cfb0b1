"""One trace: a module's tensors and a batch as inputs of a program to be, and torch listened to meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.jit import ScriptModule
from torch.nn.modules import transformer

import weft.frontend.capture.aten  # noqa: F401  registers what capture knows
from weft.core.errors import CaptureError
from weft.core.names import readable
from weft.core.node import Node, listening, user_line
from weft.core.role import Role
from weft.frontend.capture.batches import changed
from weft.frontend.capture.blocks import Blocks, Instance, intercepted
from weft.frontend.capture.complexes import refuse_complex
from weft.frontend.capture.constants import unheard
from weft.frontend.capture.errors import explained
from weft.frontend.capture.flex import flex_intercepted
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.huggingface import interfaces
from weft.frontend.capture.isomorphic import candidates
from weft.frontend.capture.joint import custom_gradients, mirror_hooks
from weft.frontend.capture.modes import listening_to_torch
from weft.frontend.capture.numbers import OfModel, asking, of_model
from weft.frontend.capture.places import Change, Place, changed_attributes, new_buffers, restore, same_type
from weft.frontend.capture.precision import autocast_on_cpu
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import TAG


@dataclass
class Tape:
    """What is traced now: the recorder, and the traced tensors of the module by the names of their inputs."""

    model: nn.Module
    recorder: Recorder
    blocks: Blocks
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    traced: dict[int, Tensor]  # a real tensor's id -> what stands for it
    homes: dict[str, tuple[nn.Module, str]]  # an input's name -> the module and name of its tensor
    reals: dict[str, Tensor] = field(default_factory=dict)  # an input's name -> the module's own tensor
    left: list[Change] = field(default_factory=list)  # attributes that the trace changed

    def batch(self, example: Any) -> Any:
        """The batch as inputs: the same structure, of traced tensors."""
        return changed(example, self._leaf)

    def _leaf(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not (value.is_meta or isinstance(value, FakeTensor)):
                self.recorder.batch[name] = value
            return self.recorder.fresh_input(name, value, Role.BATCH, moves=value.requires_grad)
        lifted = self.recorder.reads.lifted if self.recorder.reads is not None else {}
        return self.recorder.fresh_input(name, torch.empty((), dtype=lifted[name][1]), Role.BATCH) if name in lifted else value

    def written(self) -> dict[str, Node]:
        """Parameters and buffers that the trace wrote into, or put another tensor of their type in place of."""
        found = {}
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            owner, key = self.homes[name]
            now = owner._buffers.get(key, tensor) if name in self.buffers else tensor
            if now is not tensor and isinstance(now, Tensor):
                found |= {name: self.recorder.node(now)} if same_type(now, tensor) else {}
            elif self.recorder.ref(tensor).cell.version:
                found[name] = self.recorder.ref(tensor).read()
        return found

    def found_blocks(self) -> tuple[tuple[Instance, ...], ...]:
        return tuple(tuple(group) for group in self.blocks.found.values() if len(group) > 1)


@contextmanager
def tracing(
    model: nn.Module, joint: bool = False, capacity: float | None = None, given: Collection[str] = (), cacheless: bool = True,
    reads: Reads | None = None, numbers: bool = False,
) -> Iterator[Tape]:
    """Inside, the module computes on traced tensors, with `numbers` on what `.item()` gives too; afterwards it is as it was."""
    recorder = Recorder(joint=joint, capacity=capacity, given=frozenset(given), reads=reads, computed=of_model(numbers))
    with ExitStack() as stack:
        stack.enter_context(explained())
        tape = stack.enter_context(_swapped(model, recorder))
        tape.blocks.cacheless = cacheless
        stack.enter_context(custom_gradients(recorder))
        stack.enter_context(interfaces(model, recorder))
        stack.enter_context(flex_intercepted())
        stack.enter_context(autocast_on_cpu())
        stack.enter_context(_plain_kernels())
        stack.enter_context(_unchecked_distributions(recorder))
        stack.enter_context(_averages_as_tensors())
        stack.enter_context(_masks_as_given())
        stack.enter_context(_moved_as_in_torch())
        stack.enter_context(listening(lambda n: recorder.lines.setdefault(n, user_line() or "")))
        stack.enter_context(intercepted(tape.blocks))
        if reads is not None:
            reads.read_anew.clear()
            reads.asked.clear()
            reads.fixed.clear()
            stack.enter_context(_lifted(reads, recorder))
            stack.enter_context(reads.listening())
        stack.enter_context(listening_to_torch(recorder))
        if numbers:
            stack.enter_context(asking(OfModel(recorder)))
        yield tape


@contextmanager
def _lifted(reads: Reads, recorder: Recorder) -> Iterator[None]:
    """Inside, numbers that shall be inputs are tensors in the places where Python has them."""
    places = {name: (p, dtype) for name, (p, dtype) in reads.lifted.items() if isinstance(p, Place)}
    numbers = {name: place.now() for name, (place, _) in places.items()}
    stand_ins = {name: recorder.fresh_input(name, torch.empty((), dtype=dtype), Role.SETTING) for name, (_, dtype) in places.items()}
    try:
        for name, (place, _) in places.items():
            place.put(stand_ins[name])
        yield
        moved = [place.words for name, (place, _) in places.items() if place.now() is not stand_ins[name]]
    finally:
        for name, (place, _) in places.items():
            place.put(numbers[name])
    if moved:
        raise CaptureError("a number that shall be an input is changed by the model", needed="numbers it only reads", found=moved[0])


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Inside, torch does not choose oneDNN's ops, whose recurrent layers would hide what they compute."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextmanager
def _unchecked_distributions(recorder: Recorder) -> Iterator[None]:
    """Inside, torch.distributions does not look at its arguments to refuse some: that changes no value."""
    plain = Distribution.__init__

    def init(self: Any, batch_shape: Any = torch.Size(), event_shape: Any = torch.Size(), validate_args: Any = None) -> None:
        if validate_args is not False:
            recorder.assume("the arguments of torch.distributions are not checked")
        plain(self, batch_shape, event_shape, validate_args=False)

    Distribution.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Distribution.__init__ = plain  # type: ignore[method-assign]


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """Inside, torch's transformers take a mask as it is, and do not look whether it is causal: a hint that changes no value."""
    plain = transformer._detect_is_causal_mask

    def is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = is_causal_mask
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = plain


@contextmanager
def _moved_as_in_torch() -> Iterator[None]:
    """Inside, a module that is moved to where the batch is stays where it is: the trace is nowhere. One that has values may get another dtype."""
    plain = nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch._C._nn._parse_to(*args, **kwargs)[1]
        tensors = [t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()]
        if dtype is None or all(t.dtype == dtype for t in tensors):
            return self
        if any(isinstance(t, FakeTensor) for t in tensors):
            return plain(self, *args, **kwargs)
        with unheard():
            return plain(self, dtype=dtype)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = plain  # type: ignore[method-assign]


@contextmanager
def _averages_as_tensors() -> Iterator[None]:
    """Inside, a batch norm that averages over all batches (momentum=None) divides by their number without reading it."""
    kind = nn.modules.batchnorm._BatchNorm
    plain = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.momentum is not None or not self.training or self.running_mean is None:
            return plain(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        before = self.running_mean.clone(), self.running_var.clone()
        out = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True, 1.0, self.eps)
        for tensors, old in zip((self.running_mean, self.running_var), before, strict=True):
            with torch.no_grad():
                tensors.copy_(old + (tensors - old) / self.num_batches_tracked)
        return out

    kind.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.forward = plain  # type: ignore[method-assign]


@contextmanager
def _swapped(model: nn.Module, recorder: Recorder) -> Iterator[Tape]:
    """Inside, parameters and buffers are traced tensors, tied ones still tied."""
    for m in model.modules():
        _require_python(m)
    kept = [(m, dict(m._parameters), dict(m._buffers), dict(m.__dict__), _contents(m)) for m in model.modules()]
    paths = {m: path for path, m in model.named_modules()}
    alone = recorder.reads is not None and not recorder.reads.shared
    isomorphic = {} if recorder.joint or alone else candidates(model)
    tape = Tape(model, recorder, Blocks(recorder, isomorphic, paths), {}, {}, recorder.own, {})
    try:
        for m, parameters, buffers, *_ in kept:
            _enter(tape, f"param.{paths[m]}", Role.PARAMETER, m, m._parameters, parameters, tape.parameters)
            _enter(tape, f"buffer.{paths[m]}", Role.BUFFER, m, m._buffers, buffers, tape.buffers)
        yield tape
    finally:
        for m, parameters, buffers, attributes, contents in kept:
            words = f"model.{paths[m]}".rstrip(".")
            tape.left += changed_attributes(m, attributes, contents, words) + new_buffers(m, buffers, words)
            m.__dict__.clear()
            m.__dict__.update(attributes)
            for tensors, was in contents:
                restore(tensors, was)
            if not isinstance(m, ScriptModule):
                m._parameters.update(parameters)
                m._buffers.update(buffers)


def _require_python(module: nn.Module) -> None:
    """Refuse a scripted module that holds tensors: its parameters cannot be told from constants."""
    if isinstance(module, ScriptModule) and (dict(module._parameters) or dict(module._buffers)):
        raise CaptureError(
            f"{module.original_name} was scripted by torch.jit",
            needed="a module in Python, whose parameters and buffers can be traced",
            found="a ScriptModule with parameters or buffers of its own",
            try_="give weft the module that torch.jit.script or torch.jit.trace was given",
        )


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """What lies in the lists, sets and tables of a module: hooks among them, which transformers puts there when it is first called."""
    return [(x, x.copy()) for x in module.__dict__.values() if isinstance(x, (list, set, dict, deque))]


def _enter(
    tape: Tape, path: str, role: Role, module: nn.Module, table: dict[str, Any], real: Mapping[str, Tensor | None], named: dict[str, Tensor]
) -> None:
    for name, tensor in real.items():
        if tensor is None or hasattr(tensor, TAG) or (tensor.is_complex() and not isinstance(tensor, nn.Parameter)):
            # nothing, what an earlier trace left, or a table, which is a constant of the step
            continue
        if tensor.is_complex():
            raise refuse_complex(f"the parameter {name}", tensor)
        if id(tensor) not in tape.traced:
            full = readable(f"{path.rstrip('.')}.{name}")
            moves = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            traced = tape.recorder.fresh_input(full, tensor, role, moves=moves)
            tape.homes[full] = module, name
            named[full] = tape.traced[id(tensor)] = traced.requires_grad_(moves and tape.recorder.joint)
            tape.reals[full] = tensor
            if moves and tape.recorder.joint:
                mirror_hooks(tensor, traced)
        table[name] = tape.traced[id(tensor)]
