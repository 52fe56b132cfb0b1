"""Exact simplifications of a vertex function's program.

`specialise` writes in that some inputs are absent: a vertex without children gathers zeros, zero times a weight is zero, and so
the leaves of a tree lose their recurrent matmul. `hoist` moves a matmul with a gathered state to the vertices that scatter
it: gather(h) @ W = gather(h @ W), which then needs no copy of h per edge and is done once per vertex, not once per edge. A type
that does not scatter h scatters zeros, before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from weft.core.layout import P
from weft.core.node import Node, Type, make, remade, toposort, with_operands
from weft.core.role import Role
from weft.dynamic.trace import Shape, VertexProgram, input_name, output_name
from weft.dynamic.vertex import Source
from weft.ops.fill import full, zeros_like
from weft.ops.linalg import einsum, einsum_op, matmul
from weft.ops.pointwise import add, dropout_op, neg, sub
from weft.ops.registry import Kind, arg_sets
from weft.ops.segment import segment_max_op
from weft.ops.shape import concat, expand_like, narrow, narrow_op, pad_op, permute_op, reshape_op
from weft.ops.source import input_node


def specialise(f: VertexProgram, absent: Iterable[Source]) -> VertexProgram:
    """The function where the sources in `absent` are known to be zero."""
    gone = {f.inputs[s] for s in absent if s in f.inputs}
    if not gone:
        return f
    zeros, made = set(gone), dict[Node, Node]()
    for n in toposort(node for _, node in f.program.outputs):
        if n in gone or _is_zero(n, zeros):
            zeros.add(n)
            made[n] = zeros_like(n)
        elif n.op in (add, sub) and (rest := _without(n, zeros, made)) is not None:
            made[n] = rest
        else:
            made[n] = with_operands(n, tuple(made[a] for a in n.args))
    return f.with_outputs([(name, made[n]) for name, n in f.program.outputs], "without what is absent")


def _is_zero(n: Node, zeros: set[Node]) -> bool:
    """Whether an op gives zeros: linear in operands that are all zero, or by its meaning where it is elementwise."""
    zero = frozenset(i for i, a in enumerate(n.args) if a in zeros)
    if not zero or len(n.types) > 1:
        return False
    if any(part <= zero for part in arg_sets(n.op.linear, len(n.args))) or n.op.kind is Kind.COMM or n.op is segment_max_op:
        return 0 in zero or n.op is not segment_max_op
    rest = [a for i, a in enumerate(n.args) if i not in zero]
    if n.op.kind is not Kind.POINTWISE or n.dtype is torch.bool or any(not a.op.is_number for a in rest):
        return False
    args = [torch.zeros((), dtype=a.dtype) if a in zeros else torch.tensor(a.attr("value"), dtype=a.dtype) for a in n.args]
    return bool(n.op.run(*args, **dict(n.attrs)) == 0)


def _without(n: Node, zeros: set[Node], made: Mapping[Node, Node]) -> Node | None:
    """The other operand of a sum with zero, in the shape of the sum: a bias alone is still one row per vertex."""
    a, b = n.args
    if a in zeros:
        return _wide(made[b] if n.op is add else neg(made[b]), n)
    return _wide(made[a], n) if b in zeros else None


def _wide(x: Node, like: Node) -> Node:
    return x if x.shape == like.shape else expand_like(x, like)  # type: ignore[no-any-return]


def clean(f: VertexProgram) -> VertexProgram:
    """Gradients of parts of a value put side by side, those of weights made as they lie, pointwise ops done in parts where only parts are read."""
    return _narrowed(_transposed(_joined(f)))


def _transposed(f: VertexProgram) -> VertexProgram:
    """(x' y)' is y' x, which lies in memory as the weight does that it is the gradient of."""
    swap: dict[Node, Node] = {}
    for n in f.program.find_all("permute", lambda n: n.attr("order") == (1, 0)):
        (gemm,) = n.args
        if gemm.op is einsum_op and f.program.users[gemm] == (n,) and not f.program.outputs_of(gemm):
            ins, out = gemm.attr("equation").split("->")
            swap[n] = einsum(f"{ins}->{out[::-1]}", *gemm.args)
    return f.with_nodes(swap, "gradients as weights lie") if swap else f


def _joined(f: VertexProgram) -> VertexProgram:
    """pad(a) + pad(b), which tile a dim, is concat(a, b)."""
    swap: dict[Node, Node] = {}
    inner = {a for n in f.program.nodes if n.op is add for a in n.args if a.op is add and len(f.program.users[a]) == 1}
    results = {n for _, n in f.program.outputs}
    for n in f.program.nodes:
        if n.op is add and (n not in inner or n in results):
            terms = list(_terms(n, inner - results))
            pads = [t for t in terms if t.op is pad_op and t.shape == n.shape]
            dims = {t.attr("dim") for t in pads}
            joined = _side_by_side(sorted(pads, key=lambda t: t.attr("before")), dims.pop()) if len(pads) > 1 and len(dims) == 1 else None
            if joined is not None:
                total = joined
                for t in terms:
                    total = total if t in pads else add(total, t)
                swap[n] = remade([total], swap)[total]
    return f.with_nodes(swap, "parts side by side") if swap else f


def _terms(n: Node, inner: set[Node]) -> Iterable[Node]:
    for a in n.args:
        if a in inner:
            yield from _terms(a, inner)
        else:
            yield a


def _side_by_side(pads: list[Node], dim: int) -> Node | None:
    """The parts that pads put zeros around, with zeros between them; None where they overlap."""
    parts, at = list[Node](), 0
    for n in pads:
        before, part = n.attr("before"), n.args[0]
        if before < at:
            return None
        if before > at:
            parts += _gap(part, dim, before - at)
        parts.append(part)
        at = before + part.shape[dim]
    rest = pads[0].shape[dim] - at
    return concat([*parts, *(_gap(parts[0], dim, rest) if rest else [])], dim)  # type: ignore[no-any-return]


def _gap(like: Node, dim: int, size: int) -> list[Node]:
    """Zeros next to a part, in parts as wide where they can be."""
    wide = like.shape[dim] if size % like.shape[dim] == 0 else size
    return [full((*like.shape[:dim], wide, *like.shape[dim + 1 :]), 0.0, like.mesh, like.dtype)] * (size // wide)


def _narrowed(f: VertexProgram) -> VertexProgram:
    """narrow(a + b) becomes narrow(a) + narrow(b) where nothing else reads the sum: gates need no memory between them."""
    while True:
        users, results = f.program.users, {n for _, n in f.program.outputs}
        swap: dict[Node, Node] = {}
        for n in reversed(f.program.nodes):
            alone = n.op.kind is Kind.POINTWISE and users[n] and n not in results and n.op is not dropout_op
            if alone and all(u.op is narrow_op and u.attr("dim") == n.ndim - 1 > 0 for u in users[n]):
                swap |= {u: with_operands(n, tuple(_part(a, n, u) for a in n.args)) for u in users[n]}
        if not swap:
            return f
        f = f.with_nodes(swap, "pointwise ops in parts")


def _part(operand: Node, full: Node, part: Node) -> Node:
    if not operand.ndim or operand.shape[-1] != full.shape[-1] or full.shape[-1] == 1:
        return operand
    return narrow(operand, operand.ndim - 1, part.attr("start"), part.attr("stop"), part.attr("step"))  # type: ignore[no-any-return]


# -- matmuls with gathered states ------------------------------------------------------------------------------------------------------


def hoist(functions: Mapping[str, VertexProgram], states: dict[str, Shape]) -> dict[str, VertexProgram]:
    """Move matmuls with a gathered state to where the state is scattered, as a new state."""
    out, moved = dict(functions), dict[Any, str]()
    for name in functions:
        for node in functions[name].program.find_all("matmul"):
            f = out[name]
            x, matrix = node.args
            source = f.sources.get(x.attr("name", "")) if x.op.is_input else None
            chain = _of_weight(f, matrix)
            if source is None or source.role != "edge" or chain is None or any(isinstance(p, P) for _, p in node.layout.partials):
                continue
            key = source.name, *((id(w) if isinstance(w, torch.Tensor) else (w.op, w.attrs)) for w in chain)
            if key not in moved:
                moved[key] = f"{source.name}@{len(moved)}"
                states[moved[key]] = tuple(node.layout.local_shape(f.at)[1:] if f.at is not None else node.shape[1:])
                for k, producer in out.items():
                    if source.name in producer.states.values():
                        out[k] = _also_scatter(producer, source.name, moved[key], chain, matrix)
            new = Source("edge", moved[key])
            read = input_node(input_name(new), node.type, Role.BATCH)
            f = replace(out[name], sources={**out[name].sources, input_name(new): new})
            out[name] = f.with_nodes({node: read}, "hoisted")
    return out


def _of_weight(f: VertexProgram, matrix: Node) -> list[Any] | None:
    """The weight that a matrix is a view of, and the views to it; None if it is none."""
    views: list[Any] = []
    while matrix.op in (permute_op, reshape_op):
        views.append(matrix)
        matrix = matrix.args[0]
    weight = f.weight_at(matrix)
    return None if weight is None else [weight, *reversed(views)]


def _also_scatter(producer: VertexProgram, state: str, new: str, chain: list[Any], matrix: Node) -> VertexProgram:
    """The state times the weight, as a state too."""
    weight, *views = chain
    name = next((n for n, w in producer.weights.items() if w is weight), f"param.weight{len(producer.weights)}")
    base = matrix
    while not base.op.is_input:
        base = base.args[0]
    operand = producer.program.input_names.get(name) or input_node(name, Type(base.dtype, base.layout), Role.PARAMETER)
    for view in views:
        operand = make(view.op, (operand,), dict(view.attrs))
    gemm, output = matmul(producer.scattered[state], operand), output_name("state", new)
    return producer.with_outputs(
        [*producer.program.outputs, (output, gemm)],
        "hoisted",
        weights={**producer.weights, name: weight},
        states={**producer.states, output: new},
    )
