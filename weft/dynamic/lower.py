"""A vertex function's program as one rank runs it, and how a node of it is run on the rows at hand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.codegen.library_calls import all_rows
from weft.core.errors import StructureError
from weft.core.layout import Layout, Mesh
from weft.core.node import DTYPE_NAMES, Node, Type, make, toposort
from weft.dynamic import collective
from weft.dynamic.sizes import EDGES, ROWS, unit_of
from weft.dynamic.trace import AT, Key, VertexProgram
from weft.dynamic.vertex import Source
from weft.ops.fill import full
from weft.ops.linalg import matmul
from weft.ops.pointwise import ge, mul, where
from weft.ops.random import uniform
from weft.ops.reduce import norm_dims, sum_
from weft.ops.registry import Kind
from weft.ops.shape import permute, reshape
from weft.ops.source import input_node

Sizes = tuple[int, int]  # rows and edges at hand


# -- the program of one rank -----------------------------------------------------------------------------------------------------------


def lowered(f: VertexProgram) -> VertexProgram:
    """Local shapes and no mesh; masks drawn apart from what they hide, contractions of matrices as matmuls."""
    f = _separate_sums(f)
    made: dict[Node, Node] = {}
    for n in toposort(node for _, node in f.program.outputs):
        args = tuple(made[a] for a in n.args)
        here = make(n.op, args, dict(n.attrs)) if f.at is None else _on_rank(f, n, args)
        rule = _RULES.get(here.op.name)
        made[n] = here if rule is None else rule(here)
    return replace(f.with_outputs([(name, made[n]) for name, n in f.program.outputs], "on one rank"), at=None)


def _separate_sums(f: VertexProgram) -> VertexProgram:
    """An op that gives both rows and sums over them, as a norm's gradient does, in ops of one result: sums are made once, over all rounds."""
    swap: dict[Node, Node] = {}
    for n in f.program.nodes:
        if len(n.types) > 1 and n.op.written is not None and len({bool(domain_of(t.shape)) for t in n.types}) > 1:
            parts = n.op.written(*n.args, **dict(n.attrs))
            swap |= {u: parts[u.attr("index")] for u in f.program.users[n]}
    return f.with_nodes(swap, "sums apart") if swap else f


def domain_of(shape: Sequence[int]) -> str:
    """`row` or `edge` of a value with one slice per vertex or per edge, `` of one with neither."""
    units = set(map(unit_of, shape))
    return "row" if ROWS in units else "edge" if EDGES in units else ""


def _on_rank(f: VertexProgram, n: Node, args: tuple[Node, ...]) -> Node:
    """A node of a sharded program, of what this rank holds."""
    at = f.at or {}
    shape = tuple(n.types[0].layout.local_shape(at))
    if n.op.is_input:
        return input_node(n.attr("name"), Type(n.dtype, Layout.of(Mesh(), shape)), n.role)
    if n.op.kind is Kind.COMM:
        return collective.exchange(args[0], key=collective.key(n, at, f.groups), shape=shape)  # type: ignore[no-any-return]
    own = {"shape": shape, "mesh": Mesh().key, "shards": ()}
    sharded = any(t.layout.local_shape(at) != t.shape for x in (n, *n.args) for t in x.types)
    plain = n.op.name in ("reshape", "expand", "full", "dropout") or (len(n.args) > 1 and by_edge(n))
    if n.op.local is not None and sharded and not plain:
        raise StructureError(
            f"vertex function {f.name!r} is sharded where {n.op.name} needs to know its place", needed="a dim that it treats in one piece, replicated",
            found=str(n.args[0].type if n.args else n.type), try_="leave that weight out of dynamic.shard",
        )  # fmt: skip
    return make(n.op, args, {k: own.get(k, v) for k, v in n.attrs})


_Rule = Callable[[Node], Node]


def _dropout(n: Node) -> Node:
    """Drawn by torch anew in every run; a gradient has the mask of its value."""
    x, seed, *part = n.args
    p = n.attr("p")
    if part or p >= 1:
        return n if part else mul(x, 0.0)  # type: ignore[no-any-return]
    kept = ge(uniform(seed, shape=x.shape, dtype=DTYPE_NAMES[x.dtype], site=n.attr("site")), p)
    return where(kept, mul(x, 1 / (1 - p)), mul(x, 0.0))  # type: ignore[no-any-return]


