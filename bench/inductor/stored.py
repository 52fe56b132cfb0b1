"""What a compiled graph holds while it runs: which of its values are stored, and by which kernel, as Inductor has it.

A value that only fused kernels and sums read is computed anew by each of them, unless it is made of many tensors (`READS`). Kernels that read the
same are joined (`beside`); those are finer cuts than time is counted by, whose constants were read off without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch.fx import Node

from bench.inductor import beside
from bench.inductor.held import Buffer, Kernel, Plan
from bench.inductor.observe import passing
from bench.inductor.torch_graph import Graph, in_order
from bench.inductor.torch_ops import alone, bytes_of, inner, name_of, over_rows, pads, puts, summed, turns, values_of

NOT_OURS = ("primals", "arg")  # given to a graph by those who keep them
READS, READS_ONCE = 4, 8  # tensors a value may be made of and not be stored: one read by several, and one read by one


@dataclass(frozen=True)
class Stored(Graph):
    """A graph cut into kernels, as its memory is counted."""

    accelerator: bool = False

    @cached_property
    def groups(self) -> list[list[Node]]:
        """Kernels in order: one node, or several that fuse. What is computed anew by all who read it is none."""
        rank = {n.name: i for i, n in enumerate(self.nodes)}
        made = beside.merge(list(in_order({g[0].name: g for g in self.joined}, self.reads)), self.reads, self.accelerator)
        members = {group[0].name: sorted(group, key=lambda n: rank[n.name]) for group in sorted(made, key=lambda g: rank[g[0].name])}
        return [g for g in in_order(members, self.reads) if any(n.name not in self.again for n in g)]

    @cached_property
    def place(self) -> dict[str, int]:
        """The kernel each node is in."""
        return {n.name: i for i, group in enumerate(self.groups) for n in group}

    @cached_property
    def home(self) -> dict[str, int]:
        """The group each node is in before groups are joined."""
        return {n.name: i for i, group in enumerate(self.joined) for n in group}

    @cached_property
    def again(self) -> dict[str, list[Node]]:
        """Nodes computed anew by whatever reads them, with what is read for it: pointwise ones of few inputs that only fused kernels and sums read."""
        found: dict[str, list[Node]] = {}
        parts: dict[str, set[str]] = {}  # what is read, each part of a result by itself
        for node in self.nodes:
            readers = self.users[node.name]
            if alone(node) or summed(node) or any(u.op != "call_function" or alone(u) and not over_rows(u) for u in readers):
                continue
            made_of = {p for i in node.all_input_nodes for p in parts.get(self.base(i).name, {self.part(i)})}
            if len(made_of) <= (READS if len(readers) > 1 else READS_ONCE):
                parts[node.name] = made_of
                found[node.name] = list(dict.fromkeys(x for i in self.inputs(node) for x in found.get(i.name, [i])))
        return found

    def part(self, node: Node) -> str:
        """The result a value is a view of, or the part of one."""
        while node.name in self.views and "getitem" not in str(node.target):
            node = node.all_input_nodes[0]
        return str(node.name)

    @cached_property
    def apart(self) -> set[str]:
        """Values stored by a kernel of their own: padded ones, and those that one pass along the rows and down the columns will read."""
        found = {n.name for n in self.nodes if pads(n)}
        for node in self.nodes:
            if self.accelerator and node.name not in self.again and not alone(node) and not summed(node):
                sums = [beside.Walk.of([u]) for u in self.read_in(node) if summed(u)]
                if any(a.across(b) for a, b in combinations(sums, 2)):
                    found.add(node.name)
        return found

    def read_in(self, node: Node) -> Iterator[Node]:
        """Who reads a node, itself or to compute something anew."""
        for user in self.users[node.name]:
            if user.name in self.again:
                yield from self.read_in(user)
            else:
                yield user

    def reads(self, node: Node) -> list[Node]:
        """What a node reads, of other kernels only what those store."""
        here = self.home[node.name]
        return [x for i in self.inputs(node) for x in (self.again.get(i.name, [i]) if self.home.get(i.name) != here else [i])]

    @cached_property
    def wanted(self) -> set[str]:
        """What is read by another kernel than makes it, or handed back."""
        read = {i.name for group in self.groups for n in group for i in self.reads(n) if self.place.get(i.name) != self.place[n.name]}
        return read | {name for name, users in self.users.items() if any(u.op == "output" for u in users)}

    @cached_property
    def peak(self) -> int:
        """The most held beyond what is held when the graph is called. Its activations are freed after their last use."""
        held = [n for n in self.gm.graph.nodes if n.op == "placeholder" and not n.name.startswith(NOT_OURS)]
        made = {n.name: self._buffers(n) for n in (*held, *(n for group in self.groups for n in self.stored(group)))}
        return Plan([self._kernel(g, made) for g in self.groups], [b for n in held for b in made[n.name]]).peak

    def _kernel(self, group: Sequence[Node], made: Mapping[str, Sequence[Buffer]]) -> Kernel:
        first = group[0]
        library = alone(first) and isinstance(first.meta["val"], (tuple, list))
        given = torch.fx.node.map_arg(inner(first)[1], lambda n: n.meta.get("val"))
        makes = tuple(b for n in self.stored(group) for b in made[n.name])
        return Kernel(makes, dict(self._over(group, made)), library, passing(name_of(first), given))

    def _over(self, group: Sequence[Node], made: Mapping[str, Sequence[Buffer]]) -> Iterator[tuple[Buffer, Sequence[Buffer]]]:
        """What a result may be written over: the input something is put into; else those of its kind that no other result is made of."""
        if puts(group[0]):
            yield made[group[0].name][0], made.get(self.inputs(group[0])[0].name, ())
        if alone(group[0]) and not over_rows(group[0]) or turns(group[0]):
            return
        results = {n.name: n for n in group if n in self.stored(group) or summed(n)}
        given = {name: self._given(n, results) for name, n in results.items()}
        times = Counter(i for those in given.values() for i in those)
        for name in results.keys() & made.keys():
            for buffer in made[name]:
                yield buffer, [b for i in given[name] if times[i] == 1 for b in made.get(i, ()) if b.kind == buffer.kind]

    def _given(self, result: Node, results: Mapping[str, Node]) -> set[str]:
        """What a kernel reads to make one of its results."""
        found, here, left = set(), self.place[result.name], [result]
        while left:
            for source in self.reads(left.pop()):
                if source.name in results or self.place.get(source.name) != here:
                    found.add(source.name)
                else:
                    left.append(source)
        return found

    def stored(self, group: Sequence[Node]) -> list[Node]:
        """What a kernel leaves in memory."""
        return [n for n in group if n.name in self.wanted]

    def _buffers(self, node: Node) -> list[Buffer]:
        """Of a result; of one in parts, each lives as long as it is read."""
        parts: list[Node | None] = [node]
        if isinstance(node.meta["val"], (tuple, list)):
            taken = {n.args[1]: n for n in node.users if "getitem" in str(n.target)}
            parts = [taken.get(i) for i in range(len(node.meta["val"]))]
        both = zip(parts, values_of(node), strict=True)
        own = self.place.get(node.name, -1)
        return [self._buffer(part, value, own) for part, value in both if isinstance(value, torch.Tensor) and bytes_of(value)]

    def _buffer(self, node: Node | None, value: torch.Tensor, own: int) -> Buffer:
        readers = self.read_by(node) - {own} if node is not None else frozenset()
        here = frozenset(r for r in readers if r < len(self.groups))
        return Buffer(bytes_of(value), here, len(here) < len(readers), (value.dtype, bytes_of(value)))

    def read_by(self, node: Node) -> frozenset[int]:
        """The kernels that read a node, itself, through views or to compute something anew; one more stands for who gets the results."""
        if node.name not in self._known:
            found: set[int] = set()
            for user in node.users:
                through = user.name in self.views or user.name in self.again
                found |= self.read_by(user) if through else {self.place.get(user.name, len(self.groups))}
            self._known[node.name] = frozenset(found)
        return self._known[node.name]

    @cached_property
    def _known(self) -> dict[str, frozenset[int]]:
        return {}
