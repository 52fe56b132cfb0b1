"""The order in which a rank does the nodes of a program: what is sent starts early, what waits for it comes late.

A collective starts as soon as its operands are there, one of inputs a little ahead of its first reader. The backward pass is done as soon
as it can be, so that the sums of gradients have the rest of it to hide behind. What only finishes such a sum (the update, the
gather after it) waits as long as possible: until a few later sums are under way where it has something to send itself or lets go of a full
gradient for a slice of it, else until all computation is done; in both cases in the order in which the sums were started, so that the link is
never idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import accumulate
from math import floor
from types import MappingProxyType

from weft.core.node import Node, toposort
from weft.core.program import Program
from weft.core.role import Role
from weft.ops.comm import reduce_scatter
from weft.ops.registry import Kind, nbytes
from weft.ops.shape import concat_op

PREFETCH = 8  # how many nodes ahead a gather of inputs may be started
AHEAD = 3  # messages' worth of such gathers that are under way where messages are counted, before the first of them is read
LAG = 2  # messages' worth of sums that are under way before one is waited for, so that its own gather can be sent
MESSAGE = 8 << 20  # bytes
Key = tuple[float, float]


def is_wire(node: Node) -> bool:
    """A collective that really sends."""
    return node.op.kind is Kind.COMM and node.op.wire(2) > 0 and node.mesh.size(node.attr("axis")) > 1


def gathers_parameters(program: Program) -> bool:
    """Whether any parameter is sharded and gathered for a while, as ZeRO-3 does: memory is what it is short of."""

    def source(n: Node) -> Node:
        while len(n.args) == 1:
            n = n.args[0]
        return n

    return any(is_wire(n) and source(n).role is Role.PARAMETER for n in program.find_all("all_gather"))


def order(program: Program, far: Mapping[str, int] = MappingProxyType({})) -> list[Node]:
    """All nodes but inputs. Where one stands before what it reads, who follows the order takes that first.

    `far` are the bytes of a message by axis, where messages are counted.
    """
    nodes = [n for n in program.nodes if not n.op.is_input]
    early, roots, tail = _after_results(program), *tails(program)
    views = {n for n in nodes if n.op.kind is Kind.VIEW and program.users[n] and all(map(is_wire, program.users[n]))}  # of what is sent
    sent, early_gathers = _sent(program, nodes), _ahead(nodes, far)
    at: dict[Node, Key] = {}
    for i, n in enumerate(nodes):
        made = [at[a] for a in n.args if a in at]
        if n in tail:
            continue
        if n in views and made:
            at[n] = max(made)
        elif is_wire(n):
            base, depth = max(made) if made else (max(-0.5, early_gathers.get(n, i) - PREFETCH - 0.5), 0.0)
            at[n] = base, depth + 0.25
        elif n in early and made and not any(is_wire(a) for a in n.args):
            base, depth = max(made)
            at[n] = base, floor(depth) + 1 + (n not in sent) / 2 if _costs(n) else depth
        else:
            at[n] = float(i), 0.0
    started = sorted((n for n in nodes if n in roots), key=at.__getitem__)
    messages = list(accumulate(sum(nbytes(a.type) for a in n.args) / far.get(n.attr("axis"), MESSAGE) for n in started))
    if far:
        at |= _put_off(program, at, early, started[: bisect_left(messages, LAG) + 1])
    at |= _late(program, nodes, at, started, messages, tail)
    number = {n: i for i, n in enumerate(nodes)}
    return sorted(nodes, key=lambda n: (at[n], number[n]))


def _ahead(nodes: list[Node], far: Mapping[str, int]) -> dict[Node, int]:
    """Of each gather of inputs the place it is started before: its own, or that of the one a few messages before it."""
    found: dict[Node, int] = {}
    queues: dict[str, deque[tuple[int, float]]] = {axis: deque() for axis in far}
    under_way = dict.fromkeys(far, 0.0)
    for i, n in enumerate(nodes):
        if not is_wire(n) or any(not a.op.is_input for a in n.args):
            continue
        found[n] = i
        if n.attr("axis") in queues:
            axis = n.attr("axis")
            queue = queues[axis]
            queue.append((i, sum(nbytes(t) for t in n.types) / far[axis]))
            under_way[axis] += queue[-1][1]
            while queue and under_way[axis] > AHEAD:
                under_way[axis] -= queue.popleft()[1]
            found[n] = queue[0][0] if queue else i
    return found


def _costs(n: Node) -> bool:
    return n.op.kind is not Kind.VIEW and n.op is not concat_op


def _sent(program: Program, nodes: list[Node]) -> set[Node]:
    """What is sent as it is, or laid end to end with others: of two nodes that could be next, such a one goes first."""
    found: set[Node] = set()
    for n in reversed(nodes):
        if any(is_wire(u) or u in found and not _costs(u) for u in program.users[n]):
            found.add(n)
    return found


def _put_off(program: Program, at: dict[Node, Key], early: set[Node], first: list[Node]) -> dict[Node, Key]:
    """Work whose result nobody reads before the link is busy waits until it is."""
    if not first:
        return {}
    busy = at[first[-1]]
    idle = [n for n in early if n in at and at[n] < busy and _is_work(n) and len(n.types) == 1]
    after = busy[0], busy[1] + 0.05
    return {n: after for n in idle if program.users[n] and all(at.get(u, busy) > after for u in program.users[n])}


def _late(
    program: Program, nodes: list[Node], at: dict[Node, Key], roots: list[Node], messages: list[float], tail: set[Node]
) -> dict[Node, Key]:
    """Where the tails stand: behind the last collective they wait for, by the rule above; `messages` are sent when it is."""
    last = {n: k for k, n in enumerate(roots)}
    sends: set[Node] = set()
    for n in reversed(nodes):
        if n in tail and (is_wire(n) or any(u in sends for u in program.users[n])):
            sends.add(n)
    late: dict[Node, Key] = {}
    for n in nodes:
        if n in tail:
            k = last[n] = max(last[a] for a in n.args if a in last)
            later = bisect_left(messages, messages[k] + LAG)
            soon = later < len(roots) and (n in sends or roots[k].op is reduce_scatter)
            base, depth = at[roots[later]] if soon else (float(len(nodes)), float(k))
            late[n] = base, depth + 0.1
    return late


def tails(program: Program) -> tuple[set[Node], set[Node]]:
    """Collectives after which nothing is computed but updates and the like, and all that follows them."""
    calm: set[Node] = set()
    for n in reversed(program.nodes):
        if not _is_work(n) and all(u in calm for u in program.users[n]):
            calm.add(n)
    roots: set[Node] = set()
    tail: set[Node] = set()
    for n in program.nodes:
        if n in calm and any(a in roots or a in tail for a in n.args):
            tail.add(n)
        elif n in calm and is_wire(n):
            roots.add(n)
    return roots, tail


def _is_work(n: Node) -> bool:
    """Matmuls and ops kept in one piece; updates are no more than a sweep over memory."""
    return n.op.kind is Kind.CONTRACT or n.op.kind is Kind.COMPOSITE and n.op.unfold is None


def _after_results(program: Program) -> set[Node]:
    """Nodes that the loss does not need: gradients and updates. Done as soon as they can be, they let go of what they read,
    and their collectives have the rest of the step to hide behind."""
    kept = dict(program.state)
    results = [n for name, n in program.outputs if name not in kept]
    if not results or len(results) == len(program.outputs):
        return set()
    loss = program.output_names.get("loss")  # other results, such as the gradient's norm, come with the update
    return set(program.nodes) - set(toposort([loss] if loss is not None else results))