def _filled(n: Node) -> Node:
    """A number in many places."""
    (x,) = n.args
    return full(n.shape, x.attr("value"), n.mesh, n.dtype) if x.op.is_number else n  # type: ignore[no-any-return]


def _sum(n: Node) -> Node:
    """With the dims it reduces put back as views, so that it is the same sum with them and without."""
    x = n.args[0]
    dims = norm_dims(n.attr("dims"), x.ndim)
    return reshape(sum_(x, dims=dims), n.shape) if n.attr("keepdim", False) else n  # type: ignore[no-any-return]


def _einsum(n: Node) -> Node:
    """A contraction of two matrices as a matmul."""
    ins, out = n.attr("equation").split("->")
    a, _, b = ins.partition(",")
    shared = set(a) & set(b)
    if len(n.args) != 2 or [len(a), len(b), len(out)] != [2, 2, 2] or len(shared) != 1 or shared & set(out):
        return n
    (k,) = shared
    x, y = n.args
    if out[0] in b:
        a, b, x, y = b, a, y, x
    return matmul(x if a[1] == k else permute(x, 1, 0), y if b[0] == k else permute(y, 1, 0))  # type: ignore[no-any-return]


_RULES: dict[str, _Rule] = {
    "dropout": _dropout, "einsum": _einsum, "expand": _filled, "reshape": _filled, "stop_gradient": lambda n: n.args[0],
    "scale_gradient": lambda n: n.args[0], "overwritten": lambda n: n.args[0], "sum": _sum,
}  # fmt: skip


class Graph:
    """A lowered function as phases, kernels and buffers see it: what is computed, in order, who reads it, and what each is for."""

    def __init__(self, f: VertexProgram) -> None:
        of, made = f.program.input_names, f.program.output_names
        self.sources, self.states, self.outputs = f.inputs, f.scattered, f.pushed
        self.weights = {of[n]: w for n, w in f.weights.items() if n in of}
        self.grads = {s: made[n] for n, s in f.grads.items() if isinstance(s, Source)}
        self.weight_grads = [(f.weights[s], made[n]) for n, s in f.grads.items() if isinstance(s, str)]
        self.messages: dict[Key, Node] = {key: made[n] for n, key in f.messages.items()}
        every = self._computed()
        self.names = {n: f"n{i}" for i, n in enumerate(dict.fromkeys([*self.sources.values(), *self.weights, *every]))}
        self.nodes = [n for n in every if not n.op.is_input]
        self.users: dict[Node, list[Node]] = {n: [] for n in self.names}
        for n in self.nodes:
            for a in dict.fromkeys(reads(n)):
                self.users[a].append(n)

    def gradients(self) -> list[Node]:
        """Of inputs and of weights."""
        return [*self.grads.values(), *(n for _, n in self.weight_grads)]

    def results(self) -> list[Node]:
        return [*self.states.values(), *self.outputs.values(), *self.gradients(), *self.messages.values()]

    def _computed(self) -> list[Node]:
        """What results are made of, operands first."""
        order, needed = toposort(self.results()), set(self.results())
        for node in reversed(order):
            needed.update(reads(node) if node in needed else ())
        return [n for n in order if n in needed]


def reads(node: Node) -> list[Node]:
    """The operands that are computed or given: no numbers, no seed, in place of which torch's own numbers are drawn, no list of all rows."""
    args = node.args[:2] if is_segment(node) else node.args
    return [a for a in args if not a.op.is_number and not (a.op.is_input and a.attr("name") == "seed")]


def by_edge(node: Node) -> bool:
    """Whether its index says which vertex each edge belongs to."""
    return node.attr("dim", 0) == 0 and node.args[1].op.is_input and node.args[1].attr("name") == AT


def is_segment(node: Node) -> bool:
    """Whether it adds up the edges of each vertex, or takes their maximum."""
    return node.op.name in ("put", "segment_max") and by_edge(node)


def is_spread(node: Node) -> bool:
    """Whether it gives each edge its vertex's value."""
    return node.op.name == "take" and by_edge(node)


# -- running ---------------------------------------------------------------------------------------------------------------------------


def evaluate(f: VertexProgram, given: Mapping[str, Tensor], *, sizes: Sizes | None = None, device: torch.device | None = None) -> dict[str, Tensor]:
    """The outputs of a lowered function; `sizes` where other numbers of rows and edges are given than it was traced with."""
    values: dict[Node, Any] = {}
    with torch.device(device) if device is not None else nullcontext():
        for n in toposort(node for _, node in f.program.outputs):
            if n.op.is_input:
                values[n] = given.get(n.attr("name"))
            else:
                values[n] = run(n, [values[a] for a in n.args], sizes)
        return {name: tensor(values[n], n) for name, n in f.program.outputs}


