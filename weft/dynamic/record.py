"""What `batched` writes down: calls, the ops they did, and the kinds of vertex that follow from them.

An op is a tuple (function, arguments, keyword arguments) in which a Ref stands for every tensor, so equal work is equal data.
Sequences of ops are numbered in order of arrival, so telling the kind of a call costs one lookup per op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.dynamic.vertex import Vertex
from weft.frontend.capture.aten import packed

Meta = tuple[tuple[int, ...], torch.dtype]


class Ref(NamedTuple):
    """A tensor as an op names it: result `part` of op `number`, port `part` of child `number`, an input, a weight, an argument."""

    of: str
    number: int
    part: int = 0


class Items(NamedTuple):
    """A list or tuple among the arguments."""

    kind: type
    items: tuple[Any, ...]


class SliceKey(NamedTuple):
    """A slice among the arguments; slices cannot be keys."""

    start: Any
    stop: Any
    step: Any


class Number(NamedTuple):
    """A number among the arguments that Python says is equal to another of another type, or sign: 1.0 is not 1, nor -0.0 0.0."""

    kind: type
    text: str


_NUMBERS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bool: (str, "True".__eq__), float: (float.hex, float.fromhex), complex: (repr, complex),
}  # fmt: skip


class Op(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def refs(self) -> list[Ref]:
        out: list[Ref] = []
        write(self.args, lambda r: out.append(r) or r, Ref)
        write(tuple(v for _, v in self.kwargs), lambda r: out.append(r) or r, Ref)
        return out

    def __hash__(self) -> int:
        return hash((self.function, self.args, self.kwargs))


def write(x: Any, name: Callable[[Any], Any], what: type = Tensor) -> Any:
    """Arguments as data, with `name(t)` for each tensor t (or, in data, each Ref)."""
    if isinstance(x, what):
        return name(x)
    kind = type(x)
    if kind is Items:
        return Items(x.kind, tuple([write(i, name, what) for i in x.items]))
    if kind is tuple and what is Ref:
        return tuple([write(i, name, what) for i in x])
    if kind is tuple or kind is list:
        return Items(kind, tuple([write(i, name, what) for i in x]))
    if kind in _NUMBERS:
        return Number(kind, _NUMBERS[kind][0](x))
    return SliceKey(x.start, x.stop, x.step) if kind is slice else x


def read(x: Any, find: Callable[[Ref], Any]) -> Any:
    """Data as arguments again."""
    kind = type(x)
    if kind is Ref:
        return find(x)
    if kind is Items:
        return x.kind([read(i, find) for i in x.items])
    if kind is Number:
        return _NUMBERS[x.kind][1](x.text)
    return slice(*x) if kind is SliceKey else x


def do(op: Op, find: Callable[[Ref], Any]) -> Any:
    return op.function(*[read(a, find) for a in op.args], **{k: read(v, find) for k, v in op.kwargs})


def flat(result: Any) -> tuple[list[Any], Any]:
    """Tensors of a result, and how to put others in their place."""
    if isinstance(result, Tensor):
        return [result], None
    if isinstance(result, (tuple, list)) and all(isinstance(r, Tensor) for r in result):
        return list(result), type(result) if type(result) in (tuple, list) or type(result).__module__ == "torch.return_types" else tuple
    raise TypeError(f"{type(result).__name__} is no tensor, nor a tuple or list of tensors")


def unflat(parts: list[Any], how: Any) -> Any:
    return parts[0] if how is None else how(parts)


class Results(NamedTuple):
    """What an op gives: shapes and dtypes, their structure, and by number which operands they are views of and which it writes into."""

    metas: tuple[Meta, ...]
    how: Any
    views: tuple[int | None, ...]
    written: tuple[int, ...]


@functools.lru_cache(maxsize=65536)
def results_of(op: Op, metas: tuple[Meta, ...]) -> Results:
    """What an op gives for tensors of these shapes in the order of `op.refs()`."""
    stand_ins = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in metas]
    left = iter(stand_ins)
    with torch._C.DisableTorchFunction():
        parts, how = flat(do(op, lambda _: next(left)))
    views = tuple(next((i for i, x in enumerate(stand_ins) if p is x or p._base is x), None) for p in parts)
    written = tuple(i for i, x in enumerate(stand_ins) if x._version)
    return Results(tuple((tuple(p.shape), p.dtype) for p in parts), how, views, written)


@functools.cache
def without_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is called where no gradients are taken."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


class Kind:
    """A type of vertex: ops over inputs, children and weights, done for many calls at once."""

    def __init__(
        self, name: str, ops: Sequence[Op], outs: Sequence[tuple[Ref, Meta]], inputs: int, weights: Sequence[Tensor], reads: dict[Ref, str]
    ) -> None:
        self.name, self.ops, self.outs, self.inputs, self.weights, self.reads = name, ops, outs, inputs, weights, reads
        self.states = tuple(state_name(port, meta) for port, (_, meta) in enumerate(outs))

    def held(self) -> list[Tensor]:
        return list(self.weights)

    def __call__(self, v: Vertex) -> None:
        inputs = [v.pull(f"{self.name} {i}") for i in range(self.inputs)]
        children = [v.gather(state, ref.number) for ref, state in self.reads.items()]
        each = torch.zeros(v._rows)  # a call may read weights alone, or nothing
        values = torch.vmap(lambda _, *given: self._one(*given), randomness="different")(each, inputs, children)
        results = dict(zip(self.states, values, strict=True))
        v.scatter(**{name: value for name, value in results.items() if value.dtype.is_floating_point})
        v.push(**results)

    def _one(self, inputs: list[Tensor], children: list[Tensor]) -> list[Tensor]:
        """One call in plain torch."""
        below = dict(zip(self.reads, children, strict=True))
        done: list[list[Tensor]] = []

        def find(ref: Ref) -> Tensor:
            if ref.of == "op":
                return done[ref.number][ref.part]
            return below[ref] if ref.of == "child" else (inputs if ref.of == "in" else self.weights)[ref.number]

        for op in self.ops:
            done.append(flat(do(op, find))[0])
        return [find(ref) for ref, _ in self.outs]


def _cell(cell: Any) -> Callable[..., Any]:
    """A recurrent cell as the ops it is made of, which torch.vmap takes."""

    def call(x: Tensor, state: Any, weight: Tensor, recurrent: Tensor, *biases: Tensor | None) -> Any:
        gave, inner = [b for b in biases if b is not None], state if isinstance(state, (tuple, list)) else (state,)
        found = cell(F.linear(x, weight, gave[0] if gave else None), tuple(inner), recurrent, gave[1] if gave else None)
        return found if isinstance(state, (tuple, list)) else found[0]

    return call


def _bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return out if bias is None else out + bias


def _set(x: Tensor, at: Any, value: Any) -> Tensor:
    x[at] = value
    return x


APART: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _cell(packed.lstm), torch.gru_cell: _cell(packed.gru), torch.rnn_tanh_cell: _cell(packed.plain(torch.tanh)),
    torch.rnn_relu_cell: _cell(packed.plain(torch.relu)), Tensor.__setitem__: _set, torch.bilinear: _bilinear,
}  # fmt: skip


def state_name(port: int, meta: Meta) -> str:
    """The name under which a result is scattered: the same for all kinds with such a result."""
    return f"{port} {list(meta[0])} {str(meta[1]).removeprefix('torch.')}"


def is_weight(x: Any) -> bool:
    return isinstance(x, nn.Parameter)
