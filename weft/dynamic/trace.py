"""A vertex function as a program, written once for any number of vertices by the one tracer of torch code.

It is captured with ROWS vertices and EDGES edges, two large primes; a multiple of one of them in a shape or in an attribute stands for
that multiple of the number of rows or edges at hand. Its gradient is the program's own vjp, so forward and backward are one graph of nodes
that can be split wherever it pays, and every rule and verb of weft takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch, _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_map_only

from weft.autodiff import backward, dual_layout
from weft.core.errors import StructureError
from weft.core.names import part, readable
from weft.core.node import Node, Type, remade, toposort
from weft.core.program import Program, new_program
from weft.core.role import Role
from weft.dynamic.schedule import Reads
from weft.dynamic.sizes import EDGES, ROWS
from weft.dynamic.vertex import Source, Use, Vertex, check_use
from weft.frontend.capture.joint import CustomGradient
from weft.frontend.capture.step import Step
from weft.frontend.capture.tape import tracing
from weft.ops.comm import reshard
from weft.ops.embed import gather, take_op
from weft.ops.fill import arange_op, full_op
from weft.ops.linalg import einsum_op, matmul
from weft.ops.pointwise import add, lt, mul, where
from weft.ops.shape import expand, expand_op, narrow, narrow_op, permute, reshape, reshape_op
from weft.ops.source import input_node

Function = Callable[[Vertex], None]
Shape = tuple[int, ...]
Key = tuple[str, ...]


@contextmanager
def by_itself() -> Iterator[None]:
    """Inside, torch functions are intercepted by nobody who did before, and can be again."""
    modes = list[Any]()
    with torch._C._EnableTorchFunction():
        while _len_torch_function_stack():
            modes.append(_pop_mode())
        try:
            yield
        finally:
            for mode in reversed(modes):
                _push_mode(mode)


@dataclass(frozen=True)
class VertexProgram:
    """A vertex function as a program, and what its inputs and outputs stand for."""

    name: str
    program: Program
    sources: Mapping[str, Source]  # input -> what it reads
    weights: Mapping[str, Tensor]  # input -> the model's tensor
    states: Mapping[str, str]  # output -> state
    outputs: Mapping[str, str]  # output -> what is pushed
    reads: Reads
    optional: frozenset[Source] = frozenset()
    grads: Mapping[str, Source | str] = field(
        default_factory=dict
    )  # output -> the source, or the weight's input, that it is the gradient of
    messages: Mapping[str, Key] = field(default_factory=dict)  # output -> (state, how): gradients on their way to children
    at: Mapping[str, int] | None = None  # the place of this rank on the program's mesh; none: it is placed nowhere
    groups: Mapping[str, Any] = field(default_factory=dict)

    def with_program(self, program: Program) -> VertexProgram:
        """The same function computed by another program with these inputs and outputs."""
        missing = (set(self.states) | set(self.outputs)) - set(program.output_names)
        strange = set(program.input_names) - set(self.sources) - set(self.weights) - {"seed"}
        if missing or strange:
            raise StructureError(
                "this program is not one of the same vertex function", needed=f"outputs {', '.join([*self.states, *self.outputs])}",
                found=f"{'no ' + ', '.join(missing) if missing else 'new inputs ' + ', '.join(strange)}",
            )  # fmt: skip
        return replace(self, program=program)

    @cached_property
    def inputs(self) -> dict[Source, Node]:
        """What the program reads besides weights."""
        return {s: self.program.input_names[n] for n, s in self.sources.items() if n in self.program.input_names}

    @cached_property
    def scattered(self) -> dict[str, Node]:
        return {state: self.program.output_names[n] for n, state in self.states.items()}

    @cached_property
    def pushed(self) -> dict[str, Node]:
        return {output: self.program.output_names[n] for n, output in self.outputs.items()}

    @property
    def is_random(self) -> bool:
        return "seed" in self.program.input_names

    def held(self) -> list[Tensor]:
        return list(self.weights.values())

    def weight_at(self, node: Node) -> Tensor | None:
        """The tensor that an input stands for."""
        return self.weights.get(node.attr("name", "")) if node.op.is_input else None

    def with_nodes(self, swap: Mapping[Node, Node], step: str) -> VertexProgram:
        """Some nodes replaced and what depends on them made anew."""
        made = remade([n for _, n in self.program.outputs], swap)
        return self.with_outputs([(name, made[n]) for name, n in self.program.outputs], step)

    def with_outputs(self, outputs: Sequence[tuple[str, Node]], step: str, **facts: Any) -> VertexProgram:
        """Other outputs, and the inputs that they need."""
        read = dict.fromkeys(n for n in toposort(n for _, n in outputs) if n.op.is_input)
        inputs = [*(n for n in self.program.inputs if n in read), *(n for n in read if n not in self.program.input_set)]
        return replace(self, program=self.program.with_outputs(outputs, step, inputs=inputs), **facts)

    def __call__(self, v: Vertex) -> None:
        """Run the program on the rows of a vertex."""
        from weft.dynamic.lower import evaluate, lowered

        given = {n: self._read(v, s) for n, s in self.sources.items() if n in self.program.input_names} | dict(self.weights)
        values = evaluate(lowered(self), given)
        v.scatter(**{state: values[name] for name, state in self.states.items()})
        v.push(**{output: values[name] for name, output in self.outputs.items()})

    def _read(self, v: Vertex, source: Source) -> Tensor:
        optional = source in self.optional
        if source.role == "pull":
            return v.pull(source.name, optional=optional)
        if source.role == "at":
            return v.edge_rows
        if source.role == "slot":
            return v.gather(source.name, source.slot, optional=optional)
        return v.gather(source.name, after=self.reads.slots)


def trace(
    function: Function, name: str, states: Mapping[str, Shape], pulls: Mapping[str, tuple[Shape, torch.dtype]],
    dtype: torch.dtype, device: torch.device, names: Mapping[int, str],
) -> VertexProgram:  # fmt: skip
    """The function captured once; `names` are those of its weights, by identity. What it writes out as numbers goes to `device`."""
    if isinstance(function, VertexProgram):
        return _as_written(function, name, states, pulls)
    use = Use()
    with _without_autograd(name), tracing(nn.Module()) as tape:
        r, step = tape.recorder, _Inside(tape)
        lifted = _Weights(lambda n, w: r.fresh_input(n, w, Role.PARAMETER, moves=w.is_floating_point()), names)

        def supply(source: Source) -> Tensor:
            like = _pretend(source, states, pulls, dtype, name)
            return r.fresh_input(input_name(source), like, Role.BATCH, moves=like.is_floating_point())

        with lifted, _all_rows_at_once(name):
            function(Vertex(ROWS, EDGES, supply, use))
        step.require_same_hooks()
        check_use(use, name, states, ROWS, dtype)
        outputs = {output_name("state", s): r.node(x) for s, x in use.states.items()}
        outputs |= {output_name("push", o): r.node(x) for o, x in use.outputs.items()}
    weights = {**lifted.found, **{n: x.to(device) for n, x in r.constants.items()}}
    program = new_program(part(name), r.mesh, [*r.inputs.values()], outputs, lines=r.lines)
    made = VertexProgram(
        name, program, {input_name(s): s for s in use.sources}, weights, {output_name("state", s): s for s in use.states},
        {output_name("push", o): o for o in use.outputs}, use.reads, frozenset(use.optional),
    )  # fmt: skip
    return made.with_nodes(_plainer(program), "plainer")


def input_name(source: Source) -> str:
    return readable(f"batch.{source}")


AT = input_name(Source("at"))


def output_name(kind: str, name: str) -> str:
    return readable(f"out.{kind}_{name}")


def _plainer(program: Program) -> dict[Node, Node]:
    """x w' as a matmul; a chunk of the last dim, which torch takes from a view of two dims, as a part of that dim; sums that start with zeros
    without these; of each row the elements that an index of its own names, which torch.vmap takes from all rows laid end to end; an edge's
    vertex, never negative."""
    found, at = dict[Node, Node](), program.input_names.get(AT)
    for n in program.nodes:
        args = [remade([a], found)[a] for a in n.args]
        if n.op is einsum_op and n.attr("equation") == "ak,nk->an":
            found[n] = matmul(args[0], permute(args[1], 1, 0))
        elif n.op is reshape_op and (part := _chunk(args[0], n.shape)) is not None:
            found[n] = part
        elif n.op is take_op and n.attr("dim") == 0 and (picked := _picked(*args)) is not None:
            found[n] = picked
        elif n.op is add and args[0].op is full_op and args[0].attr("value") == 0 and n.types == args[1].types:
            found[n] = args[1]
        elif n.op is where and args[2] is at and args[0].op is lt and args[0].args[0] is at:
            found[n] = args[2]
    return found


def _picked(table: Node, index: Node) -> Node | None:
    """take(x as [rows * n, ...], row * n + i) is what i names of each row of x."""
    if table.op is not reshape_op or index.op is not add or index.args[0].op is not mul:
        return None
    (x,), (start, i), row = table.args, index.args, index.args[0].args[0]
    while row.op in (reshape_op, expand_op):
        row = row.args[0]
    each = start.args[1]
    counts = row.op is arange_op and (row.attr("start"), row.attr("step")) == (0, 1) and row.shape == x.shape[:1] == i.shape[:1]
    if not counts or x.ndim < 2 or x.shape[0] not in (ROWS, EDGES) or not each.op.is_number or each.attr("value") != x.shape[1]:
        return None
    rest, wide = x.shape[2:], reshape(i, (i.shape[0], prod(i.shape[1:])))
    if table.shape != (x.shape[0] * x.shape[1], *rest):
        return None
    wide = expand(reshape(wide, (*wide.shape, *(1,) * len(rest))), (*wide.shape, *rest))
    return reshape(gather(x, wide, 1), (*i.shape, *rest))  # type: ignore[no-any-return]


def _chunk(part: Node, shape: Shape) -> Node | None:
    """What a narrow of a view gives, as a narrow of what is viewed."""
    if part.op is not narrow_op or part.args[0].op is not reshape_op or part.attr("dim") != part.ndim - 2:
        return None
    (view,) = part.args
    (x,) = view.args
    if x.shape[:-1] != view.shape[:-2] or shape != (*x.shape[:-1], part.shape[-2] * part.shape[-1]):
        return None
    start, stop, size = part.attr("start"), part.attr("stop"), part.shape[-1]
    return narrow(x, x.ndim - 1, start * size, stop * size) if part.attr("step") == 1 else None  # type: ignore[no-any-return]


def _as_written(f: VertexProgram, name: str, states: Mapping[str, Shape], pulls: Mapping[str, tuple[Shape, torch.dtype]]) -> VertexProgram:
    """A function that is a program already, for inputs like these."""
    for source, node in f.inputs.items():
        want: tuple[Any, ...] = tuple(node.layout.local_shape(f.at or {})[1:]), node.dtype
        if source.role == "pull":
            found: Any = pulls.get(source.name)
        else:
            found = (states.get(source.name), node.dtype) if source.role in ("slot", "edge") else want
        if found != want:
            raise StructureError(
                f"vertex function {name!r} is a program for other inputs", needed=f"{source.name!r} with rows of {list(want[0])}, {want[1]}",
                found="none" if found is None else f"{list(found[0] or ())}, {found[1]}", try_="write the program anew: dynamic.program(model, inputs)",
            )  # fmt: skip
    return replace(f, name=name)


def differentiate(f: VertexProgram, wanted: Sequence[str], pushed: set[str]) -> VertexProgram:
    """The same function with the gradients of the inputs named, given those of its states and of the outputs in `pushed`."""
    ends = [(Source("d_state", s), n) for s, n in f.scattered.items()]
    ends += [(Source("d_push", o), n) for o, n in f.pushed.items() if o in pushed]
    seeds: dict[Node, Node] = {}
    sources = dict(f.sources)
    for source, node in ends:
        ct = input_node(input_name(source), Type(node.dtype, dual_layout(node.type)), Role.BATCH)
        sources[input_name(source)] = source
        seeds[node] = add(seeds[node], ct) if node in seeds else ct
    asked = {n: f.program.input_names[n] for n in wanted if n in f.program.input_names}
    found = backward(seeds, asked.values())
    grads = {f"d.{n}": reshard(found[node], node.layout) for n, node in asked.items() if node in found}
    of: dict[str, Source | str] = {f"d.{n}": f.sources.get(n, n) for n in asked}
    return f.with_outputs([*f.program.outputs, *grads.items()], "vjp", sources=sources, grads={n: of[n] for n in grads})


class _Inside(Step):
    """Answers for the gradients that a vertex function takes on its way."""

    def backward(self, *_: Any, **__: Any) -> None:
        raise CustomGradient("backward()")


class _Weights(TorchFunctionMode):
    """Tensors that the function closes over become inputs, whatever device they are on."""

    def __init__(self, make: Callable[[str, Tensor], Tensor], names: Mapping[int, str]) -> None:
        super().__init__()
        self.make, self.names = make, names
        self.found: dict[str, Tensor] = {}
        self.known: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ROW_BY_ROW and _cuts_rows(*args, **kwargs or {}):
            raise StructureError(
                "a vertex function goes through its vertices one by one", needed="ops on all rows at once: a tensor has one row per vertex or edge",
                found=f"{func.__name__} along the rows", try_="the same ops on the full tensor; torch.vmap for a function of one row",
            )  # fmt: skip
        if func not in _OF_NUMBERS:
            args, kwargs = tree_map_only(Tensor, self._lifted, (args, kwargs or {}))
        return func(*args, **kwargs or {})

    def _lifted(self, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) or _functorch.is_functorch_wrapped_tensor(x):
            return x
        if id(x) not in self.known:
            name = readable(f"param.{self.names.get(id(x), '') or f'weight{len(self.found)}'}")
            name = f"param.weight{len(self.found)}" if name in self.found else name
            self.found[name] = x
            self.known[id(x)] = self.make(name, x)
        return self.known[id(x)]


@contextmanager
def _without_autograd(name: str) -> Iterator[None]:
    """Inside, gradients are the program's own: what only autograd can do is refused."""
    try:
        yield
    except CustomGradient as error:
        raise StructureError(
            f"vertex function {name!r} has gradients that only autograd can make", found=str(error),
            needed="ops, hooks that map a gradient to a gradient, torch.autograd.grad", try_="the same outside of the model, on what it reads or gives",
        ) from error  # fmt: skip


