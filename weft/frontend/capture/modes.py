"""Where torch calls are intercepted: as torch functions for ops that must stay in one piece, at ATen for the rest; `handlers` has what is done with them."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from weft.core.errors import CaptureError
from weft.core.node import Node, constant, user_line
from weft.frontend.capture.complexes import any_complex, of_pairs, parts_of, refuse_complex
from weft.frontend.capture.constants import drawn, number, number_from_batch, through
from weft.frontend.capture.guards import unheard
from weft.frontend.capture.handlers import ATEN, ATEN_ON_TENSORS, FUNCTIONS, ON_TENSORS, VIEWS, to_dtype
from weft.frontend.capture.joint import enter
from weft.frontend.capture.precision import widened
from weft.frontend.capture.recorder import Handler, Recorder
from weft.frontend.capture.unknown_ops import as_nodes, tensors_in, unknown
from weft.frontend.capture.values import TAG, Ref, Step, view
from weft.ops.pointwise import where
from weft.ops.shape import expand

CPU = torch.device("cpu")


class Above(TorchFunctionMode):
    """Intercepts torch functions before they fall apart into ATen."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.inside: set[Any] = set()  # Python functions being followed; one that asks again is left to torch

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, args = _on_cpu(kwargs or {}), widened(func, args)
        handler = FUNCTIONS.get(func)
        if handler is not None and (_transformed(args, kwargs) or (handler not in ON_TENSORS and any_complex(args, kwargs))):
            handler = None  # torch takes the op apart, and its pieces are heard
        if func in (torch.conj, Tensor.conj):
            func = torch.conj_physical  # what torch keeps as a mark on the tensor, as a value
        if func in _MOVES:
            return args[0]
        try:
            if handler is None:
                return self._inside(func)(*_places_on_cpu(func, args), **kwargs)
            return intercept(self.recorder, func, handler, args, kwargs, self._inside(func))
        except TypeError:
            _ask_numbers((args, kwargs))
            raise

    def _inside(self, func: Any) -> Any:
        """A function that torch writes in Python is followed into: what it calls is intercepted too."""
        if not inspect.isfunction(func) or func.__module__ not in _WRITTEN_IN_PYTHON or func in self.inside:
            return func
        body = _body(func)

        def followed(*args: Any, **kwargs: Any) -> Any:
            self.inside.add(func)
            try:
                with self:
                    return body(*args, **kwargs)
            finally:
                self.inside.discard(func)

        return followed


def _ask_numbers(given: Any) -> None:
    """Ask again the computed numbers that torch was given where it takes integers: of an error in the answer it says only that there is no integer."""
    for x in tree_leaves(given):
        for n in (x.start, x.stop, x.step) if isinstance(x, slice) else (x,):
            if isinstance(n, torch.SymFloat):
                int(n)


