"""Models with an autograd function of their own, or hooks of the backward pass.

Its gradient need not be that of what it computes (a straight-through estimator, a gradient reversed), so weft's vjps would
be wrong for it. It is a node whose vjp is its own backward, traced once, and so is a value whose gradient a hook changes. For functions that
write in place, and for old hooks, torch's autograd runs under the trace: ATen's backward ops are traced like the forward ones, and an op intercepted
as a torch function enters autograd as one function, whose backward is weft's vjp.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.autodiff import backward
from weft.core.errors import CaptureError, WeftError
from weft.core.node import Node, toposort, user_line
from weft.frontend.capture.recorder import Recorder, substituted
from weft.ops.custom_gradient import with_gradient
from weft.ops.shape import concat, narrow, reshape


class CustomGradient(Exception):
    """A model called an autograd function of its own where autograd does not run."""


@contextmanager
def custom_gradients(recorder: Recorder) -> Iterator[None]:
    """Inside, an autograd function is refused unless autograd runs; checkpointing, which changes no value, is run straight."""
    plain = torch.autograd.Function.__dict__["apply"]
    replayed, around = checkpoint._checkpoint_without_reentrant_generator, torch_modules.BackwardHook

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            return _straight(recorder, args[0], args[2:])
        if not recorder.joint and not issubclass(cls, _JointFunction):
            return _alone(recorder, cls, args) if not kwargs else _decline(cls)
        return plain.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    checkpoint._checkpoint_without_reentrant_generator = _once
    if not recorder.joint:
        torch_modules.BackwardHook = functools.partial(_Around, recorder)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        torch_modules.BackwardHook = around  # type: ignore[misc]
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
        checkpoint._checkpoint_without_reentrant_generator = replayed


def _decline(cls: Any) -> Any:
    raise CustomGradient(cls.__name__)


class _Context:
    """What an autograd function is given to keep things in."""

    def __init__(self, needs: tuple[bool, ...], decline: Callable[..., Any]) -> None:
        self.needs_input_grad, self.saved_tensors = needs, ()
        self.mark_dirty, self.fixed, self.zeros = decline, list[Tensor](), True

    def set_materialize_grads(self, value: bool) -> None:
        self.zeros = value  # gradients of results that nobody reads

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.fixed += tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors  # type: ignore[assignment]

    save_for_forward = save_for_backward


def _alone(recorder: Recorder, cls: Any, args: tuple[Any, ...]) -> Any:
    """An autograd function as a node whose gradient is what its own backward makes of a cotangent; several results are parts of one."""
    moving = [isinstance(a, Tensor) and recorder.moves(recorder.node(a)) for a in args]
    context = _Context(tuple(moving), lambda *_: _decline(cls))
    with torch.no_grad():
        with _without_autograd(recorder, f"{cls.__name__}.forward"):
            if cls.setup_context is torch.autograd.Function.setup_context:
                out = cls.forward(context, *args)
            else:
                out = cls.forward(*args)
                cls.setup_context(context, args, out)
        outs = out if isinstance(out, tuple) else (out,)
        own = [x for x in outs if isinstance(x, Tensor) and x.is_floating_point() and not any(x is y for y in context.fixed)]
        if not any(moving) or not own:
            return out
        if len({x.dtype for x in own}) > 1 or len(outs) > 1 and not context.zeros:
            return _decline(cls)
        value = [recorder.ref(x).read() for x in own]
        full = value[0] if len(own) == 1 else concat([reshape(n, (-1,)) for n in value], 0)
        start = recorder.ref(recorder.placeholder(recorder.wrap(full))).read()
        cts = iter([recorder.wrap(n, x) for n, x in zip(_parts(start, value), own, strict=True)])
        with _without_autograd(recorder, f"{cls.__name__}.backward"):
            found = cls.backward(context, *(next(cts) if any(x is y for y in own) else torch.zeros_like(x) for x in outs))
        grads = [g for g, moves in zip(found if isinstance(found, tuple) else (found,), moving, strict=False) if moves]
        gradients = [None if g is None else recorder.ref(g).read() for g in grads]
    operands = [recorder.node(a) for a, moves in zip(args, moving, strict=True) if moves]
    if len(gradients) != len(operands) or any(g is not None and g.type != x.type for g, x in zip(gradients, operands, strict=True)):
        return _decline(cls)
    if not torch.is_grad_enabled():
        return out
    made = _parts(with_gradient(cls.__name__, full, operands, start, gradients, recorder.next_call()), value)
    wrapped = iter([recorder.wrap(n, x) for n, x in zip(made, own, strict=True)])
    results = tuple(next(wrapped) if any(x is y for y in own) else x for x in outs)
    return results if isinstance(out, tuple) else results[0]


@contextmanager
def _without_autograd(recorder: Recorder, method: str) -> Iterator[None]:
    """What a method of an autograd function raises inside, it may raise for want of autograd."""
    before, recorder.function = recorder.function, method
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("weft."):  # a refusal, or what the trace needs
            raise
        raise CustomGradient(method) from error
    finally:
        recorder.function = before


def _parts(full: Node, like: Sequence[Node]) -> list[Node]:
    """What nodes are of the one they were put together to."""
    if len(like) == 1:
        return [full]
    ends = list(itertools.accumulate(math.prod(n.shape) for n in like))
    return [reshape(narrow(full, 0, end - math.prod(n.shape), end), n.shape) for n, end in zip(like, ends, strict=True)]


def _once(function: Any, preserve: Any, context_fn: Any = None, *_: Any, **__: Any) -> Iterator[None]:
    """What stands around a checkpointed call that is not replayed: the context of its forward pass."""
    forward = nullcontext() if context_fn is None else context_fn()[0]
    with forward:
        yield


def _straight(recorder: Recorder, function: Any, args: tuple[Any, ...]) -> Any:
    """A reentrant checkpoint: no gradient leaves it unless one of its arguments has one."""
    moving = [a.requires_grad if recorder.joint else recorder.moves(recorder.node(a)) for a in args if isinstance(a, Tensor)]
    if any(moving) or not torch.is_grad_enabled():
        return function(*args)
    with torch.no_grad():
        return function(*args)


class _JointFunction(torch.autograd.Function):
    """A computation on nodes as one function of autograd. It is made over placeholders, so no two operands are one."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, call: Callable[[list[Node]], list[Node]], results: Callable[[], list[Any]], *tensors: Tensor) -> Any:
        slots = [recorder.ref(recorder.placeholder(t)).read() for t in tensors]
        ctx.recorder, ctx.slots, ctx.outs = recorder, slots, call(slots)
        ctx.actual = [recorder.ref(t).read() for t in tensors]
        made = substituted(ctx.outs, dict(zip(slots, ctx.actual, strict=True)))
        out = tuple(recorder.wrap_all(made, results()))
        ctx.mark_non_differentiable(*(t for t in out if not t.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> Any:
        recorder = ctx.recorder
        seeds = {n: recorder.ref(ct).read() for n, ct in zip(ctx.outs, cts, strict=True) if ct is not None and n.dtype.is_floating_point}
        grads = backward(seeds, ctx.slots)
        found = [grads.get(s) if s.dtype.is_floating_point else None for s in ctx.slots]
        there = substituted([g for g in found if g is not None], dict(zip(ctx.slots, ctx.actual, strict=True)))
        made = iter(there)
        return None, None, None, *(None if g is None else recorder.wrap(next(made)) for g in found)


def enter(recorder: Recorder, handler: Callable[..., Any], args: Any, kwargs: Any, results: Callable[[], list[Any]]) -> Any:
    """Call a handler on nodes from inside autograd; NotImplemented where it declines."""
    leaves, spec = tree_flatten((args, kwargs))
    where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    shape: list[Any] = []

    def call(nodes: list[Node]) -> list[Node]:
        filled = list(leaves)
        for i, n in zip(where, nodes, strict=True):
            filled[i] = n
        given, named = tree_unflatten(filled, spec)
        result = handler(recorder, *given, **named)
        if result is NotImplemented:
            raise _Declined
        found, out = tree_flatten(result)
        shape[:] = [out]
        return found

    try:
        out = _JointFunction.apply(recorder, call, results, *(leaves[i] for i in where))
    except _Declined:
        return NotImplemented
    return tree_unflatten(list(out), shape[0])


class _Declined(Exception):
    pass


# -- hooks of the backward pass -----------------------------------------------------------------------------------------


def has_old_hooks(model: nn.Module) -> bool:
    """Whether a module, or all of them, have hooks of the kind that torch puts on nodes of its graph (register_backward_hook)."""
    everyones = torch_modules._global_backward_hooks and not torch_modules._global_is_full_backward_hook
    return bool(everyones) or any(m._backward_hooks and not m._is_full_backward_hook for m in model.modules())


class _NotThere(tuple[Any, ...]):
    """The gradients of a module's results, while those of its operands are traced: a hook that reads them needs autograd."""

    def __getitem__(self, *_: Any) -> Any:
        raise CustomGradient("grad_output")

    __len__ = __iter__ = __bool__ = __getitem__  # type: ignore[assignment]


class _Around:
    """What torch puts around a call of a module with hooks: here its operands and results have gradients that the hooks make."""

    def __init__(self, recorder: Recorder, module: nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> None:
        self.recorder, self.module, self.hooks, self.pre_hooks = recorder, module, hooks, pre_hooks

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.hooks and torch.is_grad_enabled() and not any(isinstance(a, Tensor) and self.recorder.moves(self.recorder.node(a)) for a in args):
            raise CustomGradient("a hook that is given no gradient of an operand")
        return hooked(self.recorder, args, [functools.partial(hook, self.module) for hook in self.hooks], (_NotThere(),))

    def setup_output_hook(self, result: Any) -> Any:
        hooks = [functools.partial(hook, self.module) for hook in self.pre_hooks]
        return hooked(self.recorder, result, hooks) if isinstance(result, tuple) else hooked(self.recorder, (result,), hooks)[0]


def hooked(recorder: Recorder, values: tuple[Any, ...], hooks: Sequence[Any], more: tuple[Any, ...] = (), complete: bool = False) -> tuple[Any, ...]:
    """Values whose gradients are what hooks make of them; each must be made of its own alone. Hooks are asked again when gradients are."""
    moving = [i for i, x in enumerate(values) if hooks and isinstance(x, Tensor) and recorder.moves(recorder.node(x))]
    if not moving or not torch.is_grad_enabled():
        return values
    starts = {i: recorder.ref(recorder.placeholder(values[i])).read() for i in moving}

    def made() -> dict[int, Node | None]:
        given = tuple(recorder.wrap(starts[i], x) if i in starts else None for i, x in enumerate(values))
        try:
            with torch.no_grad():
                for hook in hooks:
                    found = hook(given, *more)
                    given = given if found is None else found if isinstance(found, tuple) else (found,)
            return {i: None if given[i] is None else recorder.ref(given[i]).read() for i in moving}
        except Exception as error:  # autograd may know better, and else says what is wrong
            raise CustomGradient("a hook") from error

    first, out = made(), list(values)
    for i, g in first.items():
        node = recorder.node(values[i])
        others = set(starts.values()) - {starts[i]}
        if g is not None and (g.type != node.type or others & set(toposort([g]))):
            raise CustomGradient("a hook")
        if g is not starts[i]:
            out[i] = recorder.wrap(with_gradient("hook", node, [node], starts[i], [g], recorder.next_call(), complete), values[i])
    recorder.step.again.append(lambda: made() == first)
    return tuple(out)


class Handle:
    """Of a hook that a trace has taken into the program."""

    def remove(self) -> None:
        raise CustomGradient("a hook that is removed")


def mirror_hooks(p: Tensor, traced: Tensor) -> None:
    """Give the hooks of a parameter what stands for it; torch calls them with its gradient."""
    for hook in (p._backward_hooks or {}).values():
        Tensor.register_hook(traced, hook)


def hooked_gradient(p: Tensor, grad: Tensor) -> Tensor:
    """What the hooks of a parameter make of its gradient."""
    with torch.no_grad():
        for hook in (p._backward_hooks or {}).values():
            found = hook(grad)
            grad = grad if found is None else found
    return grad


def run_after_gradient(p: Tensor, traced: Tensor) -> None:
    """Hooks for when `.grad` is there. What they do beyond changing it is refused: they are given what stands for the parameter."""
    for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
        try:
            hook(traced)
        except WeftError:
            raise
        except Exception as error:
            raise CaptureError(
                "a hook that runs when a gradient has been accumulated cannot be traced",
                needed="a hook that reads or changes the parameter's gradient alone",
                found=f"{getattr(hook, '__qualname__', type(hook).__name__)}: {type(error).__name__}: {error}",
                try_="do it in the training loop, after step(batch)",
            ) from error


def asking_modules() -> Iterator[str]:
    """The modules of those who call, innermost first, without what stands between torch and the trace."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("weft.", "torch.overrides", "torch._tensor", "torch.utils._")) and name not in ("contextlib", "functools"):
            yield name
        frame = frame.f_back  # type: ignore[assignment]


def refuse_graph(what: str) -> CaptureError:
    return CaptureError(
        f"torch's graph of gradients is not there in a trace ({what})",
        needed="hooks of tensors, modules and parameters: tensor.register_hook, module.register_full_backward_hook, p.register_post_accumulate_grad_hook",
        found=what,
        try_="tensor.register_hook(f), which is given the gradient of the tensor and may give another",
        where=user_line(),
    )


def require_no_node_hooks(model: nn.Module) -> None:
    """Refuse hooks on the nodes that accumulate gradients, as register_multi_grad_hook puts them there: no trace sees them."""
    moving = {id(p): n for n, p in model.named_parameters() if p.requires_grad and p.is_leaf and not p.is_meta and not hasattr(p, "to_local")}
    alive = [n for n, p in model.named_parameters() if id(p) in moving and _accumulator_lives(p)]
    if not alive:
        return
    nodes = [o for o in gc.get_objects() if type(o).__name__ == "AccumulateGrad" and id(o.variable) in moving]
    referenced = [o for o in nodes if any(r is not nodes and not isinstance(r, types.FrameType) for r in gc.get_referrers(o))]  # by more than a graph
    if referenced:
        raise CaptureError(
            f"another object holds the node that accumulates the gradient of {moving[id(referenced[0].variable)]}",
            needed="hooks that torch keeps with the parameter or the module",
            found="torch.autograd.graph.register_multi_grad_hook, or a hook of such a node",
            try_="p.register_post_accumulate_grad_hook(f) or p.register_hook(f); remove() the other, or do it after step(batch)",
        )


def _accumulator_lives(p: Tensor) -> bool:
    """Whether it is there before it is asked for: torch makes a new one where nobody has it."""
    with torch.enable_grad():
        p.expand_as(p).grad_fn.next_functions[0][0].metadata["weft"] = True  # type: ignore[union-attr]
        found: Any = p.expand_as(p).grad_fn.next_functions[0][0].metadata  # type: ignore[union-attr]
        return found.pop("weft", False) is True