@contextmanager
def _all_rows_at_once(name: str) -> Iterator[None]:
    """Inside, torch.vmap takes no op row after row: a trace has a million rows."""
    allowed = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("Batching rule not implemented", "hit the vmap fallback")):
            raise
        raise StructureError(
            f"vertex function {name!r}: torch.vmap has no way to do an op for many vertices at once", needed="ops that torch.vmap takes",
            found=str(error).partition(";")[0].partition(". ")[0], try_="other ops for it, or the function written for rows, without torch.vmap",
        ) from error  # fmt: skip
    finally:
        _functorch._set_vmap_fallback_enabled(allowed)


def _cuts_rows(x: Any, dim: int = 0) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0 and x.shape[dim] in (ROWS, EDGES)


_ROW_BY_ROW = {Tensor.__iter__, Tensor.unbind, torch.unbind}
_OF_NUMBERS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__repr__,
    Tensor.__format__,
}


def _pretend(
    source: Source, states: Mapping[str, Shape], pulls: Mapping[str, tuple[Shape, torch.dtype]], dtype: torch.dtype, name: str
) -> Tensor:
    if source.role == "at":
        return torch.empty(EDGES, dtype=torch.int64, device="meta")
    known = pulls if source.role == "pull" else states
    if source.name not in known:
        what = "pulls an input" if source.role == "pull" else "gathers a state"
        raise StructureError(
            f"vertex function {name!r} {what} that is not there: {source.name!r}",
            needed=", ".join(known) or "none is given", found=source.name,
        )  # fmt: skip
    if source.role == "pull":
        shape, of = pulls[source.name]
        return torch.empty(ROWS, *shape, dtype=of, device="meta")
    rows = ROWS if source.role == "slot" else EDGES
    return torch.empty(rows, *states[source.name], dtype=dtype, device="meta")
