"""One class of a vertex function, ready to run: phases split into steps, every value given its buffer.

A step is a fused kernel, a matmul, or any other op of torch; all work on a range of rows of the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from weft.core.node import Node
from weft.dynamic.kernel import Kernel, access, finish, fusible, group, lane_shape
from weft.dynamic.lower import Graph, is_sized, reads
from weft.dynamic.phases import BACKWARD, FORWARD, Phased, assign, base, domain, is_view
from weft.dynamic.store import Home, Key, Row, Stores, Via, home_of, message_home
from weft.dynamic.trace import VertexProgram
from weft.ops.fill import stop_gradient

Step = Kernel | Node


@dataclass
class Cell:
    """A class ready to run."""

    graph: Graph
    phased: Phased
    stores: Stores
    steps: dict[str, list[Step]] = field(default_factory=dict)
    copies: dict[str, list[tuple[Node, Home]]] = field(default_factory=dict)  # results that are views, inputs or other results, when a phase ends

    @cached_property
    def sized(self) -> set[Node]:
        """Ops with an argument that names the number of rows or edges."""
        return {n for n in self.graph.nodes if is_sized(n)}


def vias(keys: set[Key], state: str, gradient: Node) -> tuple[Via, ...]:
    """How the gradient of a state is summed up from the messages sent to it."""
    out = []
    for key in sorted(k for k in keys if k[0] == state):
        home, how = message_home(key, gradient.shape[1:], gradient.dtype), key[1]
        if how.startswith("slot"):
            out.append(Via(home, f"{how}_first", f"{how}_reader"))
        else:
            out.append(Via(home, "reader_first", "reader_edge" if how == "edge" else "reader_vertex"))
    return tuple(out)


def compile_cell(graph: Graph, sent: set[Key], outputs: Mapping[str, Home], fuse: bool) -> Cell:
    """Split a (differentiated) function into steps. `sent` are the messages of all classes together."""
    phased = assign(graph)
    if fuse:
        _sink(phased)
    cell = Cell(graph, phased, Stores(graph.names))
    _sources(cell, sent)
    for phase in (*FORWARD, *BACKWARD):
        cell.steps[phase] = _steps(phased, phase, fuse)
    _results(cell, outputs)
    _homes(cell)
    return cell


def _sink(phased: Phased) -> None:
    """Cheap ops that only gradients need run where they are read, rather than being stored until then."""
    order, results = (*FORWARD, *BACKWARD), {base(n) for n in phased.graph.results()}
    for node in reversed(phased.graph.nodes):
        if phased.phase.get(node) in ("eager", "rounds", "late", "before") and fusible(node):
            readers = {phased.phase[r] for r in _readers(phased.graph, node)}
            if readers and node not in results and min(map(order.index, readers)) >= order.index("before"):
                phased.phase[node] = min(readers, key=order.index)


def collected(f: VertexProgram) -> VertexProgram:
    """A gradient of a state that a kernel cannot sum up as it goes is summed into a buffer first."""
    graph = Graph(f)
    swap = {
        node: stop_gradient(node)
        for source, node in graph.sources.items()
        if source.role == "d_state" and graph.users[node] and not all(_reads_full(u, node) for u in graph.users[node])
    }
    return f.with_nodes(swap, "collected") if swap else f


def _reads_full(user: Node, node: Node) -> bool:
    return fusible(user) and lane_shape(user) == lane_shape(node) and domain(user) == "row"


def _sources(cell: Cell, sent: set[Key]) -> None:
    """Where values that are not computed here come from."""
    stores = cell.stores
    for source, node in cell.graph.sources.items():
        if source.role in ("slot", "edge"):
            row = Row("v", f"slot{source.slot}") if source.role == "slot" else Row("e", "edge_child")
            stores.children[node] = replace(home_of(node, "state", (source.name,)), domain="row"), row
        elif source.role in ("pull", "d_push"):
            stores.homes[node] = home_of(node, source.role.removeprefix("d_"), (source.name,))
        elif source.role == "d_state":
            stores.gradients[node] = vias(sent, source.name, node)


def _steps(phased: Phased, phase: str, fuse: bool) -> list[Step]:
    """Kernels and single ops of a phase in order; a kernel that cannot be read in place falls apart into single ops."""
    nodes = phased.nodes(phase)
    refused: set[Node] = set()
    while True:
        inside = {n for n in nodes if fuse and n not in refused and fusible(n)}
        steps = list(group(nodes, inside))
        bad = [k for k in steps if isinstance(k, Kernel) and finish(k, _read_outside(phased, k)) is None]
        if not bad:
            return steps
        for kernel in bad:
            refused |= {n for n in kernel.nodes if _unreadable(n)} or set(kernel.nodes)


def _unreadable(node: Node) -> bool:
    return any(access(a, lane_shape(node)) is None for a in reads(node) if domain(a) or is_view(a))


def _read_outside(phased: Phased, kernel: Kernel) -> set[Node]:
    """Values of the kernel that something else reads, or looks at."""
    own, graph = set(kernel.nodes), phased.graph
    return {n for n in own if not own.issuperset(graph.users[n])} | own & {base(n) for n in graph.results()}


def output_homes(functions: Iterable[Graph]) -> dict[str, Home]:
    """Where outputs lie, over all classes: with a state if they are the same value everywhere, else in a buffer of their own."""
    out: dict[str, Home] = {}
    made = list(functions)
    for name in dict.fromkeys(o for f in made for o in f.outputs):
        pushing = [f for f in made if name in f.outputs]
        same = [s for s in pushing[0].states if all(f.states.get(s) is f.outputs[name] for f in pushing)]
        node = pushing[0].outputs[name]
        out[name] = home_of(node, "state", (same[0],)) if same else home_of(node, "output", (name,))
    return out


def _results(cell: Cell, outputs: Mapping[str, Home]) -> None:
    """States, messages and outputs get their buffers; a value with two of them is copied to the second."""
    graph, homes = cell.graph, cell.stores.homes
    wanted = [(node, "state", (name,)) for name, node in graph.states.items()]
    wanted += [(node, "message", key) for key, node in graph.messages.items()]
    wanted += [(node, outputs[name].kind, outputs[name].key) for name, node in graph.outputs.items()]
    for node, kind, key in wanted:
        home = home_of(node, kind, key)
        if homes.get(node) == home:
            continue
        if node in cell.phased.phase and node not in homes and domain(node):
            homes[node] = home
        else:
            cell.copies.setdefault(_ends(cell, node, kind), []).append((node, home))


def _ends(cell: Cell, node: Node, kind: str) -> str:
    """The phase at whose end a result is there."""
    known = cell.phased.phase.get(base(node))
    if known and known != "weights":
        return known
    of_child = base(node) in cell.stores.children
    if kind == "message":
        return "back"
    return "rounds" if of_child else "eager"


def _homes(cell: Cell) -> None:
    """Buffers for what a kernel or another phase reads; gradients of inputs, or what they are views of, are read when all rounds are done."""
    phase, homes = cell.phased.phase, cell.stores.homes
    gradients = set(map(base, cell.graph.grads.values()))
    place: dict[Node, Kernel | None] = {}
    for steps in cell.steps.values():
        for step in steps:
            for node in step.nodes if isinstance(step, Kernel) else [step]:
                place[node] = step if isinstance(step, Kernel) else None
    for node, kernel in place.items():
        if node in homes or not domain(node) or len(node.types) > 1:
            continue
        readers = _readers(cell.graph, node)
        across = node in gradients or any(phase[r] != phase[node] or r in cell.phased.again for r in readers)
        stored = kernel is not None and node in kernel.stored
        if across or stored or any(place[r] is not None and place[r] is not kernel for r in readers):
            homes[node] = home_of(node, "full" if across else "scratch", (cell.graph.names[node],))


def _readers(graph: Graph, node: Node) -> list[Node]:
    """Computed ops that read a value, looking through views."""
    out, todo = [], list(graph.users[node])
    while todo:
        user = todo.pop()
        if is_view(user):
            todo += graph.users[user]
        else:
            out.append(user)
    return out
