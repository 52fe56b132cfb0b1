"""Exact simplifications of a traced vertex function.

`specialise` writes in that some inputs are absent: a vertex without children gathers zeros, zero times a weight is zero, and so
the leaves of a tree lose their recurrent matmul. `hoist` moves a matmul with a gathered state to the vertices that scatter
it: gather(h) @ W = gather(h @ W), which then needs no copy of h per edge and is done once per vertex, not once per edge. A type
that does not scatter h scatters zeros, before and after.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from weft.dynamic import ops
from weft.dynamic.collective import exchange
from weft.dynamic.pointwise import expression
from weft.dynamic.trace import Traced, aten, shape_of
from weft.dynamic.vertex import Source

_FIRST_ZERO = {
    aten.neg.default, aten.tanh.default, aten.relu.default, aten.abs.default, aten.sqrt.default, aten.view.default,
    aten._unsafe_view.default, aten.clone.default, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim,
    aten.expand.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.select.int, aten.sum.dim_IntList,
    ops.spread, ops.segment_sum, ops.segment_max, aten.split.Tensor, aten.split_with_sizes.default, operator.getitem,
    aten.mean.dim, aten.sin.default, aten._to_copy.default, aten.div.Tensor, exchange,
}  # fmt: skip
_ANY_ZERO = {aten.mm.default, aten.bmm.default, aten.mul.Tensor}
_ALL_ZERO = {aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default, aten.maximum.default}


def specialise(traced: Traced, absent: Iterable[Source]) -> Traced:
    """The function where the sources in `absent` are known to be zero."""
    out = copy(traced)
    zeros = {out.sources[s] for s in absent if s in out.sources}
    for node in list(out.graph.nodes):
        if node.op == "call_function":
            _fold_zero(out, node, zeros)
    for node in zeros:
        if node.op != "placeholder" or node.users:
            _write_zero(out, node)
    return clean(out, drop=set(absent))


def clean(traced: Traced, drop: Iterable[Source] = ()) -> Traced:
    """Drop factors of one, double transposes, repeated and unused ops."""
    seen: dict[Any, fx.Node] = {}
    for node in list(traced.graph.nodes):
        if node.op == "call_function":
            same = _same_as(node) or seen.setdefault(_key(node), node)
            if same is not node:
                traced.replace(node, same)
    traced.prune()
    for source in list(traced.sources):
        if source in drop and not traced.sources[source].users:
            traced.graph.erase_node(traced.sources.pop(source))
    return traced


def copy(traced: Traced) -> Traced:
    """The same function in a graph of its own."""
    graph, twin = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(traced.graph, twin))
    for old, new in twin.items():
        new.meta = dict(old.meta)
    return replace(
        traced,
        graph=graph,
        sources={s: twin[n] for s, n in traced.sources.items()},
        states={s: twin[n] for s, n in traced.states.items()},
        outputs={s: twin[n] for s, n in traced.outputs.items()},
        grads={s: twin[n] for s, n in traced.grads.items()},
        messages={s: twin[n] for s, n in traced.messages.items()},
    )


def slices_to_splits(traced: Traced) -> Traced:
    """x[:, :a], x[:, a:b], ... that tile x become one split, whose gradient is one cat."""
    groups: dict[tuple[fx.Node, int], list[tuple[int, int, fx.Node]]] = {}
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is aten.slice.Tensor:
            x, dim, low, high, step = (*node.args, *[0, 0, None, 1][len(node.args) - 1 :])
            rank = len(shape_of(x))
            if dim % rank and step == 1:
                size = shape_of(x)[dim]
                groups.setdefault((x, dim % rank), []).append((low or 0, min(size, size if high is None else high), node))
    for (x, dim), cuts in groups.items():
        cuts.sort(key=lambda cut: cut[0])
        ends = [0, *(high for _, high, _ in cuts)]
        if [low for low, _, _ in cuts] == ends[:-1] and ends[-1] == shape_of(x)[dim] and len(cuts) > 1:
            _split(traced, x, dim, cuts)
    return traced


def narrow(traced: Traced) -> Traced:
    """split(a + b) becomes split(a) + split(b) where nothing else reads the sum: gates need no memory between them."""
    for node in reversed(list(traced.graph.nodes)):
        if node.op == "call_function" and expression(node) is not None and node.users and node not in traced.results():
            parts = [u for u in node.users if _cuts_last_dim(u)]
            if len(parts) == len(node.users):
                for part in parts:
                    _narrow(traced, node, part)
                traced.graph.erase_node(node)
    return clean(traced)


def _cuts_last_dim(node: fx.Node) -> bool:
    splits = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)
    if node.target not in splits:
        return False
    at = node.args[1] if node.target is aten.slice.Tensor else (node.args[2] if len(node.args) > 2 else 0)
    rank = len(shape_of(node.args[0]))
    return rank > 1 and at % rank == rank - 1


def _narrow(traced: Traced, node: fx.Node, part: fx.Node) -> None:
    """Apply a pointwise op to parts of its operands instead of taking parts of its value."""
    pieces = [part] if part.target is aten.slice.Tensor else list(part.users)
    for piece in pieces:
        with traced.graph.inserting_before(piece):
            args = fx.map_arg(node.args, lambda a, piece=piece: _same_part(traced, a, node, part, piece))
            new = traced.graph.call_function(node.target, args, node.kwargs)
        new.meta["val"] = piece.meta["val"]
        traced.replace(piece, new)
        traced.graph.erase_node(piece)
    if part not in pieces:
        traced.graph.erase_node(part)


def _same_part(traced: Traced, operand: fx.Node, node: fx.Node, part: fx.Node, piece: fx.Node) -> fx.Node:
    shape, width = shape_of(operand), shape_of(node)[-1]
    if not shape or shape[-1] != width or width == 1:
        return operand
    rank, value = len(shape), operand.meta["val"]
    args = (operand, rank - 1, *part.args[2:]) if part.target is aten.slice.Tensor else (operand, part.args[1], rank - 1)
    with value.fake_mode:
        seen = part.target(value, *args[1:])
    cut = _call(traced, part.target, args, like=seen)
    return cut if part is piece else _call(traced, operator.getitem, (cut, piece.args[1]), like=seen[piece.args[1]])


def hoist(functions: Mapping[str, Traced], states: dict[str, tuple[int, ...]]) -> None:
    """Move matmuls with a gathered state to where the state is scattered, as a new state."""
    moved: dict[tuple[str, int], str] = {}
    for function in functions.values():
        for node in [n for n in function.graph.nodes if n.op == "call_function" and n.target is aten.mm.default]:
            source = next((s for s, n in function.sources.items() if n is node.args[0] and s.role == "edge"), None)
            weight = _weight_of(function, node.args[1])
            if source is None or weight is None:
                continue
            key = source.name, id(function.weights[int(weight.name)])
            if key not in moved:
                moved[key] = f"{source.name}@{len(moved)}"
                states[moved[key]] = shape_of(node)[1:]
                for producer in (f for f in functions.values() if source.name in f.states):
                    _also_scatter(producer, source.name, moved[key], function, node)
            new = Source("edge", moved[key])
            if new not in function.sources:
                function.sources[new] = _placeholder_before(function, new, node)
            function.replace(node, function.sources[new])
    for function in functions.values():
        _refresh(function)


def _refresh(function: Traced) -> None:
    """Placeholders in graph order, results in the output node, nothing unused."""
    function.prune()
    for source in [s for s, n in function.sources.items() if s.role == "edge" and not n.users]:
        function.graph.erase_node(function.sources.pop(source))
    order = {n: i for i, n in enumerate(function.graph.nodes)}
    function.sources = dict(sorted(function.sources.items(), key=lambda item: order[item[1]]))


def _also_scatter(producer: Traced, state: str, new: str, function: Traced, node: fx.Node) -> None:
    """Append new = state @ (the weight of `node` in `function`) to a function that scatters `state`."""
    chain, at = [], node.args[1]
    while at.op != "placeholder":  # transposes of a weight
        chain.append(at)
        at = at.args[0]
    weight = function.weights[int(next(s.name for s, n in function.sources.items() if n is at))]
    end = next(n for n in producer.graph.nodes if n.op == "output")
    operand = _own_weight(producer, weight, at)
    with producer.graph.inserting_before(end):
        for link in reversed(chain):
            operand = _call(producer, link.target, (operand, *link.args[1:]), like=link.meta["val"])
        value = producer.states[state].meta["val"]
        with value.fake_mode:
            product = torch.empty((value.shape[0], *shape_of(node)[1:]), dtype=value.dtype, device=value.device)
        producer.states[new] = _call(producer, aten.mm.default, (producer.states[state], operand), like=product)


def _own_weight(producer: Traced, weight: torch.Tensor, like: fx.Node) -> fx.Node:
    """The placeholder of a weight in this function, made if need be."""
    for i, known in enumerate(producer.weights):
        if known is weight:
            return producer.sources[Source("weight", str(i))]
    source = Source("weight", str(len(producer.weights)))
    producer.weights.append(weight)
    producer.sources[source] = _placeholder_before(producer, source, like)
    return producer.sources[source]


def _placeholder_before(function: Traced, source: Source, like: fx.Node) -> fx.Node:
    with function.graph.inserting_before(next(iter(function.graph.nodes))):
        node = function.graph.placeholder(str(source).replace("@", "_at_"))
    node.meta["val"] = like.meta["val"]
    return node


def _call(function: Traced, target: Any, args: tuple[Any, ...], like: torch.Tensor) -> fx.Node:
    node = function.graph.call_function(target, args)
    node.meta["val"] = like
    return node


def _weight_of(function: Traced, node: fx.Node) -> Source | None:
    """The weight a node is a transpose of, if it is one."""
    while node.op == "call_function" and node.target in (aten.t.default, aten.transpose.int):
        node = node.args[0]
    return next((s for s, n in function.sources.items() if n is node and s.role == "weight"), None)


def _split(traced: Traced, x: fx.Node, dim: int, cuts: list[tuple[int, int, fx.Node]]) -> None:
    with traced.graph.inserting_after(x):
        parts = traced.graph.call_function(aten.split_with_sizes.default, (x, [b - a for a, b, _ in cuts], dim))
    parts.meta["val"] = [node.meta["val"] for _, _, node in cuts]
    for i, (_, _, node) in enumerate(cuts):
        with traced.graph.inserting_after(parts):
            item = traced.graph.call_function(operator.getitem, (parts, i))
        item.meta = dict(node.meta)
        traced.replace(node, item)


def _fold_zero(traced: Traced, node: fx.Node, zeros: set[fx.Node]) -> None:
    inputs = node.all_input_nodes
    zero = [n in zeros for n in inputs]
    if not any(zero):
        return
    if node.target in _ANY_ZERO or (node.target in _FIRST_ZERO and inputs[0] in zeros) or _all_zero(node, zeros):
        zeros.add(node)
    elif node.target in (aten.add.Tensor, aten.sub.Tensor):
        a, b = node.args
        other = b if a in zeros else a
        plain = isinstance(other, fx.Node) and (other is a or node.target is aten.add.Tensor) and not node.kwargs
        if plain:
            traced.replace(node, _widen(traced, other, node))


def _widen(traced: Traced, value: fx.Node, like: fx.Node) -> fx.Node:
    """`value` in the shape of `like`: a bias alone is still one row per vertex."""
    if shape_of(value) == shape_of(like):
        return value
    with traced.graph.inserting_before(like):
        return _call(traced, aten.expand.default, (value, list(shape_of(like))), like=like.meta["val"])


def _all_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    if node.target not in _ALL_ZERO:
        return False
    flat, _ = torch.utils._pytree.tree_flatten(node.args[: 1 if node.target in (aten.cat.default, aten.stack.default) else 2])
    return all(a in zeros or (not isinstance(a, fx.Node) and a == 0) for a in flat)


def _write_zero(traced: Traced, node: fx.Node) -> None:
    """A zero that something still reads becomes a constant."""
    value = node.meta["val"]
    users = [u for u in node.users if not (u.op == "call_function" and u.target is operator.getitem)]
    if not isinstance(value, torch.Tensor) or not (users or node in traced.results()):
        return
    after = node if node.op != "placeholder" else [n for n in traced.graph.nodes if n.op == "placeholder"][-1]
    with traced.graph.inserting_after(after):
        constant = traced.graph.call_function(aten.full.default, (list(value.shape), 0), {"dtype": value.dtype, "device": value.device})
    constant.meta["val"] = value
    traced.replace(node, constant)


def _same_as(node: fx.Node) -> fx.Node | None:
    """An earlier node with the same value, if it is plain to see."""
    first = node.args[0] if node.args else None
    if node.target is aten.mul.Tensor and node.args[1] in (1, 1.0) and not isinstance(node.args[1], fx.Node):
        return first if node.meta["val"].dtype == first.meta["val"].dtype else None
    if node.target is aten.t.default and first.op == "call_function" and first.target is aten.t.default:
        return first.args[0]
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default) and isinstance(first, fx.Node):
        return first if shape_of(first) == shape_of(node) else None
    return None


def _key(node: fx.Node) -> Any:
    """Equal keys, equal values; random ops are all different."""
    if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        return node
    return node.target, repr(node.args), repr(node.kwargs)
