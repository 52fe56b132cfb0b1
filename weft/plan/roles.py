"""What each node of a training step is for: forward, backward or update.

An update is the op whose result becomes a parameter's next value. A value is *given* when it is made of state alone: bringing it to
another layout may begin before the step needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.comm import is_comm


@dataclass(frozen=True, eq=False)
class Roles:
    """Roles of the nodes of one program, placed on a mesh or not."""

    program: Program

    @cached_property
    def forward(self) -> set[Node]:
        """What the loss needs; everything, where there is no loss."""
        p = self.program
        return p.needs(p.output_names["loss"]) if "loss" in p.output_names else set(p.nodes)

    @cached_property
    def updates(self) -> frozenset[Node]:
        """Ops that make the next value of a parameter."""
        params = self.program.inputs_for(Role.PARAMETER)
        names = {o for o, i in self.program.state if i in params}
        made = (_source(n) for name, n in self.program.outputs if name in names)
        return frozenset(n for n in made if n not in self.program.input_set)

    @cached_property
    def after(self) -> frozenset[Node]:
        """Updates and all that follows from them: run once a step."""
        found = set(self.updates)
        for n in self.program.nodes:
            if any(a in found for a in n.args):
                found.add(n)
        return frozenset(found)

    @cached_property
    def given(self) -> frozenset[Node]:
        """Values that depend on state alone."""
        state = {i for _, i in self.program.state}
        found = {n for name, n in self.program.input_names.items() if name in state}
        for n in self.program.nodes:
            if n.args and n not in self.after and all(a in found for a in n.args):
                found.add(n)
        return frozenset(found)


def _source(node: Node) -> Node:
    while node.args and (is_comm(node) or node.op.is_item):
        node = node.args[0]
    return node
