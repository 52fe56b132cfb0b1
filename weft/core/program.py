"""A program: named inputs and outputs over one DAG of nodes. Nothing is mutated; a program knows the one it came from.

A place is named by a node. A node of an ancestor still names its place after rewrites: `program.at(node)` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weft.core.errors import AmbiguousPlace, InvalidProgram
from weft.core.layout import Mesh
from weft.core.node import Node, toposort, with_operands
from weft.core.picture import html_of
from weft.core.role import Role


@dataclass(frozen=True)
class Group:
    """Nodes that become one kernel (`fuse`) or one chunked pipeline (`overlap`)."""

    kind: str
    name: str
    nodes: tuple[Node, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)


@dataclass(frozen=True, eq=False)
class Program:
    """A program over a mesh: inputs, outputs, which output is which input's next value (`state`), and the program it was made from."""

    name: str
    mesh: Mesh
    inputs: tuple[Node, ...]
    outputs: tuple[tuple[str, Node], ...]
    state: tuple[tuple[str, str], ...] = ()  # (output, input)
    groups: tuple[Group, ...] = ()
    lines: Mapping[Node, str] = field(default_factory=dict)
    parent: Program | None = None
    step: str = ""
    moved: Mapping[Node, Node] = field(default_factory=dict)  # the parent's nodes, and what became of them here

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, arguments first, inputs before all."""
        nodes = dict.fromkeys((*self.inputs, *toposort(n for _, n in self.outputs)))
        early: dict[Node, list[Node]] = {}
        for n in nodes:
            if n.op.early:
                early.setdefault(n.args[0], []).append(n)
        return tuple(dict.fromkeys(x for n in nodes for x in (n, *early.get(n, ())))) if early else tuple(nodes)

    @cached_property
    def node_set(self) -> frozenset[Node]:
        return frozenset(self.nodes)

    @cached_property
    def input_set(self) -> frozenset[Node]:
        return frozenset(self.inputs)

    @cached_property
    def users(self) -> dict[Node, tuple[Node, ...]]:
        """Who reads each node."""
        users: dict[Node, dict[Node, None]] = {n: {} for n in self.nodes}
        for n in self.nodes:
            for a in n.args:
                users[a][n] = None
        return {n: tuple(u) for n, u in users.items()}

    @cached_property
    def input_names(self) -> dict[str, Node]:
        return {n.attr("name"): n for n in self.inputs}

    def inputs_for(self, *roles: Role) -> dict[str, Node]:
        """The inputs of some roles, by name."""
        return {name: n for name, n in self.input_names.items() if n.role in roles}

    @cached_property
    def output_names(self) -> dict[str, Node]:
        return dict(self.outputs)

    @cached_property
    def next_of(self) -> dict[str, str]:
        """The input that each output of the state becomes."""
        return dict(self.state)

    @cached_property
    def _names_of(self) -> dict[Node, list[str]]:
        names: dict[Node, list[str]] = {}
        for name, n in self.outputs:
            names.setdefault(n, []).append(name)
        return names

    def outputs_of(self, node: Node) -> list[str]:
        """The names of the outputs that a node is."""
        return list(self._names_of.get(node, ()))

    # -- naming a place ----------------------------------------------------------------------------------------------

    def find_all(self, op: str | None = None, where: Callable[[Node], bool] | None = None) -> list[Node]:
        """All nodes of an op, or for which `where` is true."""
        return [n for n in self.nodes if (op is None or n.op.name == op) and (where is None or where(n))]

    def find(self, op: str | None = None, where: Callable[[Node], bool] | None = None) -> Node:
        """The one node of that op; several or none is refused."""
        found = self.find_all(op, where)
        if len(found) == 1:
            return found[0]
        shown = "\n".join(f"  > {line}" for line in self._lines_of(found))
        raise AmbiguousPlace(
            f"find({op!r}) names {len(found)} nodes of {self.name}",
            needed="exactly one",
            found=f"{len(found)}",
            program=shown or None,
            try_="find_all(...)[k], or where=lambda node: ..." if found else f"one of {', '.join(sorted({n.op.name for n in self.nodes}))}",
        )

    def _lines_of(self, nodes: Iterable[Node]) -> list[str]:
        from weft.core.text import node_lines

        lines = node_lines(self)
        return [lines[n] for n in nodes]

    def at(self, place: Node | str) -> Node:
        """The node a place names here: its printed name (`%3`), an op's name, an output's name, a node, or one of an ancestor."""
        if isinstance(place, str) and place.startswith("%"):
            return self._printed(place)
        if isinstance(place, str):
            return self.output_names[place] if place in self.output_names else self.find(place)
        node = self._follow(place)
        if node is None:
            raise AmbiguousPlace(
                f"{place!r} is no place in {self.name}", needed="a node of this program or of one it came from", found=repr(place)
            )
        return node

    def _printed(self, name: str) -> Node:
        from weft.core.text import node_names

        named = {text: node for node, text in node_names(self).items()}
        if name not in named:
            raise AmbiguousPlace(f"{name} is no place in {self.name}", needed=f"one of {', '.join(named)}", found=name)
        return named[name]

    def _follow(self, node: Node) -> Node | None:
        if node in self.node_set:
            return node
        if self.parent is None:
            return None
        before = self.parent._follow(node)
        if before is None or before in self.node_set:
            return before
        after = self.moved.get(before)
        return after if after in self.node_set else None

    def pointwise(self) -> list[Node]:
        """All elementwise nodes."""
        return self.find_all(where=lambda n: n.op.kind.name == "POINTWISE")

    def between(self, first: Node | str, last: Node | str) -> list[Node]:
        """The nodes on the paths from one place to another, ends included. A name stands for all its nodes."""
        starts = self.find_all(first) if isinstance(first, str) else [self.at(first)]
        ends = self.find_all(last) if isinstance(last, str) else [self.at(last)]
        below = self._reach(starts, lambda n: self.users[n])
        above = self._reach(ends, lambda n: n.args)
        return [n for n in self.nodes if n in below and n in above]

    def _reach(self, roots: Sequence[Node], step: Callable[[Node], Iterable[Node]]) -> set[Node]:
        seen, stack = set(roots), list(roots)
        while stack:
            for n in step(stack.pop()):
                if n not in seen:
                    seen.add(n)
                    stack.append(n)
        return seen

    def needs(self, node: Node) -> set[Node]:
        """The node and all it is computed from."""
        return self._reach([node], lambda n: n.args)

    def waits(self, nodes: Sequence[Node]) -> dict[Node, Node]:
        """Those of some nodes that are computed from another of them, each with one such."""
        among, found, under = set(nodes), dict[Node, Node](), dict[Node, Node]()
        for n in toposort(nodes):
            before = next((under[a] for a in n.args if a in under), None)
            if n in among and before is not None:
                found[n] = before
            if n in among or before is not None:
                under[n] = n if n in among else before  # type: ignore[assignment]
        return found

    # -- another program from this one -------------------------------------------------------------------------------

    def rewrite(self, swap: Mapping[Node, Node], step: str, *, inputs: Mapping[Node, Node] | None = None) -> Program:
        """The program with every key of `swap` replaced and all that depends on it remade; handles are carried over."""
        swap = {**swap, **(inputs or {})}
        moved: dict[Node, Node] = {}
        for n in toposort([*(n for _, n in self.outputs), *self.nodes, *(inputs or {})]):
            moved[n] = swap[n] if n in swap else with_operands(n, tuple(moved[a] for a in n.args))
        new_outputs = tuple((name, moved[n]) for name, n in self.outputs)
        kept = tuple(moved[n] if n in (inputs or {}) else n for n in self.inputs)
        groups = tuple(replace(g, nodes=tuple(dict.fromkeys(moved[n] for n in g.nodes))) for g in self.groups)
        lines = {**{moved[n]: line for n, line in self.lines.items() if n in moved}}
        new = Program(self.name, self.mesh, kept, new_outputs, self.state, groups, lines, self, step, moved)
        return new.with_groups(new._live_groups(), new.parent, step) if groups else new

    def _live_groups(self) -> tuple[Group, ...]:
        live = (replace(g, nodes=tuple(n for n in g.nodes if n in self.node_set and n not in self.input_set)) for g in self.groups)
        return tuple(g for g in live if g.nodes)

    def with_groups(self, groups: Iterable[Group], parent: Program | None, step: str) -> Program:
        """The same program with other fused or overlapped groups."""
        return replace(self, groups=tuple(groups), parent=parent, step=step)

    def with_outputs(
        self,
        outputs: Iterable[tuple[str, Node]],
        step: str,
        *,
        inputs: Iterable[Node] | None = None,
        state: Iterable[tuple[str, str]] | None = None,
    ) -> Program:
        """The same nodes with other outputs, inputs or state."""
        new = replace(
            self,
            outputs=tuple(outputs),
            inputs=self.inputs if inputs is None else tuple(inputs),
            state=self.state if state is None else tuple(state),
            parent=self,
            step=step,
        )
        new = replace(new, moved={n: n for n in self.nodes})
        return replace(new, groups=new._live_groups())

    @property
    def history(self) -> list[str]:
        """The steps that led here, first to last."""
        return (
            ([*self.parent.history, self.step] if self.parent is not None else [self.step])
            if self.step
            else (self.parent.history if self.parent else [])
        )

    @property
    def text(self) -> str:
        from weft.core.text import print_program

        return print_program(self)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return html_of(self)

    def __repr__(self) -> str:
        return f"<Program {self.name}: {len(self.nodes)} nodes>"


def new_program(name: str, mesh: Mesh, inputs: Sequence[Node], outputs: Mapping[str, Node], **more: Any) -> Program:
    """A checked program."""
    from weft.core.spec import validate

    if not outputs:
        raise InvalidProgram(f"program {name} has no outputs", needed="at least one named output", found="none")
    return validate(Program(name, mesh, tuple(inputs), tuple(outputs.items()), **more))
