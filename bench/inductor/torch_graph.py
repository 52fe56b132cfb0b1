"""A graph of torch ops as a compiler sees it: views looked through, and values joined to those they feed.

Products, attention and scatters stay kernels of their own. All others fuse with the ones they feed, unless a kernel of its
own lies between; two ops are of one group when they are joined by edges and equally many such kernels lie above them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch.fx import GraphModule, Node

from bench.inductor.observe import VIEWS
from bench.inductor.torch_ops import alone, has_value, name_of


@dataclass(frozen=True)
class Graph:
    """The nodes that compute, and how they are joined."""

    gm: GraphModule

    @cached_property
    def nodes(self) -> list[Node]:
        return [n for n in self.gm.graph.nodes if n.op == "call_function" and n.name not in self.views and has_value(n)]

    @cached_property
    def views(self) -> dict[str, Node]:
        """What each view, and each part of a result, is a view of."""
        found: dict[str, Node] = {}
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and (name_of(node) in VIEWS or "getitem" in str(node.target)) and node.all_input_nodes:
                source = node.all_input_nodes[0]
                found[node.name] = found.get(source.name, source) if "getitem" not in str(node.target) else source
        return found

    def base(self, node: Node) -> Node:
        while node.name in self.views:
            node = self.views[node.name]
        return node

    def inputs(self, node: Node) -> list[Node]:
        return [self.base(n) for n in node.all_input_nodes]

    def own(self, node: Node) -> bool:
        """Whether it is a kernel of its own."""
        return alone(node) or node.name in self.apart

    @cached_property
    def depth(self) -> dict[str, int]:
        """Kernels of their own above a node, itself included."""
        found: dict[str, int] = defaultdict(int)
        for node in self.nodes:
            above = max((found[i.name] + self.own(i) for i in self.inputs(node)), default=0)
            found[node.name] = above + (self.own(node) and any(not self.own(i) and i.op == "call_function" for i in self.inputs(node)))
        for node in reversed(self.nodes):  # what only later kernels read is computed inside them
            readers = self.users[node.name]
            if not self.own(node) and readers and all(u.name in found and not self.own(u) for u in readers):
                found[node.name] = max(found[node.name], min(found[u.name] for u in readers))
        return found

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """Who reads a node, itself or through views."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.gm.graph.nodes:
            if node.name not in self.views:
                for source in node.all_input_nodes:
                    found[self.base(source).name].append(node)
        return found

    @cached_property
    def joined(self) -> list[list[Node]]:
        """Nodes that fuse with those they feed."""
        parent: dict[str, str] = {}

        def find(name: str) -> str:
            while parent[name] != name:
                name = parent[name]
            return name

        for node in self.nodes:
            parent[node.name] = node.name
            if self.own(node):
                continue
            for source in self.inputs(node):
                if source.name in parent and not self.own(source) and self.depth[source.name] == self.depth[node.name]:
                    parent[find(source.name)] = find(node.name)
        members: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            members[find(node.name)].append(node)
        return list(in_order(members, self.inputs))

    @cached_property
    def apart(self) -> set[str]:
        """Values that join no others."""
        return set()


def in_order(members: Mapping[str, list[Node]], inputs: Callable[[Node], list[Node]]) -> Iterator[list[Node]]:
    """Groups in the order of the graph, but each after those it reads."""
    made = {n.name: key for key, group in members.items() for n in group}
    done: set[str] = set()

    def before(key: str) -> Iterator[str]:
        return (made[i.name] for n in members[key] for i in inputs(n) if i.name in made)

    def visit(key: str) -> Iterator[list[Node]]:
        """Without recursion, since graphs are deep."""
        waiting = [(key, before(key))]
        done.add(key)
        while waiting:
            now, rest = waiting[-1]
            following = next((k for k in rest if k not in done), None)
            if following is None:
                waiting.pop()
                yield members[now]
            else:
                done.add(following)
                waiting.append((following, before(following)))

    for key in members:
        if key not in done:
            yield from visit(key)
