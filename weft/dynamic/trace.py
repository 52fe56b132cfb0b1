"""A vertex function as a graph of ATen ops, once for any number of vertices.

It is traced with ROWS vertices and EDGES edges, two large primes; a multiple of one of them in the graph, as a size or as an
argument, stands for that multiple of the number of rows or edges at hand. `differentiate` adds the gradient of all its
inputs to the graph, so forward and backward are one dataflow graph that can be split wherever it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from weft.dynamic.schedule import Reads
from weft.dynamic.sizes import EDGES, ROWS
from weft.dynamic.vertex import Source, Use, Vertex, check_use


def pretence() -> FakeTensorMode:
    """A mode of fake tensors; functions of one model share it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


aten = torch.ops.aten
Function = Callable[[Vertex], None]
Shape = tuple[int, ...]

DECOMPOSED = get_decompositions([
    aten.addmm, aten.silu, aten.silu_backward, aten.gelu_backward, aten.sigmoid_backward, aten.tanh_backward,
    aten.threshold_backward, aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh, aten.hardtanh_backward, aten.elu,
    aten.elu_backward, aten.softplus, aten.softplus_backward, aten.native_layer_norm, aten.native_layer_norm_backward,
    aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.addcmul,
    aten.addcdiv, aten.lerp, aten.slice_backward, aten.select_backward, aten.std.correction, aten.var.correction,
])  # fmt: skip


