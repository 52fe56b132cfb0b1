"""All expressions of a world up to a size, each run on every rank, grouped by what they denote and in which layout.

Larger expressions are built on one representative per group: the others follow by putting equals for equals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.core.errors import WeftError
from weft.core.node import Node, Type, apply
from weft.ops.registry import Kind
from weft.rewrite.discover.worlds import World
from weft.rewrite.pattern import Hole
from weft.rewrite.prove import ranks
from weft.rewrite.prove.domains import Field

Progress = Callable[[str], None]


@dataclass
class Universe:
    """Expressions by number. `args` are representatives; `rep` is the smallest expression of the group."""

    world: World
    form: list[int] = field(default_factory=list)  # index into world.forms, or -1 - leaf
    args: list[tuple[int, ...]] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    leaves: list[frozenset[int]] = field(default_factory=list)
    rep: list[int] = field(default_factory=list)
    comm: list[bool] = field(default_factory=list)
    type: list[Type] = field(default_factory=list)  # on the first mesh
    number: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    members: dict[int, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.form)

    def expr(self, t: int) -> Any:
        """The expression with holes for leaves."""
        if self.form[t] < 0:
            return Hole(self.world.leaves[-1 - self.form[t]].name)
        return self.world.forms[self.form[t]].call(*(self.expr(a) for a in self.args[t]))

    @cached_property
    def by_form(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for t, f in enumerate(self.form):
            found.setdefault(f, []).append(t)
        return found

    def pairs(self) -> list[tuple[int, int]]:
        """Every expression that is not a representative, with the one of its group, the smallest first."""
        found = [(t, r) for t, r in enumerate(self.rep) if t != r]
        return sorted(found, key=lambda p: (self.size[p[0]] + self.size[p[1]], p[0]))


class Enumerator:
    """Builds a universe level by level."""

    def __init__(self, world: World, max_ops: int, tell: Progress = lambda _: None) -> None:
        self.world, self.max_ops, self.tell = world, max_ops, tell
        self.domain = Field(seed=1)
        self.universe = Universe(world)
        self.nodes: list[list[Node]] = []  # per expression, one node per mesh
        self.results: list[list[Any]] = []
        self.groups: dict[bytes, int] = {}
        self.rank_of = {
            k: [j for j, other in enumerate(world.leaves) if other.kind == leaf.kind].index(k) for k, leaf in enumerate(world.leaves)
        }
        self.twins = {k: [j for j, other in enumerate(world.leaves) if other.kind == leaf.kind] for k, leaf in enumerate(world.leaves)}

    def run(self) -> Universe:
        for k, leaf in enumerate(self.world.leaves):
            nodes = [leaf.node(m) for m in self.world.meshes]
            self._keep(-1 - k, (), 0, frozenset({k}), nodes, [ranks.spread(self.domain, n) for n in nodes])
        for size in range(1, self.max_ops + 1):
            for f, args in self._candidates(size):
                self._try(f, args, size)
            self.tell(f"{self.world.name}: {len(self.universe)} expressions of up to {size} ops, {len(self.groups)} groups")
        return self.universe

    def _candidates(self, size: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        u = self.universe
        reps: dict[int, list[int]] = {}
        for t in range(len(u)):
            if u.rep[t] == t:
                reps.setdefault(u.size[t], []).append(t)
        for f, form in enumerate(self.world.forms):
            if form.arity == 1:
                yield from ((f, (t,)) for t in reps.get(size - 1, ()))
            else:
                for left in range(size):
                    yield from ((f, (a, b)) for a in reps.get(left, ()) for b in reps.get(size - 1 - left, ()))

    def _try(self, f: int, args: tuple[int, ...], size: int) -> None:
        u, form = self.universe, self.world.forms[f]
        leaves = frozenset().union(*(u.leaves[a] for a in args))
        if size == self.max_ops and not self._leading(leaves):
            return
        comm = form.op.kind is Kind.COMM or any(u.comm[a] for a in args)
        if self.world.moves and size == self.max_ops and size > 2 and not comm:
            return
        try:
            nodes = [
                apply(form.op, (*(self.nodes[a][k] for a in args), *form.fixed), dict(form.attrs)) for k in range(len(self.world.meshes))
            ]
            values = [ranks.run_node(self.domain, n, [self._value(a, k, n) for a in self._operands(args, n)]) for k, n in enumerate(nodes)]
        except (WeftError, IndexError):
            return
        self._keep(f, args, size, leaves, nodes, values)

    def _operands(self, args: tuple[int, ...], node: Node) -> list[int | Node]:
        return [*args, *node.args[len(args) :]]

    def _value(self, a: int | Node, k: int, node: Node) -> Any:
        return self.results[a][k] if isinstance(a, int) else ranks.run_node(self.domain, a, [])

    def _leading(self, leaves: frozenset[int]) -> bool:
        """Of interchangeable inputs the first ones are used; other choices are renamings."""
        return all(j in leaves for k in leaves for j in self.twins[k][: self.rank_of[k]])

    def _keep(self, f: int, args: tuple[int, ...], size: int, leaves: frozenset[int], nodes: list[Node], values: list[Any]) -> None:
        u = self.universe
        print_ = self._fingerprint(nodes, values)
        if print_ is None:
            return
        t = len(u)
        rep = self.groups.setdefault(print_, t)
        u.form.append(f)
        u.args.append(args)
        u.size.append(size)
        u.leaves.append(leaves)
        u.rep.append(rep)
        u.type.append(nodes[0].type)
        u.comm.append(f >= 0 and self.world.forms[f].op.kind is Kind.COMM or any(u.comm[a] for a in args))
        u.number[f, args] = t
        u.members.setdefault(rep, []).append(t)
        last = size == self.max_ops
        self.nodes.append([] if last else nodes)
        self.results.append([] if last else values)

    def _fingerprint(self, nodes: list[Node], results: list[Any]) -> bytes | None:
        """What is denoted and how it is laid out, on every mesh; None for a value that is zero whatever the inputs."""
        digest = hashlib.blake2b(digest_size=16)
        for node, values in zip(nodes, results, strict=True):
            full = ranks.denote(self.domain, values, node.type)
            if not bool(full.any()):
                return None
            digest.update(str(node.type).encode())
            digest.update(full.contiguous().numpy().tobytes())
        return digest.digest()
