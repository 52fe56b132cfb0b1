"""Recursive code as it is, batched: calls of a decorated function are written down, and run together when a value is needed.

    @weft.dynamic.batched
    def encode(tree):                                   # plain torch on one sample
        if isinstance(tree, int):
            return torch.tanh(embed(words[tree]))
        return torch.tanh(join(torch.cat([encode(t) for t in tree])))

    roots = torch.stack([encode(t) for t in trees])     # `stack` needs numbers: now all calls run, batched by structure

A call becomes a vertex. What it did with tensors is its type: two calls with the same ops on the same parameters are of one type and
share batches. A call whose arguments are tensors alone is not even run where an earlier call with such shapes read no numbers, left
nothing changed in Python, and all that it read of Python still is what it was: its ops are those of that call.
A result is a tensor whose numbers come later; whatever needs them (`item`, `if`, an op outside of all decorated calls) runs what
is deferred.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from weft.core.errors import StructureError
from weft.dynamic.model import Model
from weft.dynamic.record import APART, Kind, Meta, Op, Ref, flat, is_weight, results_of, state_name, unflat, without_gradient, write
from weft.dynamic.structure import NO_ROW, Structure
from weft.frontend.capture.guards import Reads
from weft.frontend.capture.places import Place

LEARNT = 4  # ways a function went that are kept for arguments of some shapes


class Lazy(Tensor):
    """A tensor whose numbers are not there yet. It belongs to an open call (as `ref`), then to a deferred one (as `port`)."""

    meta_: Meta
    call: Call | None
    ref: Ref
    vertex: LazyCall | None
    port: int
    value: Tensor | None

    @staticmethod
    def __new__(cls, meta: Meta, call: Call | None, ref: Ref, vertex: LazyCall | None = None, port: int = 0) -> Lazy:
        self = Tensor._make_wrapper_subclass(cls, meta[0], dtype=meta[1])
        self.meta_, self.call, self.ref, self.vertex, self.port, self.value = meta, call, ref, vertex, port, None
        return self

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WITHOUT_NUMBERS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        args, kwargs = _numbers((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _numbers((args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Lazy({list(self.meta_[0])}, {self.meta_[1]})" if self.value is None else repr(self.value)


_WITHOUT_NUMBERS = {
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.size, Tensor.dim, Tensor.ndim.__get__, Tensor.numel,
    Tensor.__len__, Tensor.is_floating_point, Tensor.layout.__get__, Tensor.requires_grad.__get__, Tensor.__hash__,
}  # fmt: skip
_NEEDS_NUMBERS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.cpu,
    Tensor.backward, torch.allclose, torch.equal, Tensor.__format__, Tensor.__repr__, Tensor.nonzero, torch.nonzero,
}  # fmt: skip


class LazyCall:
    """A call that is written down and has not run."""

    __slots__ = ("__weakref__", "children", "holders", "inputs", "kind", "takes_gradients")

    def __init__(self, kind: Kind, children: list[LazyCall], inputs: list[Tensor]) -> None:
        self.kind, self.children, self.inputs, self.takes_gradients = kind, children, inputs, torch.is_grad_enabled()
        self.holders: list[weakref.ref[Lazy]] = []


class _MustRunError(BaseException):
    """What is deferred must run first; a call that finds this on stand-ins cannot be learnt on them. No error of the user's."""


