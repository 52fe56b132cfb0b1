"""Ways of a node: every node has at least one, however many layouts its operands can come in."""

from __future__ import annotations

import itertools

from weft import lang as w
from weft.core.layout import Mesh, R, S
from weft.frontend.trace import f64, trace
from weft.plan.layouts.strategies import Strategies


def test_many_operands_that_come_cut_where_they_are_joined() -> None:
    """The first so many combinations all cut the joined dim of the first operand, which no rule takes."""
    shapes = {"a": f64(4, 8, 4, 4), "b": f64(4, 8, 4, 4), "c": f64(4, 8, 4, 4)}
    p = trace(lambda a, b, c: {"y": w.concat([a, b, c], 1)}, Mesh(dp=1), name="joined", **shapes)
    node = p.output_names["y"]
    cut = [layout for layout in itertools.product(*([R, S(0), S(1), S(2), S(3)],) * 2) if S(1) in layout]
    found = Strategies(Mesh(dp=2, tp=2)).of_node(node, [False] * 3, [cut, [*cut] * 4, [*cut] * 8])
    results = {way.results[0] for way in found}
    assert (R, R) in results
    assert all(S(1) not in layout for layout in results)
