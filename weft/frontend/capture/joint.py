"""Models with an autograd function of their own: torch's autograd runs under the trace.

Its gradient need not be that of what it computes (a straight-through estimator, a gradient reversed), so weft's vjps would
be wrong for it. ATen's backward ops are then traced like the forward ones, and an op heard above ATen enters autograd as
one function, whose backward is weft's vjp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from weft.autodiff import backward
from weft.core.node import Node, make, toposort
from weft.frontend.capture.recorder import Recorder


class OwnGradient(Exception):
    """A model called an autograd function of its own where autograd does not run."""


@contextmanager
def own_gradients(joint: bool) -> Iterator[None]:
    """Inside, an autograd function is refused unless autograd runs; checkpointing, which changes nothing, is run straight."""
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return args[0](*args[2:])
        if not joint and not issubclass(cls, _Whole):
            raise OwnGradient(cls.__name__)
        return plain.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


def substituted(roots: list[Node], swap: dict[Node, Node]) -> list[Node]:
    """The roots with some nodes replaced and all that depends on them made again."""
    made = dict(swap)
    for n in toposort(roots):
        if n not in made:
            args = tuple(made[a] for a in n.args)
            made[n] = n if args == n.args else make(n.op, args, dict(n.attrs))
    return [made[n] for n in roots]


class _Whole(torch.autograd.Function):
    """A computation on nodes as one function of autograd. It is made over placeholders, so no two operands are one."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, call: Callable[[list[Node]], list[Node]], *tensors: Tensor) -> Any:
        slots = [recorder.ref(recorder.placeholder(t)).read() for t in tensors]
        ctx.recorder, ctx.slots, ctx.outs = recorder, slots, call(slots)
        ctx.actual = [recorder.ref(t).read() for t in tensors]
        made = substituted(ctx.outs, dict(zip(slots, ctx.actual, strict=True)))
        out = tuple(recorder.wrap(n) for n in made)
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
        return None, None, *(None if g is None else recorder.wrap(next(made)) for g in found)


def enter(recorder: Recorder, handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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
        out = _Whole.apply(recorder, call, *(leaves[i] for i in where))
    except _Declined:
        return NotImplemented
    return tree_unflatten(list(out), shape[0])


class _Declined(Exception):
    pass
