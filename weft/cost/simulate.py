"""One run of a program on a cluster, predicted: when each node would run, for what, and what is in memory meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from weft.cluster import collectives
from weft.cluster.spec import Cluster
from weft.core.layout import O
from weft.core.node import Node
from weft.core.program import Group, Program
from weft.cost.memory import live_bytes
from weft.cost.price import compiles, on_mesh
from weft.cost.timeline import Seen, Task, Timeline
from weft.cost.walk import Walk
from weft.cost.work import by_place
from weft.ops.comm import send, slice_
from weft.ops.host import COPIES, landed
from weft.ops.registry import Kind, nbytes
from weft.rewrite.updates import by_rows

FUSED = "fused"  # communication and computation in one kernel: its time cannot be told apart from the rest
Above = Callable[[Program, Sequence[tuple[Node | Group | None, float, float]]], list[tuple[Task, float]]]


def predict(program: Program, cluster: Cluster, stage: int | None = None, above: Above | None = None) -> Seen:
    """Time, causes, timeline and memory of the busiest rank, which updates tables by rows; of a program over all ranks of a pipeline,
    those at one stage of it. `above` makes more tasks of what ran from when until when, such as bands of phases and layers."""
    program = by_rows(program)
    walker = Walk(on_mesh(cluster, program.mesh))
    at, alive = {n: i for i, n in enumerate(program.nodes)}, live_bytes(program)
    causes: dict[str, float] = defaultdict(float)
    copied: dict[Node, float] = {}  # copies to and from the host, and when they end
    tasks: list[tuple[Task, float]] = []
    spans: list[tuple[Node | Group | None, float, float]] = []
    memory = []
    for unit, ops in by_place(program, compiles(cluster.device)):
        if stage is not None and not _is_at(unit, stage):
            continue
        began, why = walker.now, cause_of(unit)
        if isinstance(unit, Node) and unit.op in (*COPIES, landed):
            why = "host"
            ready = copied.get(_item(unit.args[0]), 0.0)
            if unit.op is landed:
                walker.wait("host", ready)
            else:
                copied[unit] = walker.copy(unit.op.name, float(nbytes(unit.type)), ready)
        for op in ops:
            walker.op(op)
        walker.join()
        if isinstance(unit, Node) and unit.op is send:
            walker.wait("pp", walker.now + send_seconds(cluster, nbytes(unit.type), program.mesh.size("pp")))
        spent = walker.now - began
        last = unit if isinstance(unit, Node) else max(unit.nodes, key=at.__getitem__)
        memory.append((began, float(alive[at[last]])))
        if spent > 0:
            causes[why] += spent
            tasks.append((Task(name_of(unit), stream_of(why), spent, (), why), began))
            spans.append((unit, began, walker.now))
    tasks = [*(above(program, spans) if above is not None else ()), *tasks]
    line = Timeline(tuple(t for t, _ in tasks), tuple(b for _, b in tasks), tuple(b + t.seconds for t, b in tasks))
    memory.append((walker.now, memory[-1][1] if memory else 0.0))
    return Seen(walker.now * 1e3, max(alive, default=0) / 1e9, {k: v * 1e3 for k, v in causes.items()}, line, memory)


def _item(node: Node) -> Node:
    """What an item of a tuple was before it was put there."""
    inner = node.args[0] if node.op.is_item else node
    return _item(inner.args[node.attr("index")]) if inner is not node and inner.op.is_tuple else node


def send_seconds(cluster: Cluster, size: float, stages: int) -> float:
    """Of a message to the next of so many stages."""
    return collectives.send_seconds(cluster, size, max(1, cluster.devices // stages))


def cause_of(unit: Node | Group) -> str:
    """What the time of a node or group is for: `compute`, the axis it communicates along, or both in one kernel."""
    if isinstance(unit, Group):
        sends = any(n.op.kind is Kind.COMM and n.op.wire(2) > 0 for n in unit.nodes)
        return FUSED if sends else "compute"
    sends = unit.op.kind is Kind.COMM and unit.op.wire(2) > 0 and unit.mesh.size(unit.attr("axis")) > 1
    return str(unit.attr("axis")) if sends else "compute"


def stream_of(cause: str) -> str:
    return "compute" if cause in ("compute", FUSED) else "communication"


def name_of(unit: Node | Group) -> str:
    """A node by its op; a group by its name and what it mostly does."""
    if isinstance(unit, Node):
        return unit.op.name
    moved = list(dict.fromkeys(n.op.name for n in unit.nodes if n.op.kind is Kind.COMM and n.op is not slice_))
    return f"{unit.kind} {unit.name}: {len(unit.nodes)} nodes" + (f" with {', '.join(moved)}" if moved else "")


def _is_at(unit: Node | Group, stage: int) -> bool:
    """Whether a stage of the pipeline has any of it; a message is at both ends."""
    nodes = unit.nodes if isinstance(unit, Group) else (unit, *(unit.args if unit.op is send else ()))
    return any(root_of(n) in (None, stage) for n in nodes)


def root_of(node: Node) -> int | None:
    """The one stage of the pipeline that has a value."""
    if "pp" not in node.types[0].mesh.axes:
        return None
    place = node.types[0].layout.placement("pp")
    return place.root if isinstance(place, O) else None
