"""Matmuls in 8-bit floats: the one transform that changes values, each matmul by at most `ops.low.ROUNDING` of its terms.

It comes after all that is proved equal. A matmul of two matrices, forward or backward, is rewritten where its sizes are multiples of 16;
parameters, their updates and everything between matmuls stay in the dtypes they have.
"""

from __future__ import annotations

import math

from weft.core.layout import P
from weft.core.node import Node, make
from weft.core.program import Program
from weft.ops.low import scaled_product
from weft.ops.registry import Kind, equation_of
from weft.plan.place import remake

EVEN = 16  # sizes that matmuls of 8-bit floats take are multiples of this


def low_precision(p: Program) -> Program:
    """The placed program with its matmuls in 8 bits."""
    made: dict[Node, Node] = {}

    def node(n: Node) -> Node:
        args = tuple(made[a] for a in n.args)
        equation = _plain(n)
        return scaled_product(equation, args[0], args[1], n.dtype) if equation else make(n.op, args, dict(n.attrs))  # type: ignore[no-any-return]

    def same(n: Node) -> Node:
        made[n] = n
        return n

    return remake(p, p.mesh, made, same, node, lambda name, n, state: made[n])


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
    if not matrices or not in_order or any(isinstance(place, P) for a in n.args for _, place in a.layout.held):
        return ""
    size = {c: n for labels, a in zip((x, y), n.args, strict=True) for c, n in zip(labels, a.shape, strict=True)}
    even = all(math.prod(size[c] for c in part) % EVEN == 0 for part in (left, right, summed))
    return f"{x},{y}->{out}" if even else ""