class Call:
    """One open call of a decorated function: what it did so far, perhaps on stand-ins for its arguments."""

    def __init__(self, on_stand_ins: bool = False) -> None:
        self.on_stand_ins = on_stand_ins
        self.views: dict[Ref, Ref] = {}  # of what is not this call's own
        self.ops: list[Op] = []
        self.path = 0  # the number of this sequence of ops
        self.inputs: list[Tensor] = []
        self.children: list[LazyCall] = []
        self.weights: list[Tensor] = []
        self.results: list[weakref.ref[Lazy]] = []

    def ref(self, x: Tensor) -> Ref:
        """How an op of this call names a tensor."""
        if type(x) is Lazy and x.value is None:
            if x.call is self:
                return x.ref
            if x.vertex is None:
                _recorder.cut(x.call)
            if self.on_stand_ins or not x.meta_[1].is_floating_point:
                raise _MustRunError  # only floats are sent between vertices
            return Ref("child", _position(self.children, x.vertex), x.port)
        value = x.value if type(x) is Lazy else x
        return Ref("weight", _position(self.weights, value)) if is_weight(value) else Ref("in", _position(self.inputs, value))

    def do(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Write an op down; its results are lazy."""
        function, metas = APART.get(function, function), list[Meta]()
        if not torch.is_grad_enabled():
            function = without_gradient(function)

        def name(x: Tensor) -> Ref:
            metas.append(_meta(x))
            return self.ref(x)

        try:
            op = Op(function, tuple([write(a, name) for a in args]), tuple([(k, write(v, name)) for k, v in kwargs.items()]))
        except _MustRunError:
            if not self.on_stand_ins:
                _recorder.flush()
                return _recorder.open[-1].do(function, args, kwargs)
            raise
        try:
            gives, number, named = results_of(op, tuple(metas)), len(self.ops), op.refs()
        except (RuntimeError, TypeError):  # what it gives is no tensor, or depends on numbers; or it is an error, which then has torch's words
            return function(*self._now(args), **self._now(kwargs))
        for at in gives.written:
            if self._outside(named[at]) is not None:
                raise _writes(function)
        self.ops.append(op)
        self.path = _recorder.step(self.path, op)
        made = [Lazy(meta, self, Ref("op", number, i)) for i, meta in enumerate(gives.metas)]
        for lazy, seen in zip(made, gives.views, strict=True):
            if seen is not None and (outside := self._outside(named[seen])) is not None:
                self.views[lazy.ref] = outside
        self.results += map(weakref.ref, made)
        return unflat(made, gives.how)

    def _now(self, x: Any) -> Any:
        if self.on_stand_ins:
            raise _MustRunError
        return _numbers(x)

    def _outside(self, ref: Ref) -> Ref | None:
        """What is not this call's own and lies under a value."""
        return self.views.get(ref) if ref.of == "op" else ref

    def close(self) -> None:
        """The call becomes a vertex; results somebody still holds become what it scatters."""
        alive = [lazy for w in self.results if (lazy := w()) is not None]
        if not alive:
            return
        outs = tuple((lazy.ref, lazy.meta_) for lazy in alive)
        kind = _recorder.kind((self.path, outs), self)
        _recorder.add(kind, self.children, self.inputs, alive)
        for lazy in alive:
            lazy.call = None


class Recorder(threading.local):
    """What is written down in this thread, and all it has learnt."""

    def __init__(self) -> None:
        self.pending: list[LazyCall] = []
        self.versions: dict[int, tuple[Tensor, int]] = {}  # of tensors that it reads, by identity
        self.open: list[Call] = []
        self.steps: dict[tuple[int, Op], int] = {}
        self.kinds: dict[Any, Kind] = {}
        self.models: dict[tuple[str, ...], Model] = {}

    def step(self, path: int, op: Op) -> int:
        """The number of a sequence of ops that goes on with `op`."""
        return self.steps.setdefault((path, op), len(self.steps) + 1)

    def kind(self, what: Any, call: Call) -> Kind:
        """The kind of a call that did `what` with its inputs, children and weights."""
        inputs = tuple(map(_meta, call.inputs))
        key = what, inputs, tuple(map(id, call.weights)), tuple([c.kind.states for c in call.children])
        if key not in self.kinds:
            read = [r for op in call.ops for r in op.refs() if r.of == "child"]
            reads = {r: call.children[r.number].kind.states[r.part] for r in read}
            self.kinds[key] = Kind(f"kind{len(self.kinds)}", list(call.ops), what[1], len(inputs), list(call.weights), reads)
        return self.kinds[key]

    def add(self, kind: Kind, children: list[LazyCall], inputs: list[Tensor], results: list[Lazy]) -> None:
        vertex = LazyCall(kind, children, inputs)
        for port, lazy in enumerate(results):
            lazy.vertex, lazy.port = vertex, port
            vertex.holders.append(weakref.ref(lazy))
        self.defer(vertex)

    def defer(self, vertex: LazyCall) -> None:
        """Have a call wait for others."""
        for x in (*vertex.inputs, *vertex.kind.weights):
            self.versions.setdefault(id(x), (x, _version(x)))
        self.pending.append(vertex)

    def cut(self, call: Call | None) -> None:
        """What an open call did so far becomes a vertex of its own: something else needs a result of it."""
        at = next((i for i, known in enumerate(self.open) if known is call), None)
        if at is None:
            raise StructureError(
                "a result is used of a call that never finished", needed="results of finished calls, or of calls around this one",
                found="a tensor kept from a call that raised an error",
            )  # fmt: skip
        if self.open[at].on_stand_ins:
            raise _MustRunError
        self.open[at].close()
        self.open[at] = Call()

    def flush(self) -> None:
        """Run all that is deferred, batched, and give the results to whoever holds them."""
        for call in list(self.open):
            self.cut(call)
        pending, self.pending = self.pending, []
        versions, self.versions = self.versions, {}
        if not pending:
            return
        if any(_version(x) != before for x, before in versions.values()):
            raise StructureError(
                "a tensor was written into between a batched call that reads it and the first use of a result",
                needed="what a call reads as it was when it was called", found="a write in place, as by add_ or optimizer.step()",
                try_="dynamic.flush() before the write",
            )  # fmt: skip
        kinds = {p.kind.name: p.kind for p in pending}
        names = tuple(sorted(kinds))
        if names not in self.models:
            self.models[names] = _model([kinds[n] for n in names])
        model = self.models[names]
        with torch._C.DisableTorchFunction(), torch.set_grad_enabled(any(p.takes_gradients for p in pending)):
            structure, inputs = _structure(pending, names)
            alive = _held(pending)
            every = dict.fromkeys(name for k in kinds.values() for name in k.states)
            results = model(structure, inputs, at={o: np.array([v for v, _ in alive.get(o, ())], np.int64) for o in every})
            results = results if isinstance(results, dict) else {next(iter(every)): results}
            for state, rows in alive.items():
                for (v, lazy), value in zip(rows, results[state].unbind(0), strict=True):
                    lazy.value, lazy.vertex = value if pending[v].takes_gradients else value.detach(), None


_recorder = Recorder()


def flush() -> None:
    """Run all that is waiting now."""
    _recorder.flush()


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Write calls of a function down and run them together; see the module."""
    learnt: dict[Any, list[Learnt]] = {}
    always_run = set[Any]()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not _only_tensors(args):
            return _recorded(function, args, kwargs)
        key = tuple([_meta(a) if isinstance(a, Tensor) else write(a, _meta) for a in args])
        known = learnt.setdefault(key, [])
        at = next((i for i, one in enumerate(known) if one.holds()), None)
        if at is None and key not in always_run:
            made, at = Learnt.of(function, args), 0
            known[:] = known[:LEARNT] if made is None else [made, *known[: LEARNT - 1]]
            if made is None:
                always_run.add(key)
        if key in always_run or at is None:
            return _recorded(function, args, kwargs)
        known.insert(0, known.pop(at))
        return known[0].again(args)

    return call


def _recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the function's own code, with its tensor ops written down."""
    _recorder.open.append(Call())
    try:
        if len(_recorder.open) == 1:
            with _Writing():
                result = function(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
    except BaseException:
        _recorder.open.pop()
        raise
    _recorder.open.pop().close()
    return result


class Learnt:
    """The ops of a function for arguments of some shapes, from running it once on stand-ins, and what it read of Python."""

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...]) -> Learnt | None:
        """None where the function must run at each call. What it changed by then is taken back."""
        with torch._C.DisableTorchFunction():  # nothing of this is for a call around it to write down
            call, reads, drawn = Call(on_stand_ins=True), Reads(nn.ModuleList(), function), torch.get_rng_state()
        stand_ins = [Lazy(_meta(a), call, Ref("arg", i)) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
        before = len(_recorder.open)
        _recorder.open.append(call)
        try:
            with reads.listening(), _Writing():
                result = function(*stand_ins)
        except _MustRunError:
            result = None
        finally:
            del _recorder.open[before:]
        with torch._C.DisableTorchFunction():
            reads.finish([])
            if result is None or reads.left or reads.drew or not torch.equal(drawn, torch.get_rng_state()):
                reads.undo()
                torch.set_rng_state(drawn)
                return None
        return Learnt(call, reads, *_own_results(function, result, call))

    def __init__(self, call: Call, reads: Reads, parts: list[tuple[Ref, Meta]], how: Any) -> None:
        self.call, self.reads, self.parts, self.how = call, reads, parts, how
        self.tensors: list[tuple[Place, int | None]] = [(p, None if is_weight(p.value) else _version(p.value)) for p in reads.tensors.values()]
        self.kinds: dict[Any, Kind] = {}

    def holds(self) -> bool:
        """Whether the function would do the same now: what may have been computed of a tensor that is no parameter is part of it."""
        with torch._C.DisableTorchFunction():
            return self.reads.hold() and all(
                p.now() is p.value and (version is None or version == _version(p.value)) for p, version in self.tensors
            )

    def again(self, args: tuple[Any, ...]) -> Any:
        """A call with the ops of the first: only its arguments are its own."""
        call = Call()
        call.weights, call.inputs = list(self.call.weights), list(self.call.inputs)
        try:
            refs = tuple([call.ref(a) if isinstance(a, Tensor) else None for a in args])
        except _MustRunError:
            _recorder.flush()
            return self.again(args)
        key = refs, tuple([c.kind.states for c in call.children]), len(call.weights)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = self._kind(call, refs)
        vertex = LazyCall(kind, call.children, call.inputs)
        made = [Lazy(meta, None, ref, vertex, port) for port, (ref, meta) in enumerate(kind.outs)]
        vertex.holders += map(weakref.ref, made)
        _recorder.defer(vertex)
        return unflat(made, self.how)

    def _kind(self, call: Call, refs: tuple[Ref | None, ...]) -> Kind:
        def own(ref: Ref) -> Ref:
            return refs[ref.number] if ref.of == "arg" else ref

        call.ops = [Op(o.function, write(o.args, own, Ref), tuple((k, write(v, own, Ref)) for k, v in o.kwargs)) for o in self.call.ops]
        path = functools.reduce(_recorder.step, call.ops, 0)
        return _recorder.kind((path, tuple((own(ref), meta) for ref, meta in self.parts)), call)


def _own_results(function: Callable[..., Any], result: Any, call: Call) -> tuple[list[tuple[Ref, Meta]], Any]:
    try:
        parts, how = flat(result)
        if all(type(p) is Lazy and p.call is call for p in parts):
            return [(p.ref, p.meta_) for p in parts], how
    except TypeError:
        pass
    raise StructureError(
        f"{getattr(function, '__name__', 'the function')} does not return what it computed", found=type(result).__name__,
        needed="a tensor, or a tuple or list of tensors, computed from its arguments without looking at their numbers",
    )  # fmt: skip


class _Writing(TorchFunctionMode):
    """While a decorated call is open: ops on lazy tensors or parameters are written down, others run at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_NUMBERS or not _concerns(args) and not _concerns(tuple(kwargs.values())):
            return func(*args, **kwargs)
        if func in _NEEDS_NUMBERS:
            args, kwargs = _numbers((args, kwargs))
            return func(*args, **kwargs)
        return _recorder.open[-1].do(func, args, kwargs)


def _concerns(args: Any) -> bool:
    """Whether a lazy tensor or a parameter is among the arguments."""
    return any(type(a) is Lazy or is_weight(a) or (isinstance(a, (tuple, list)) and _concerns(a)) for a in args)


def _numbers(x: Any) -> Any:
    """Arguments with numbers in place of lazy tensors, running what is deferred if need be."""

    def number(t: Any) -> Any:
        if type(t) is not Lazy:
            return t
        if t.value is None:
            _recorder.flush()
        return t.value

    return tree_map(number, x, is_leaf=lambda t: isinstance(t, Tensor))


def _model(kinds: list[Kind]) -> Model:
    outs = [(state_name(port, meta), meta) for k in kinds for port, (_, meta) in enumerate(k.outs)]
    return Model({k.name: k for k in kinds}, {name: shape for name, (shape, dtype) in outs if dtype.is_floating_point})


def _structure(pending: list[LazyCall], names: tuple[str, ...]) -> tuple[Structure, dict[str, Tensor]]:
    """One sample with a vertex per call; each kind has its own stack of inputs."""
    number, of = {id(p): i for i, p in enumerate(pending)}, {name: i for i, name in enumerate(names)}
    counts, rows, stacks = dict.fromkeys(names, 0), list[int](), dict[str, list[Tensor]]()
    for p in pending:
        rows.append(counts[p.kind.name] if p.inputs else NO_ROW)
        counts[p.kind.name] += 1
        for i, x in enumerate(p.inputs):
            stacks.setdefault(f"{p.kind.name} {i}", []).append(x)
    structure = Structure(
        first=np.concatenate([[0], np.cumsum([len(p.children) for p in pending])]).astype(np.int64),
        child=np.array([number[id(c)] for p in pending for c in p.children], np.int64),
        row=np.array(rows, np.int64), sample=np.array([0, len(pending)], np.int64),
        kind=np.array([of[p.kind.name] for p in pending], np.int64), kinds=names,
    )  # fmt: skip
    return structure, {name: torch.stack(rows) for name, rows in stacks.items()}


def _held(pending: list[LazyCall]) -> dict[str, list[tuple[int, Lazy]]]:
    """The results somebody still holds: state -> (vertex, who)."""
    out: dict[str, list[tuple[int, Lazy]]] = {}
    for i, p in enumerate(pending):
        for w in p.holders:
            if (lazy := w()) is not None:
                out.setdefault(p.kind.states[lazy.port], []).append((i, lazy))
    return out


def _writes(function: Any) -> StructureError:
    return StructureError(
        "a batched function writes into a tensor that is not its own", needed="new tensors from its arguments, parameters and other calls' results",
        found=f"{getattr(function, '__name__', function)} on one of them", try_="the same op without writing in place, and the result returned",
    )  # fmt: skip


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _meta(x: Tensor) -> Meta:
    return x.meta_ if type(x) is Lazy else (tuple(x.shape), x.dtype)


def _position(items: list[Any], item: Any) -> int:
    for i, known in enumerate(items):
        if known is item:
            return i
    items.append(item)
    return len(items) - 1


def _only_tensors(args: tuple[Any, ...]) -> bool:
    """Whether the arguments are tensors, at least one of them, and plain settings."""
    return any(isinstance(a, Tensor) for a in args) and all(a is None or isinstance(a, (Tensor, bool, float, str)) for a in args)
