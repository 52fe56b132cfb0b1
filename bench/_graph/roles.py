"""What each collective of a training step carries, and in which order its nodes run. A *gradient* collective is one that only updates wait for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.core.node import Node
from weft.ops.comm import is_comm
from weft.ops.registry import Kind
from weft.plan.roles import Roles

PARAMS, GRADS, SPREAD, VALUES = "params", "grads", "spread", "values"


@dataclass(frozen=True, eq=False)
class RunRoles(Roles):
    """Roles of the nodes of one program, when they run and what is sent."""

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