def run(node: Node, args: Sequence[Any], sizes: Sizes | None = None) -> Any:
    """One node on its operands' values; a number stays one, so that what is traced of it has it in its text."""
    if node.op.is_number:
        return node.attr("value")
    form = _FORMS.get(node.op.name)
    attrs = {k: v if sizes is None else fill_in(v, *sizes) for k, v in node.attrs}
    found = NotImplemented if form is None else form(node, args, node.types[0].shape if sizes is None else fill_in(node.types[0].shape, *sizes))
    if found is not NotImplemented:
        return found
    if any(a is None for a in args):
        raise StructureError(
            f"a vertex function draws random numbers inside {node.op.name}", needed="dropout next to it", found=node.op.name,
            try_="F.dropout on what it reads or gives",
        )  # fmt: skip
    return node.op.run(*(tensor(a, n) for a, n in zip(args, node.args, strict=True)), **attrs)


def tensor(value: Any, node: Node) -> Any:
    """A value as a tensor."""
    return torch.full((), value, dtype=node.dtype) if isinstance(value, (bool, int, float)) else value


def is_sized(node: Node) -> bool:
    """Whether running the node needs the number of rows or edges."""
    return is_segment(node) or any(fill_in(v, 1, 1) != v for _, v in node.attrs)


def fill_in(value: object, rows: int, edges: int) -> object:
    """Sizes for the number of rows and edges at hand."""
    if isinstance(value, (list, tuple)):
        return type(value)([fill_in(v, rows, edges) for v in value])
    unit = unit_of(value) if isinstance(value, int) and not isinstance(value, bool) else 0
    return value // unit * (rows if unit == ROWS else edges) if unit else value  # type: ignore[operator]


_Form = Callable[[Node, Sequence[Any], Any], Any]  # the last is the shape of the result
_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip


def _tensors(values: Iterable[Any]) -> list[bool]:
    return [isinstance(x, Tensor) for x in values]


def _arithmetic(node: Node, args: Sequence[Any], shape: Any) -> Any:
    return _OPERATORS[node.op.name](*args) if sum(_tensors(args)) == 1 else NotImplemented


def _where(node: Node, args: Sequence[Any], shape: Any) -> Any:
    test, a, b = _tensors(args)
    return torch.where(*args) if test and (a or b) else NotImplemented


def _keep(node: Node, args: Sequence[Any], shape: Any) -> Any:
    return torch.where(args[1], args[0], 0.0) if all(_tensors(args)) else NotImplemented


def _extreme(node: Node, args: Sequence[Any], shape: Any) -> Any:
    a, b = _tensors(args)
    if a == b:
        return NotImplemented
    x, bound = args if a else reversed(args)
    return x.clamp(min=bound) if node.op.name == "maximum" else x.clamp(max=bound)


def _put(node: Node, args: Sequence[Any], shape: Any) -> Any:
    if not all_rows(node.args[2]):
        return NotImplemented
    x, index, dim = args[0], args[1], node.attr("dim")
    x = x.reshape(*x.shape[:dim], index.numel(), *x.shape[dim + index.ndim :])
    return x.new_zeros(*x.shape[:dim], shape[dim], *x.shape[dim + 1 :]).index_add(dim, index.reshape(-1), x)


def _segment_max(node: Node, args: Sequence[Any], shape: Any) -> Any:
    if not by_edge(node):
        return NotImplemented
    x, at = args[0], args[1].reshape(-1, *[1] * (node.ndim - 1)).expand_as(args[0])
    return x.new_zeros(shape).scatter_reduce_(0, at, x, "amax", include_self=False)


def _drawn(node: Node, args: Sequence[Any], shape: Any) -> Any:
    draw = torch.rand if node.op.name == "uniform" else torch.randn
    return draw(shape, dtype=node.dtype)


_FORMS: dict[str, _Form] = {
    **dict.fromkeys(_OPERATORS, _arithmetic), "where": _where, "keep_where": _keep, "maximum": _extreme, "minimum": _extreme,
    "put": _put, "segment_max": _segment_max, "uniform": _drawn, "normal": _drawn,
}  # fmt: skip