@dataclass
class Traced:
    """A vertex function: the graph, where its inputs come from and what it gives."""

    name: str
    graph: fx.Graph
    sources: dict[Source, fx.Node]
    states: dict[str, fx.Node]
    outputs: dict[str, fx.Node]
    weights: list[Tensor]
    reads: Reads
    optional: set[Source]
    grads: dict[Source, fx.Node] = field(default_factory=dict)  # after `differentiate`
    messages: dict[tuple[str, str], fx.Node] = field(default_factory=dict)  # gradients on their way to children

    def results(self) -> list[fx.Node]:
        return [node for kind in self._kinds() for node in kind.values()]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let all that reads `old` read `new`."""
        old.replace_all_uses_with(new)
        for kind in self._kinds():
            for key, node in kind.items():
                if node is old:
                    kind[key] = new

    def prune(self) -> None:
        """Write the results into the output node and drop what they do not need."""
        next(n for n in self.graph.nodes if n.op == "output").args = (self.results(),)
        self.graph.eliminate_dead_code()

    def _kinds(self) -> list[dict[Any, fx.Node]]:
        return [self.states, self.outputs, self.grads, self.messages]


def trace(
    function: Function, name: str, states: Mapping[str, Shape], pulls: Mapping[str, tuple[Shape, torch.dtype]],
    dtype: torch.dtype, device: torch.device, mode: FakeTensorMode,
) -> Traced:  # fmt: skip
    """Run the function once on fake tensors of `mode` and write down what it did."""
    use = Use()
    with mode, torch.no_grad():
        function(Vertex(ROWS, EDGES, lambda s: _pretend(s, states, pulls, dtype, device, name), use))
    check_use(use, name, states, ROWS, dtype)
    order = list(use.sources)

    def flat(*values: Tensor) -> list[Tensor]:
        again = Use()
        function(Vertex(ROWS, EDGES, dict(zip(order, values, strict=True)).__getitem__, again))
        return [*again.states.values(), *again.outputs.values()]

    args = [use.sources[s] for s in order]
    with torch.no_grad():
        made = make_fx(functionalize(flat), tracing_mode="fake", _allow_non_fake_inputs=True, decomposition_table=DECOMPOSED)(*args)
    found = Traced(name, made.graph, {}, {}, {}, [], use.reads, use.optional)
    found.sources = dict(zip(order, placeholders(made.graph), strict=True))
    lift_weights(found, made)
    name_results(found, [*use.states], [*use.outputs])
    return found


def differentiate(traced: Traced, wanted: set[Source], pushed: set[str]) -> Traced:
    """The same function with the gradients of `wanted`, given those of its states and of the outputs in `pushed`."""
    pushes = [o for o in traced.outputs if o in pushed]
    keep = [*traced.states.values(), *(traced.outputs[o] for o in pushes)]
    cotangents = [Source("d_state", s) for s in traced.states] + [Source("d_push", o) for o in pushes]
    module = fx.GraphModule(torch.nn.Module(), traced.graph)
    sources = list(traced.sources)

    def joint(*values: Tensor) -> list[Tensor | None]:
        primal = dict(zip(sources, values, strict=False))
        results = fx.Interpreter(module).run(*values[: len(sources)])
        given = dict(zip([*traced.states, *traced.outputs], results, strict=True))
        ends = [*results[: len(traced.states)], *(given[o] for o in pushes)]
        pairs = [(y, d) for y, d in zip(ends, values[len(sources) :], strict=True) if y.requires_grad]
        inputs = [primal[s] for s in sources if s in wanted]
        if not pairs or not inputs:
            return [*results, *[None] * len(inputs)]
        ys, ds = zip(*pairs, strict=True)
        return [*results, *torch.autograd.grad(ys, inputs, ds, allow_unused=True)]

    args = [like(n, s in wanted) for s, n in traced.sources.items()] + [like(n, False) for n in keep]
    made = make_fx(joint, tracing_mode="fake", decomposition_table=DECOMPOSED)(*args)
    both = Traced(traced.name, made.graph, {}, {}, {}, traced.weights, traced.reads, traced.optional)
    both.sources = dict(zip([*sources, *cotangents], placeholders(made.graph), strict=True))
    name_results(both, [*traced.states], [*traced.outputs], [s for s in sources if s in wanted])
    return both


def shape_of(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _pretend(
    source: Source, states: Mapping[str, Shape], pulls: Mapping[str, tuple[Shape, torch.dtype]],
    dtype: torch.dtype, device: torch.device, name: str,
) -> Tensor:  # fmt: skip
    if source.role == "at":
        return torch.empty(EDGES, dtype=torch.int64, device=device)
    known = pulls if source.role == "pull" else states
    if source.name not in known:
        what = "pulls an input" if source.role == "pull" else "gathers a state"
        from weft.core.errors import StructureError

        raise StructureError(
            f"vertex function {name!r} {what} that is not there: {source.name!r}",
            needed=", ".join(known) or "none is given", found=source.name,
        )  # fmt: skip
    if source.role == "pull":
        shape, of = pulls[source.name]
        return torch.empty(ROWS, *shape, dtype=of, device=device)
    rows = ROWS if source.role == "slot" else EDGES
    return torch.empty(rows, *states[source.name], dtype=dtype, device=device)


def like(node: fx.Node, grad: bool) -> Tensor:
    value = node.meta["val"]
    with value.fake_mode:
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return out.requires_grad_(grad and value.dtype.is_floating_point)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]


def lift_weights(found: Traced, module: fx.GraphModule) -> None:
    """Tensors the function closes over become inputs of the graph."""
    first = next(iter(found.graph.nodes))
    known: dict[int, fx.Node] = {}
    for node in [n for n in found.graph.nodes if n.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if id(value) not in known:
            source = Source("weight", str(len(found.weights)))
            with found.graph.inserting_before(first):
                known[id(value)] = found.graph.placeholder(str(source))
            mode = next(n for n in found.graph.nodes if "val" in n.meta and isinstance(n.meta["val"], Tensor))
            known[id(value)].meta["val"] = mode.meta["val"].fake_mode.from_tensor(value)
            found.sources[source] = known[id(value)]
            found.weights.append(value)
        node.replace_all_uses_with(known[id(value)])
        found.graph.erase_node(node)
    found.sources = {s: n for n in placeholders(found.graph) for s, m in found.sources.items() if m is n}


def name_results(found: Traced, states: list[str], outputs: list[str], grads: list[Source] | None = None) -> None:
    """Drop bookkeeping ops and read the results off the output node."""
    for node in list(found.graph.nodes):
        if node.op == "call_function" and node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            found.graph.erase_node(node)
    out: Any = next(n for n in found.graph.nodes if n.op == "output").args[0]
    found.states = dict(zip(states, out, strict=False))
    found.outputs = dict(zip(outputs, out[len(states) :], strict=False))
    rest = out[len(states) + len(outputs) :]
    found.grads = {s: n for s, n in zip(grads or [], rest, strict=True) if n is not None}
    found.prune()
