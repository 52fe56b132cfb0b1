"""Compositions people write out by hand, seen as they are made and kept as one op: rotary embedding, RMS norm, experts.

A match looks at nodes, not at names, so it finds them in any model. What it replaces computes the same number; in half
precision an RMS norm is rounded once instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.core.node import Node, Op
from weft.frontend.capture.experts import apply
from weft.frontend.capture.recorder import Recorder
from weft.ops.embed import take_op
from weft.ops.experts import ACTIVATIONS
from weft.ops.linalg import einsum_op
from weft.ops.norm import rms_norm
from weft.ops.pointwise import add, cast, mul, neg, rsqrt
from weft.ops.pointwise import square as square_op
from weft.ops.reduce import sum_
from weft.ops.registry import Kind
from weft.ops.rotary import rope
from weft.ops.shape import concat_op, narrow_op, permute, reshape_op


def improved(r: Recorder, node: Node) -> Node:
    """The node, or the one op that it finishes."""
    if node.op is einsum_op:
        return _experts(r, node) or node
    if node.op is add:
        return _rope(r, node) or node
    return _rms_norm(node) or node if node.op is mul else node


def _either(node: Node, op: Op) -> Iterator[tuple[Node, Node]]:
    """Both orders of a binary node of that op."""
    if node.op is op:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


# -- x cos + (-x2, x1) sin ---------------------------------------------------------------------------------------------


def _rope(r: Recorder, node: Node) -> Node | None:
    for straight, crossed in _either(node, add):
        for swapped, sin in _either(crossed, mul):
            x = _swapped_halves(swapped)
            for same, cos in _either(straight, mul) if x is not None else ():
                if same is x and not r.moves(cos) and not r.moves(sin) and cos.shape == sin.shape and x.shape == node.shape:
                    return rope(x, cos, sin)
    return None


def _swapped_halves(node: Node) -> Node | None:
    """x, where the node is (-x2, x1) along the last dim."""
    if node.op is not concat_op or len(node.args) != 2 or node.attr("dim") != node.ndim - 1:
        return None
    left, right = node.args
    if left.op is not neg:
        return None
    (a, first), (b, second) = _half(left.args[0]), _half(right)
    return a if a is not None and a is b and (first, second) == (1, 0) else None


def _half(node: Node) -> tuple[Node | None, int]:
    """Which half of the last dim of which tensor it is; a slice, or a part of that dim split in two."""
    if node.op is reshape_op:
        node, split = node.args[0], True
    else:
        split = False
    if node.op is not narrow_op:
        return None, -1
    x, dim, start, stop = node.args[0], node.attr("dim"), node.attr("start"), node.attr("stop")
    if split:
        full = x.args[0] if x.op is reshape_op else None
        fits = full is not None and dim == x.ndim - 2 and x.shape[dim] == 2 and full.shape[:-1] == x.shape[:-2]
        return (full, start) if fits and stop == start + 1 else (None, -1)
    size = x.shape[dim]
    fits = dim == x.ndim - 1 and 2 * (stop - start) == size and node.attr("step") == 1
    return (x, int(start > 0)) if fits else (None, -1)


# -- weight * x / sqrt(mean(x^2) + eps) --------------------------------------------------------------------------------


def _rms_norm(node: Node) -> Node | None:
    for scaled, weight in _either(node, mul):
        found = _unweighted(_uncast(scaled)) if weight.ndim == 1 and weight.shape == scaled.shape[-1:] else None
        if found is not None and found[0].dtype == weight.dtype == node.dtype:
            return rms_norm(found[0], weight, found[1])
    return None


def _unweighted(node: Node) -> tuple[Node, float] | None:
    """(x, eps), where the node is x * rsqrt(mean(x^2) + eps) over the last dim."""
    for x, root in _either(node, mul):
        if root.op is rsqrt:
            for square, eps in _either(root.args[0], add):
                if eps.op.is_number and _mean_square(square) is x:
                    inside = _uncast(x)
                    return (inside, float(eps.attr("value"))) if inside.dtype.itemsize <= x.dtype.itemsize else None
    return None


def _mean_square(node: Node) -> Node | None:
    """x, where the node is the mean of x^2 over the last dim, that dim kept."""
    for total, share in _either(node, mul):
        if share.op.is_number and total.op is sum_ and total.attr("keepdim"):
            square = total.args[0]
            full = total.attr("dims") == (square.ndim - 1,) and abs(share.attr("value") * square.shape[-1] - 1) < 1e-6
            if full and square.op is square_op:
                return square.args[0]
    return None


def _uncast(node: Node) -> Node:
    return node.args[0] if node.op.is_cast and node.args[0].dtype.is_floating_point else node


# -- sum over k of weights[t, k] down[e] (act(gate[e] x[t]) up[e] x[t]), where e = picks[t, k] -------------------------------


def _experts(r: Recorder, node: Node) -> Node | None:
    """Experts gathered for each token; their stacks may have their dims in any order."""
    ins, out = _labels(node)
    given = {len(labels): (labels, arg) for labels, arg in zip(ins, node.args, strict=True)}
    if len(ins) != 3 or sorted(given) != [2, 3, 4]:
        return None
    (tk, weights), (tkf, y), (labels, taken) = given[2], given[3], given[4]
    d, f = out[1:], tkf[2:]
    if (tkf[:2], out[:1]) != (tk, tk[0]) or not (found := _stack(taken, labels, tk, d + f)):
        return None
    down, picks = found
    for up, gate, act in _activated(y):
        parts = [_of_picks(p, picks) for p in (up, gate) if p is not None]
        if all(parts) and len({p[0] for p in parts if p}) == 1:
            (x, first), *second = [p for p in parts if p]
            return apply(r, x, picks, weights, first, down, second[0][1] if second else None, act)
    return None


def _labels(node: Node) -> tuple[list[str], str]:
    left, _, right = node.attr("equation").partition("->")
    return left.split(","), right


def _stack(node: Node, labels: str, tk: str, order: str) -> tuple[Node, Node] | None:
    """(weights [e, *order], picks), where the node is the matrices of every pick."""
    taken = node.args[0] if node.op.is_cast else node
    if taken.op is not take_op or taken.attr("dim") != 0 or taken.args[1].ndim != 2 or sorted(labels) != sorted(tk + order) or labels[:2] != tk:
        return None
    stack = taken.args[0] if taken is node else cast(taken.args[0], dtype=node.attr("dtype"))
    return (stack if labels[2:] == order else permute(stack, (0, 2, 1))), taken.args[1]


def _of_picks(node: Node, picks: Node) -> tuple[Node, Node] | None:
    """(x, weights [e, f, d]), where the node is each token times the matrices of its picks."""
    ins, out = _labels(node) if node.op is einsum_op else ([], "")
    for x, taken in ((0, 1), (1, 0)) if len(ins) == 2 and len(out) == 3 else ():
        if len(ins[x]) == 2 and ins[x][0] == out[0]:
            found = _stack(node.args[taken], ins[taken], out[:2], out[2] + ins[x][1])
            if found and found[1] is picks:
                return node.args[x], found[0]
    return None


def _is_of(y: Node, act: Callable[[Node], Node]) -> bool:
    return y.op.kind is Kind.POINTWISE and len(y.args) == 1 and y.args[0].dtype.is_floating_point and act(y.args[0]) is y


def _activated(y: Node) -> Iterator[tuple[Node, Node | None, str]]:
    """(up, gate, activation) of act(gate) * up, (up, None, activation) of act(up)."""
    for name, (_, make) in ACTIVATIONS.items():
        if _is_of(y, make):
            yield y.args[0], None, name
        for gate, up in _either(y, mul):
            if _is_of(gate, make):
                yield up, gate.args[0], name
