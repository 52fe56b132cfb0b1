"""Matmuls in 8-bit floats: the one transform that changes values, each matmul by at most `ops.low.ROUNDING` of its terms.

It comes after all that is proved equal. A matmul of two matrices, forward or backward, is rewritten where its sizes are multiples of 16;
parameters, their updates and everything between matmuls stay in the dtypes they have. So do matmuls next to a loss over classes: the gradient
of a softmax spans more decades than 8 bits have.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import suppress

from weft.core.errors import LayoutError, TypeMismatch
from weft.core.layout import P
from weft.core.node import Node, with_operands
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.loss import cross_entropy_op
from weft.ops.low import BLOCK, block_matmul, scaled_matmul
from weft.ops.pointwise import add, cast
from weft.ops.registry import Kind, equation_of
from weft.ops.shape import narrow_op, optimization_barrier
from weft.plan.place import rebuilt

EVEN = 16  # sizes that matmuls of 8-bit floats take are multiples of this
LOW = {"fp8": "row", "fp8-block": "block", "fp8-tensor": "tensor"}  # kinds of 8-bit matmuls, and what has a scale of its own


def low_precision(p: Program, spared: Collection[str] = (), low: str = "fp8") -> Program:
    """The placed program with its matmuls in 8 bits, but for those of the parameters that are spared. A scale for every row or tensor or,
    with `fp8-block`, for every block of 128, where what is summed and its shards are multiples of blocks."""
    scaled = LOW[low]
    kept, loss = _of_heads(p, spared), p.output_names.get("loss")
    forward = p.needs(loss) if loss is not None else set()  # gradients are summed in float32: over all tokens, fewer digits lose what is small

    def node(n: Node, args: tuple[Node, ...]) -> Node:
        equation = _plain(n) if n not in kept else ""
        if not equation:
            return with_operands(n, args)
        found = _in_blocks(equation, n, args) if scaled == "block" else None
        return found if found is not None else scaled_matmul(equation, args[0], args[1], n.dtype, fast=n in forward, by_row=scaled != "tensor")  # type: ignore[no-any-return]

    return rebuilt(p, node)


def _in_blocks(equation: str, n: Node, args: tuple[Node, ...]) -> Node | None:
    """None where what is summed is no entire blocks, on all ranks together or on one. A weight whose other dim is none has blocks of 1 x 128."""
    left, out = equation.split("->")
    a, b = left.split(",")
    summed = [c for c in a if c in b and c not in out][-1]
    if args[0].shape[a.index(summed)] % BLOCK:
        return None
    square = tuple(
        _base(v).role is Role.PARAMETER and v.shape[[i for i, c in enumerate(labels) if c in out][-1]] % BLOCK == 0
        for v, labels in zip(n.args, (a, b), strict=True)
    )
    for weights in dict.fromkeys(((square[0], square[1]), (False, False))):
        with suppress(LayoutError, TypeMismatch):
            made = block_matmul(equation, args[0], args[1], n.dtype, weights)
            if made.types == n.types:
                return made  # type: ignore[no-any-return]
    return None


def heads(p: Program) -> frozenset[str]:
    """The parameters whose matmul a loss over classes reads, whatever is added, cast or narrowed in between; of a program that is not placed yet."""
    matmuls = {x for n in p.nodes if n.op is cross_entropy_op for x in _ahead_of(n.args[0])}
    bases = {_base(a) for x in matmuls for a in x.args}
    return frozenset(n.attr("name") for n in bases if n.op.is_input and n.role is Role.PARAMETER)


def _ahead_of(n: Node) -> set[Node]:
    """The matmuls that a value is but for what is added, cast or narrowed; each value is looked at once."""
    found, seen, waiting = set[Node](), {n}, [n]
    while waiting:
        n = waiting.pop()
        if n.op.kind is Kind.CONTRACT:
            found.add(n)
        elif n.op.kind is Kind.VIEW or n.op in (add, cast, narrow_op):
            waiting += (new := set(n.args) - seen)
            seen |= new
    return found


def _base(n: Node) -> Node:
    """What a value is but for its dtype, shape and layout."""
    while len(n.args) == 1 and len(n.types) == 1 and (n.op.kind in (Kind.VIEW, Kind.COMM) or n.op.is_cast):
        n = n.args[0] if n.args[0].op is not optimization_barrier else n.args[0].args[n.attr("index")]  # a second gather of it waits for another value
    return n


def _of_heads(p: Program, names: Collection[str]) -> set[Node]:
    """The matmuls of these parameters, forward and backward, and those of what they were multiplied with: their gradients."""
    matmuls = {n: [_base(a) for a in n.args] for n in p.nodes if n.op.kind is Kind.CONTRACT}
    own = {n for n, of in matmuls.items() if any(a.op.is_input and a.attr("name") in names for a in of)}
    partners = {a for n in own for a in matmuls[n] if not a.op.is_input or a.attr("name") not in names}
    return own | {n for n, of in matmuls.items() if not partners.isdisjoint(of)}


def _plain(n: Node) -> str:
    """The equation of a matmul of two matrices, which has no batch of its own, in letters; nothing for other nodes."""
    eq = equation_of(n)
    if n.op.kind is not Kind.CONTRACT or len(n.args) != 2 or eq is None or not n.dtype.is_floating_point or n.args[0].dtype != n.args[1].dtype:
        return ""
    letter = {x: chr(97 + i) for i, x in enumerate(dict.fromkeys(x for labels in eq.ins for x in labels))}
    x, y, out = ("".join(letter[c] for c in labels) for labels in (*eq.ins, eq.outs[0]))
    summed = [c for c in x if c not in out]
    left, right = ([c for c in labels if c in out] for labels in (x, y))
    matrices = left and right and summed and not set(left) & set(right) and set(summed) == {c for c in y if c not in out}
    in_order = left == [c for c in out if c in left] and right == [c for c in out if c in right]
    if not matrices or not in_order or any(isinstance(place, P) for a in n.args for _, place in a.layout.partials):
        return ""
    size = {c: n for labels, a in zip((x, y), n.args, strict=True) for c, n in zip(labels, a.shape, strict=True)}
    even = all(math.prod(size[c] for c in part) % EVEN == 0 for part in (left, right, summed))
    return f"{x},{y}->{out}" if even else ""
