"""Numbers in Python that become inputs of a program: which may, and the program with values put in their place again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.core.node import Node, constant, with_operands
from weft.core.program import Program
from weft.frontend.capture.places import Change, is_number
from weft.ops.pointwise import add, mul


def may_lift(c: Change) -> bool:
    return is_number(c.before) and type(c.before) is type(c.now) and (c.place is not None or c.words.endswith(" of the batch"))


def filled_in(program: Program, values: Mapping[str, float]) -> dict[str, Node]:
    """The outputs where inputs are these numbers, and what follows from numbers alone is computed, as Python would have."""
    made: dict[Node, Node] = {}
    for n in program.nodes:
        if n.op.is_input and n.attr("name") in values:
            made[n] = constant(values[n.attr("name")], n.dtype, n.mesh)
            continue
        args = tuple(made[a] for a in n.args)
        if n.args and all(a.op.is_number for a in args) and n.shape == () and len(n.types) == 1:
            made[n] = _computed(n, args)
        else:
            args = args[::-1] if n.op in (add, mul) and args[0].op.is_number else args
            made[n] = with_operands(n, args)
    return {name: made[n] for name, n in program.outputs}


def _computed(n: Node, args: tuple[Node, ...]) -> Node:
    if n.op.is_cast:
        return constant(args[0].attr("value"), n.dtype, n.mesh)
    wide = [torch.tensor(a.attr("value"), dtype=torch.float64 if a.dtype.is_floating_point else a.dtype) for a in args]
    return constant(n.op.run(*wide, **dict(n.attrs)).item(), n.dtype, n.mesh)