def _transformed(args: Any, kwargs: Any) -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is at work, or left its mark on a tensor."""
    if _functorch.peek_interpreter_stack() is not None:
        return True
    return any(isinstance(x, Tensor) and _functorch.is_functorch_wrapped_tensor(x) for x in tree_leaves((args, kwargs)))


_WRITTEN_IN_PYTHON = ("torch.nn.functional", "torch.functional")
_UNASKED = {f"has_torch_function{kind}": lambda *_: False for kind in ("", "_unary", "_variadic")}


@functools.cache
def _body(func: Any) -> Any:
    """The function without its first question, whether someone intercepts it: the answer was yes, and it is being intercepted."""
    body = types.FunctionType(func.__code__, {**func.__globals__, **_UNASKED}, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def intercept(recorder: Recorder, func: Any, handler: Handler, args: Any, kwargs: Any, below: Any = None) -> Any:
    """Call a handler on the nodes behind tensors and wrap what it gives, laid out as what `func` gives; `below` is called where it declines."""
    if handler in ON_TENSORS:
        return handler(recorder, *args, **kwargs)
    results = functools.partial(fake_result, func, args, kwargs)
    if recorder.joint and torch.is_grad_enabled():
        result = enter(recorder, handler, args, kwargs, results)
        return below(*args, **kwargs) if result is NotImplemented else result
    nodes = tree_map_only(Tensor, recorder.node, (args, kwargs))
    result = handler(recorder, *nodes[0], **nodes[1])
    if result is NotImplemented:
        return below(*args, **kwargs)
    found, spec = tree_flatten(result)
    return tree_unflatten(recorder.wrap_all(found, results()), spec)


def fake_result(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What torch itself gives, without values: how it lies in memory says which later reshape shares that memory."""
    if func is None:
        return []
    fake = next((x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)), nullcontext())
    try:
        with unheard(), torch._C.DisableTorchFunction(), _disable_current_modes(), fake, torch.no_grad():  # what torch makes on the way has no values either
            return tree_leaves(func(*args, **kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException):  # counts, which lie in one row
        return []
    except RuntimeError as error:
        if "Storage size calculation overflowed" not in str(error):
            raise
        return []  # sizes beyond any machine, which are only planned


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Capture is always on the CPU: fake tensors elsewhere abort a process without the hardware."""
    return {**kwargs, "device": CPU} if kwargs.get("device") is not None else kwargs


def _places_on_cpu(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if func is Tensor.to:
        return tuple(CPU if isinstance(a, torch.device) or (isinstance(a, str) and i) else a for i, a in enumerate(args))
    return args


# A method of Tensor with the name of a device's module moves to that device.
_MOVES = {getattr(Tensor, n) for n in dir(Tensor) if hasattr(getattr(torch, n, None), "is_available")}


_CHOOSES = (torch.bool, torch.uint8)
_UNIQUE = (torch.ops.aten._unique2.default, torch.ops.aten.unique_dim.default)


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op's result is as large as values say."""
    aten = torch.ops.aten
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype in _CHOOSES for i in args[1])
    if func in (aten.nonzero.default, aten.masked_select.default, *_UNIQUE):
        return True
    return func is aten.repeat_interleave.Tensor and not kwargs.get("output_size")


