"""Prices that published planners are compared under: communication alone, by an affine law for each axis of the mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.core.layout import Mesh, R
from weft.core.node import Node
from weft.cost.work import Op
from weft.ops.registry import Kind, flops
from weft.plan.layouts import Reshard

MANY = 16  # operations per element from which an op is more work than moving what it works on


@dataclass(frozen=True)
class AlphaBeta:
    """Communication alone: a + b * bytes on the wire, by axis, with a little more for what should lose ties.

    Work is free, but no product may be done twice: every axis must cut it, or hold a term of it. Some kinds of collectives may be banned.
    """

    mesh: Mesh
    alpha: Mapping[str, float]
    beta: Mapping[str, float]
    banned: frozenset[str] = frozenset()
    chained: bool = True

    def on(self, mesh: Mesh) -> AlphaBeta:
        return AlphaBeta(mesh, self.alpha, self.beta, self.banned)

    def move(self, move: Reshard) -> float:
        n = self.mesh.sizes[move.axis]
        if move.kind == "slice" or n == 1:
            return 0.0
        if move.kind in self.banned:
            return math.inf
        share, extra = {
            "all_reduce": (2 * (n - 1) / n, 0.01),
            "all_gather": ((n - 1) / n, 0.1),
            "reduce_scatter": ((n - 1) / n, 0.001),
            "all_to_all": ((n - 1) / 2, 0.001),  # of a rank's part, on links that half the ranks share
        }[move.kind]
        return self.alpha[move.axis] + self.beta[move.axis] * share * move.size + extra

    def work(self, ops: Sequence[Op], node: Node) -> float:
        idle = (a for a, n in self.mesh.sizes.items() if n > 1 and all(arg.type.on(a) == R for arg in node.args))
        return math.inf if _multiplies(node) and any(True for _ in idle) else 0.0


def _multiplies(node: Node) -> bool:
    """A product or a convolution, or a larger op that is made of products: it does much more than touch each element."""
    if node.op.name.startswith("conv"):
        return True
    if node.op.kind is Kind.COMPOSITE:
        return flops(node) > MANY * sum(math.prod(x.shape) for x in (*(a.type for a in node.args), *node.types))
    return node.op.kind is Kind.CONTRACT
