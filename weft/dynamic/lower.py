"""A vertex function's program as ATen ops: what it computes on tensors, and the graph that phases and kernels are made of."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from weft.core.errors import StructureError
from weft.core.node import Node, toposort
from weft.dynamic import collective, ops
from weft.dynamic.sizes import EDGES, ROWS
from weft.dynamic.trace import Key, Shape, VertexProgram
from weft.dynamic.vertex import Source
from weft.ops.reduce import norm_dims
from weft.ops.registry import Kind, Local

aten = torch.ops.aten
DECOMPOSED = get_decompositions([
    aten.addmm, aten.silu, aten.silu_backward, aten.gelu_backward, aten.sigmoid_backward, aten.tanh_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh, aten.hardtanh_backward, aten.elu,
    aten.elu_backward, aten.softplus, aten.softplus_backward, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.addcmul,
    aten.addcdiv, aten.lerp, aten.slice_backward, aten.select_backward, aten.std.correction, aten.var.correction,
])  # fmt: skip
Sizes = tuple[int, int]  # rows and edges at hand


@dataclass
class Traced:
    """A vertex function in ATen ops: the graph, where its inputs come from and what it gives."""

    name: str
    graph: fx.Graph
    sources: dict[Source, fx.Node]
    states: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    grads: dict[Source, fx.Node]
    messages: dict[Key, fx.Node]
    weights: list[Tensor] = field(default_factory=list)

    def results(self) -> list[fx.Node]:
        return [node for kind in (self.states, self.outputs, self.grads, self.messages) for node in kind.values()]


def lower(f: VertexProgram, device: torch.device) -> Traced:
    """The program as one graph, traced over tensors without values."""
    p = f.program
    weights = {n: i for i, n in enumerate(f.weights)}
    sources = [f.sources[n] if n in f.sources else Source("weight", str(weights[n])) for n in p.input_names if n != "seed"]
    names = [n for n in p.input_names if n != "seed"]

    def run(*values: Tensor) -> list[Tensor]:
        return evaluate(f, [n for _, n in p.outputs], dict(zip(names, values, strict=True)), device=device)

    with FakeTensorMode(allow_non_fake_inputs=True):
        like = [torch.empty(_shape(p.input_names[n], f.at), dtype=p.input_names[n].dtype, device=device) for n in names]
    with torch.no_grad():
        made = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True, decomposition_table=DECOMPOSED)(*like)
    made = fx.GraphModule(made, fx_graph_cse(made.graph))
    found = Traced(f.name, made.graph, {}, {}, {}, {}, {}, list(f.weights.values()))
    found.sources = dict(zip(sources, [n for n in made.graph.nodes if n.op == "placeholder"], strict=True))
    _lift_constants(found, made)
    _name_results(found, f)
    return found


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _shape(node: Node, at: Mapping[str, int] | None) -> Shape:
    return tuple(node.layout.local_shape(at) if at is not None else node.shape)


def _lift_constants(found: Traced, module: fx.GraphModule) -> None:
    """Tensors that ops bring with them become weights."""
    known: dict[int, fx.Node] = {}
    for node in [n for n in found.graph.nodes if n.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if id(value) not in known:
            source = Source("weight", str(len(found.weights)))
            with found.graph.inserting_before(next(iter(found.graph.nodes))):
                known[id(value)] = found.sources[source] = found.graph.placeholder(str(source))
            known[id(value)].meta["val"] = FakeTensorMode().from_tensor(value)
            found.weights.append(value)
        node.replace_all_uses_with(known[id(value)])
        found.graph.erase_node(node)


def _name_results(found: Traced, f: VertexProgram) -> None:
    """Drop bookkeeping ops and read the results off the output node."""
    for node in list(found.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
            found.graph.erase_node(node)
    out: Any = next(n for n in found.graph.nodes if n.op == "output").args[0]
    made = dict(zip(f.program.output_names, out, strict=True))
    weights = {n: Source("weight", str(i)) for i, n in enumerate(f.weights)}
    found.states = {state: made[n] for n, state in f.states.items()}
    found.outputs = {output: made[n] for n, output in f.outputs.items()}
    found.grads = {s if isinstance(s, Source) else weights[s]: made[n] for n, s in f.grads.items()}
    found.messages = {key: made[n] for n, key in f.messages.items()}
    found.graph.eliminate_dead_code()


# -- running ---------------------------------------------------------------------------------------------------------------------------


def evaluate(
    f: VertexProgram, wanted: Sequence[Node], given: Mapping[str, Tensor], *, sizes: Sizes | None = None, device: torch.device | None = None
) -> list[Tensor]:
    """The values of some nodes, on this rank or in one piece; `sizes` where other numbers of rows and edges are given than it was traced with."""
    run = _Run(f, sizes, device)
    with torch.device(device) if device is not None else nullcontext():
        for node in toposort(wanted):
            run.do(node, given)
        return [run.whole(node) for node in wanted]


class _Run:
    """Values by node; a number stays one, so that kernels have it in their text."""

    def __init__(self, f: VertexProgram, sizes: Sizes | None, device: torch.device | None) -> None:
        self.f, self.sizes, self.device = f, sizes, device
        self.values: dict[Node, Any] = {}
        self.masks: dict[Any, Tensor] = {}  # of dropout, by site

    def do(self, node: Node, given: Mapping[str, Tensor]) -> None:
        name = node.op.name
        if name == "input":
            self.values[node] = given.get(node.attr("name"))  # none: the seed, in place of which torch's own numbers are drawn
        elif name == "const":
            self.values[node] = node.attr("value")
        else:
            by = _BY_NAME.get(name)
            found = by(self, node) if by is not None else NotImplemented
            self.values[node] = self._plainly(node) if found is NotImplemented else found

    def of(self, node: Node) -> Any:
        return self.values[node]

    def whole(self, node: Node) -> Any:
        """A value as a tensor."""
        value = self.values[node]
        return torch.full((), value, dtype=node.dtype) if isinstance(value, (bool, int, float)) else value

    def attrs(self, node: Node) -> dict[str, Any]:
        return {k: self.sized(v) for k, v in node.attrs}

    def sized(self, value: Any) -> Any:
        return value if self.sizes is None else fill_in(value, *self.sizes)

    def _plainly(self, node: Node) -> Any:
        if node.op.kind is Kind.COMM:
            return collective.exchange(self.whole(node.args[0]), collective.key(node, self.f.at or {}, self.f.groups))
        args = [self.whole(a) for a in node.args]
        if any(a is None for a in args):
            raise StructureError(
                f"vertex function {self.f.name!r} draws random numbers inside {node.op.name}", needed="dropout next to it", found=node.op.name,
                try_="F.dropout on what it reads or gives",
            )  # fmt: skip
        if self.f.at is not None and node.op.local is not None:
            return node.op.local(Local(node, self.f.at), *args, **self.attrs(node))
        return node.op.run(*args, **self.attrs(node))


def fill_in(value: object, rows: int, edges: int) -> object:
    """Sizes for the number of rows and edges at hand."""
    if isinstance(value, (list, tuple)):
        return type(value)(fill_in(v, rows, edges) for v in value)
    if isinstance(value, int) and not isinstance(value, bool) and value:
        if value % ROWS == 0:
            return value // ROWS * rows
        if value % EDGES == 0:
            return value // EDGES * edges
    return value


_Form = Callable[[_Run, Node], Any]
_BY_NAME: dict[str, _Form] = {}


def _form(*names: str) -> Callable[[_Form], _Form]:
    def enter(form: _Form) -> _Form:
        _BY_NAME.update(dict.fromkeys(names, form))
        return form

    return enter


_OPERATORS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip


@_form(*_OPERATORS)
def _arithmetic(run: _Run, node: Node) -> Any:
    """With numbers as numbers."""
    a, b = map(run.of, node.args)
    numbers = sum(not isinstance(x, Tensor) for x in (a, b))
    return NotImplemented if numbers != 1 else _OPERATORS[node.op.name](a, b)


@_form("where")
def _where(run: _Run, node: Node) -> Any:
    test, a, b = map(run.of, node.args)
    return (
        NotImplemented if not isinstance(test, Tensor) or not (isinstance(a, Tensor) or isinstance(b, Tensor)) else torch.where(test, a, b)
    )


@_form("keep_where")
def _keep(run: _Run, node: Node) -> Any:
    x, here = node.args
    if here.op.name == "logical_not":
        return torch.where(run.whole(here.args[0]), 0.0, run.whole(x))
    return torch.where(run.whole(here), run.whole(x), 0.0)


@_form("maximum", "minimum")
def _extreme(run: _Run, node: Node) -> Any:
    a, b = map(run.of, node.args)
    if isinstance(a, Tensor) == isinstance(b, Tensor):
        return NotImplemented
    x, bound = (a, b) if isinstance(a, Tensor) else (b, a)
    return x.clamp(min=bound) if node.op.name == "maximum" else x.clamp(max=bound)


@_form("expand", "reshape")
def _filled(run: _Run, node: Node) -> Any:
    """A number in many places."""
    value = run.of(node.args[0])
    return NotImplemented if isinstance(value, Tensor) else torch.full(run.sized(_shape(node, run.f.at)), value, dtype=node.dtype)


@_form("sum")
def _sum(run: _Run, node: Node) -> Any:
    """With the dims it reduces put back as views, so that it is the same sum with them and without."""
    if not node.attr("keepdim", False):
        return NotImplemented
    x, dims = run.whole(node.args[0]), norm_dims(node.attr("dims"), node.args[0].ndim)
    out = x.sum(dims)
    for d in dims:
        out = out.unsqueeze(d)
    return out


@_form("stop_gradient")
def _same(run: _Run, node: Node) -> Any:
    return run.of(node.args[0])


@_form("einsum")
def _einsum(run: _Run, node: Node) -> Any:
    """A contraction of two matrices as a matmul."""
    ins, out = node.attr("equation").split("->")
    a, _, b = ins.partition(",")
    shared = set(a) & set(b)
    if len(node.args) != 2 or [len(a), len(b), len(out)] != [2, 2, 2] or len(shared) != 1 or shared & set(out):
        return NotImplemented
    (k,) = shared
    x, y = map(run.whole, node.args)
    if out[0] in b:
        a, b, x, y = b, a, y, x
    return torch.mm(x if a[1] == k else x.t(), y if b[0] == k else y.t())


def _by_edge(run: _Run, node: Node) -> bool:
    """Whether its index says which vertex each edge belongs to."""
    index = node.args[1]
    return node.attr("dim", 0) == 0 and index.op.is_input and run.f.sources.get(index.attr("name")) == Source("at")


@_form("take")
def _take(run: _Run, node: Node) -> Any:
    return ops.spread(*map(run.whole, node.args)) if _by_edge(run, node) else NotImplemented


@_form("put")
def _put(run: _Run, node: Node) -> Any:
    x, index = map(run.whole, node.args[:2])
    rows, dim = node.args[2], node.attr("dim")
    if rows.op.name != "arange" or rows.attr("start") or rows.attr("step") != 1 or rows.attr("cuts"):
        return NotImplemented
    count = run.sized(rows.attr("size"))
    if _by_edge(run, node):
        return ops.segment_sum(x, index, count)
    x = x.reshape(*x.shape[:dim], index.numel(), *x.shape[dim + index.ndim :])
    return x.new_zeros(*x.shape[:dim], count, *x.shape[dim + 1 :]).index_add(dim, index.reshape(-1), x)


@_form("segment_max")
def _segment_max(run: _Run, node: Node) -> Any:
    return ops.segment_max(*map(run.whole, node.args[:2]), run.sized(node.shape[0])) if _by_edge(run, node) else NotImplemented


@_form("dropout")
def _dropout(run: _Run, node: Node) -> Any:
    """Drawn by torch anew in every round; a gradient has the mask of its value."""
    x, p = run.whole(node.args[0]), node.attr("p")
    key = node.attr("site"), node.shape
    if key not in run.masks:
        run.masks[key] = torch.rand(x.shape, dtype=x.dtype) >= p
    return torch.where(run.masks[key], x / (1 - p), x * 0.0) if p < 1 else x * 0.0


@_form("uniform", "normal")
def _drawn(run: _Run, node: Node) -> Any:
    make = torch.rand if node.op.name == "uniform" else torch.randn
    return make(run.sized(node.shape), dtype=node.dtype)