class AtenMode(TorchDispatchMode):
    """Intercepts ATen ops and keeps fake tensors and nodes in step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unheard():
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default:
            return CPU
        if func._schema.name.startswith("aten::_foreach_"):
            return self._foreach(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._number(func, args[0])
        if _counts(func, args, kwargs):
            return self._counted(func, args, kwargs)
        if func._schema.is_mutable:
            args, kwargs = self._written(func, args, kwargs)
        out, args, kwargs = _lying(func, args, kwargs)
        if any_complex(args, kwargs, out):
            return self._complex(func, out, args, kwargs)
        if func in VIEWS:
            return self._view(func, out, args, kwargs)
        if func in ATEN_ON_TENSORS:
            self._bind(func, out, ATEN_ON_TENSORS[func](self.recorder, *args, **kwargs))
            if func is torch.ops.aten.as_strided.default:  # it shares memory, and there are no steps to write through it by
                setattr(out, TAG, Ref(self.recorder.ref(args[0]).cell, None, self.recorder.ref(out).read()))
            return out
        if func._schema.is_mutable:
            return self._write(func, out, args, kwargs)
        if not tensors_in(out):
            return out
        self._bind(func, out, self._nodes(func, out, args, kwargs))
        return out

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operands of an op that writes: a parameter reached past its module is the module's own; what has values is not the trace's to change."""
        given = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        for a in func._schema.arguments:
            if a.alias_info is None or not a.alias_info.is_write:
                continue
            for x in (x for x in tree_leaves(given.get(a.name)) if isinstance(x, Tensor) and not isinstance(x, FakeTensor)):
                if id(x) not in self.recorder.own and not hasattr(x, TAG) and not _functorch.is_functorch_wrapped_tensor(x):
                    raise _written_outside(x)
        return tree_map_only(Tensor, lambda x: x if isinstance(x, FakeTensor) else self.recorder.own.get(id(x), x), (args, kwargs))

    def _number(self, func: Any, tensor: Tensor, now: bool = False) -> Any:
        """A Python number, where it is known while tracing; one that is computed, or that the state at hand decides; torch refuses all others."""
        known = number(self.recorder, through(self.recorder, self.recorder.node(tensor), look=True))
        if known is None and drawn(self.recorder.node(tensor)):
            raise CaptureError(
                "a random number decides what is computed",
                needed="the same ops at every step",
                found="a draw that Python turns into a number or a branch (LayerDrop, stochastic depth)",
                try_=(
                    "a probability of 0 (layerdrop=0.0), and the draw compared as a tensor: torch.rand([]) < 0.0",
                    "torch.where(torch.rand([]) < p, x, layer(x)), which draws at every step",
                ),
                where=user_line(),
            )
        if known is None:
            known = number_from_batch(self.recorder, through(self.recorder, self.recorder.node(tensor), look=True))
        if known is None and self.recorder.computed is not None and not now:
            known = self.recorder.computed(self.recorder.node(tensor))
        if known is None:
            known = number_from_batch(self.recorder, through(self.recorder, self.recorder.node(tensor), look=True), state=True)
        if known is None and now:
            raise DataDependentOutputException(func)
        return func(tensor) if known is None else known

    def _counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op that makes as many elements as the batch says: the number is asked for, and the shape is known."""
        aten = torch.ops.aten
        with self:
            if func is aten.nonzero.default:
                return aten.nonzero_static.default(args[0], size=self._count(func, args[0].ne(0)))
            if func is aten.masked_select.default:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                return aten.index.Tensor(aten.expand.default(args[0], shape), [aten.expand.default(args[1], shape)])
            if func in _UNIQUE:
                return self._unique(func, *args, **kwargs)
            if func is aten.repeat_interleave.Tensor:
                return func(args[0], output_size=self._count(func, args[0]))
            places = [c for i in args[1] for c in (aten.nonzero.default(i).unbind(1) if i is not None and i.dtype in _CHOOSES else (i,))]
            return func(args[0], places)

    def _unique(self, func: Any, x: Tensor, *how: Any) -> Any:
        """The values of a vector in order, which of them each element is, and how often they are."""
        if func is torch.ops.aten.unique_dim.default and x.ndim > 1:
            raise DynamicOutputShapeException(func)
        flat, order = x.reshape(-1).sort(stable=True)
        new = torch.cat([torch.ones_like(flat[:1], dtype=torch.bool), flat[1:] != flat[:-1]])
        first = torch.ops.aten.nonzero_static.default(new, size=self._count(func, new))[:, 0]
        which = torch.zeros_like(order).scatter(0, order, new.cumsum(0) - 1).reshape(x.shape)
        return flat[first], which, torch.cat([first, torch.full_like(first[:1], flat.numel())]).diff()

    def _count(self, func: Any, x: Tensor) -> int:
        try:
            return int(self._number(torch.ops.aten._local_scalar_dense.default, x.sum(), now=True))
        except DataDependentOutputException:
            raise DynamicOutputShapeException(func) from None

    def _foreach(self, func: Any, args: Any) -> Any:
        """An op over lists is the op on each; lists next to the first go along with it."""
        name = func._schema.name.removeprefix("aten::_foreach_")
        each = torch.ops.aten.linalg_vector_norm if name == "norm" else getattr(torch.ops.aten, name)
        with self:
            out = [each(x, *(a[i] if isinstance(a, (list, tuple)) else a for a in args[1:])) for i, x in enumerate(args[0])]
        return None if name.endswith("_") else out

    def _complex(self, func: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """Complex numbers are pairs: views of them are views of the pairs, and all other ops torch's own."""
        recorder = self.recorder
        if func in (torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default):
            ref = recorder.ref(args[0])
            setattr(out, TAG, ref.then((), ref.read()))
            return out
        if func in VIEWS:
            return self._view(func, out, args, kwargs, of_pairs)
        if func._schema.is_mutable and _twin(func) in VIEWS:
            return self._view_in_place(VIEWS[_twin(func)], func, args, of_pairs)
        if func._schema.is_mutable:
            twin = _twin(func)
            if twin is None or "out" in kwargs or not args[0].is_complex():
                raise refuse_complex(f"the target of the in-place op {func}", args[0])
            shape, dtype = parts_of(args[0])
            if func is torch.ops.aten.copy_.default and args[1].is_complex():
                new = expand(to_dtype(recorder.node(args[1]), dtype), shape)
            else:
                new = unknown(recorder, twin, twin(*args, **kwargs), *as_nodes(recorder, (args, kwargs)))
            recorder.write(args[0], new)
            return out
        if tensors_in(out):
            nodes = unknown(recorder, func, out, *as_nodes(recorder, (args, kwargs)))
            for tensor, node in zip(tensors_in(out), [nodes] if isinstance(nodes, Node) else nodes, strict=True):
                recorder.bind(tensor, node)
        return out

    def _nodes(self, func: Any, out: Any, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        given, named = tree_map_only(Tensor, recorder.node, (args, kwargs))
        handler = ATEN.get(func)
        nodes = handler(recorder, *given, **named) if handler else NotImplemented
        return unknown(recorder, func, out, given, named) if nodes is NotImplemented else nodes

    def _bind(self, func: Any, out: Any, nodes: Any) -> None:
        """Tie results to nodes; a handler that gives another shape or dtype than torch is a mistake in weft."""
        tensors, found = tensors_in(out), [nodes] if isinstance(nodes, Node) else [n for n in nodes if n is not None]
        for tensor, node in zip(tensors, found, strict=True):
            if node.shape != tuple(tensor.shape):
                raise CaptureError(f"weft inferred another type for {func} than torch gives", needed=f"{tuple(tensor.shape)}", found=str(node.type))
            self.recorder.bind(tensor, node if node.dtype == tensor.dtype else to_dtype(node, tensor.dtype))

    def _view(self, func: Any, out: Any, args: Any, kwargs: Any, transform: Callable[[Step], Step] | None = None) -> Any:
        base = self.recorder.ref(args[0])
        steps: Any = VIEWS[func](tuple(args[0].shape), *args[1:], **kwargs)
        several = isinstance(out, (tuple, list))
        for tensor, path in zip(out, steps, strict=True) if several else [(out, steps)]:
            path = path if transform is None else [transform(step) for step in path]
            node = base.read()
            for step in path:
                node = view(node, step)
            ref = base.then(tuple(path), node)
            ref.stopped = ref.stopped or not torch.is_grad_enabled() or func is torch.ops.aten.detach.default
            setattr(tensor, TAG, ref)
        return out

    def _write(self, func: Any, out: Any, args: Any, kwargs: Any) -> Any:
        """An in-place op is its functional twin, then a write."""
        recorder, target, twin = self.recorder, kwargs.get("out", args[0] if args else None), _twin(func)
        if twin in VIEWS and isinstance(target, Tensor):
            return self._view_in_place(VIEWS[twin], func, args)
        if twin is None or not isinstance(target, Tensor):
            raise CaptureError(
                f"weft cannot follow the in-place op {func}",
                needed="an in-place op with a functional twin",
                found=str(func),
                try_="write it out of place",
                where=user_line(),
            )
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        new = self._nodes(twin, target, args, rest) if twin in ATEN else None
        if new is None:
            given, named = tree_map_only(Tensor, recorder.node, (args, rest))
            new = unknown(recorder, twin, target, given, named)
        new = expand(to_dtype(new, target.dtype), tuple(target.shape))
        recorder.write(target, self._over(target, new) if str(twin._schema.name) in OVERWRITES else new)
        return out

    def _over(self, target: Tensor, new: Node) -> Node:
        """What takes the place of a value. Torch gives that value a gradient of zeros, not none: a decay then still shrinks a parameter."""
        old = self.recorder.ref(target).read()
        if self.recorder.joint or not torch.is_grad_enabled() or not self.recorder.moves(old):
            return new
        return where(constant(False, torch.bool, self.recorder.mesh), old, new)

    def _view_in_place(self, steps: Any, func: Any, args: Any, transform: Callable[[Step], Step] | None = None) -> Any:
        """A view in place (t_, squeeze_): the tensor looks at its storage another way. Its fake has already been turned."""
        ref = self.recorder.ref(args[0])
        node = ref.read()
        path = tuple(steps(node.shape if transform is None else node.shape[:-1], *args[1:]))
        path = path if transform is None else tuple(map(transform, path))
        for step in path:
            node = view(node, step)
        setattr(args[0], TAG, ref.then(path, node))
        return args[0]


def _written_outside(tensor: Tensor) -> CaptureError:
    return CaptureError(
        "a step writes into a tensor that is no buffer",
        needed="what steps hand on in buffers",
        found=f"a tensor of shape {tuple(tensor.shape)} that Python keeps",
        try_='self.register_buffer("name", torch.zeros(...)), and write into it',
        where=user_line(),
    )


OVERWRITES = ("aten::fill", "aten::copy", "aten::zero")


@functools.cache
def _twin(func: Any) -> Any:
    """The functional op that takes the same arguments: `add_.Tensor` -> `add.Tensor`, `add.out` -> `add.Tensor`."""
    name = func._schema.name.split("::")[1]
    bare = re.sub(r"_$", "", name)
    wanted = [str(a.type) for a in func._schema.arguments if not a.is_out]
    for packet in (getattr(torch.ops.aten, n, None) for n in (bare, f"{bare}_functional")):
        for overload in packet.overloads() if packet is not None else ():
            twin = getattr(packet, overload)
            if not twin._schema.is_mutable and [str(a.type) for a in twin._schema.arguments] == wanted:
                return twin
    return None


def _lying(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """What torch makes of fake tensors, and what it was given, numbers that are computed as nodes of the dtype it computes in.
    To copy as a view, torch 2.11 asks there for a tensor that could be viewed; none is needed."""
    if func is torch.ops.aten.view_copy.default:
        return func(args[0].contiguous(), *args[1:], **kwargs), args, kwargs
    leaves, spec = tree_flatten((args, kwargs))
    if not any(isinstance(x, torch.SymFloat) for x in leaves):
        return func(*args, **kwargs), args, kwargs
    given, named = tree_unflatten([1.0 if isinstance(x, torch.SymFloat) else x for x in leaves], spec)
    out = func(*given, **named)
    kinds = [t.dtype for t in (*tensors_in(out), *leaves) if isinstance(t, Tensor) and t.dtype.is_floating_point]
    dtype = kinds[0] if kinds else torch.get_default_dtype()
    given, named = tree_unflatten([to_dtype(x.node.node, dtype) if isinstance(x, torch.SymFloat) else x for x in leaves], spec)
    return out, given, named


@contextmanager
def listening_to_torch(recorder: Recorder) -> Iterator[None]:
    """Inside, every torch call on traced tensors is intercepted."""
    with recorder.fake, AtenMode(recorder), Above(recorder), norms_of_full_batch():
        yield


@contextmanager
def norms_of_full_batch() -> Iterator[None]:
    """Inside, the batch is the full one: a batch norm has no statistics of other ranks to wait for."""
    own = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = own  # type: ignore[method-assign]


__all__ = ["Ref", "fake_result", "intercept", "listening_to_torch", "norms_of_full_batch"]
