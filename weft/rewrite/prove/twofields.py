"""exp and division, exactly: exponents live mod q, values mod p, with q a divisor of p - 1.

Let g have order q mod p. Then exp(x) = g^x mod p with x mod q obeys exp(x + y) = exp(x) exp(y), and nothing that real numbers do not.
A value after exp has no exponent of its own, so a second exp on the same way is a random table again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.core.errors import InvalidProgram
from weft.core.node import Node
from weft.core.program import Program
from weft.ops.pointwise import div, exp
from weft.rewrite.prove import ranks
from weft.rewrite.prove.domains import Codes, Field

Q = 1073741789
P = 2 * Q + 1  # both prime
G = 4  # a square, so its order is q


class Values(Field):
    """Numbers mod p; the exponents of the same program, run mod q before, are at hand."""

    def __init__(self, seed: int, exponents: Mapping[Node, Any]) -> None:
        super().__init__(seed, P)
        self.exponents = exponents

    def compute(self, node: Node, at: Mapping[str, int], args: list[Codes]) -> Codes:
        if node.op is exp:
            x = self.exponents[node.args[0]][node.mesh.rank(at)]
            return self._each(lambda v: pow(G, v, P), x)
        if node.op is div:
            return args[0] * self._each(lambda v: pow(v, -1, P) if v else 0, args[1]) % P
        return super().compute(node, at, args)

    def _each(self, f: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([f(v) for v in x.reshape(-1).tolist()], dtype=torch.int64).reshape(x.shape)


def speaks_of(program: Program) -> bool:
    """Whether a program has something for these fields to say."""
    return any(n.op in (exp, div) for n in program.nodes)


def equal(left: Program, right: Program, seed: int) -> bool:
    """Whether two programs give the same outputs, exponents mod q and values mod p."""
    exponents = ranks.run(Field(seed, Q), [n for p in (left, right) for _, n in p.outputs])
    domain = Values(seed, exponents)
    values = ranks.run(domain, [n for p in (left, right) for _, n in p.outputs])
    for name, a in left.outputs:
        b = right.output_names[name]
        try:
            x, y = (ranks.denote(domain, values[n], n.type) for n in (a, b))
        except InvalidProgram:
            return False
        if not torch.equal(x, y):
            return False
    return True
