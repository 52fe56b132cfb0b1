"""What each node of a training step is for: forward, backward or update, and what each collective carries.

An update is the op whose result becomes a parameter's next value. A value is *given* when it is made of state alone: bringing it to
another layout may begin before the step needs it. A *gradient* collective is one that only updates wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.core.node import Node
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.comm import is_comm
from weft.ops.registry import Kind

PARAMS, GRADS, SPREAD, VALUES = "params", "grads", "spread", "values"


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

    @cached_property
    def only_updates(self) -> frozenset[Node]:
        """Collectives and views of gradients, read by updates and by nothing else."""
        found: set[Node] = set()
        outputs = {n for _, n in self.program.outputs}
        for n in reversed(self.program.nodes):
            users = self.program.users[n]
            passes = is_comm(n) or n.op.kind is Kind.VIEW or n.op.is_cast
            if passes and users and n not in outputs and all(u in self.updates or u in found for u in users):
                found.add(n)
        return frozenset(found - self.given)

    def carried(self, node: Node) -> str:
        """What a collective is for."""
        if node in self.after:
            return SPREAD
        if node in self.given:
            return PARAMS
        return GRADS if node in self.only_updates else VALUES

    @cached_property
    def order(self) -> list[Node]:
        """Compute in the order it runs: forward as written, backward by how far the gradient has come, updates last."""
        far: dict[Node, int] = {}
        for n in self.program.nodes:
            far[n] = 0 if n in self.forward else 1 + max((far[a] for a in n.args), default=0)
        place = {n: i for i, n in enumerate(self.program.nodes)}
        return sorted((n for n in self.program.nodes if n.args), key=lambda n: (self._phase(n), far[n], place[n]))

    def _phase(self, node: Node) -> int:
        return 0 if node in self.forward else 2 if node in self.after else 1


def _source(node: Node) -> Node:
    while node.args and (is_comm(node) or node.op.is_item):
        node = node.args[0]
    return node
