"""How the nodes of a program join into kernels, and what each kernel does.

`compiled`: ops that only move memory join the chains they stand in, up to the next matmul, attention, lookup or collective, as Inductor joins
them; a chain touches what enters and leaves it, and a matmul adds its bias. What a chain of the backward pass can make again from values that
wait for it in any case is not written. `eager`: every op is a kernel, as torch runs it by itself.
`classic`: Megatron of 2021, which joins pointwise ops alone, has the scores of attention in memory, and sums gradients apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.cluster.kernels import WIDTH
from weft.core.node import Node
from weft.core.program import Program
from weft.cost.work import Gemm, MemoryBound, Op, Work, attention_of, dtype_of, keys_of, query_and_key
from weft.ops.comm import all_gather
from weft.ops.pointwise import add
from weft.ops.registry import Kind, flops, memory_traffic, nbytes
from weft.ops.shape import permute_op, reshape_op

COMPILED, EAGER, CLASSIC = "compiled", "eager", "classic"
MANY = 4  # flops for each element it touches, beyond which an op does more than move memory


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a program, in order. Nodes of which `apart` says different things never share one; those of `once` are not run here."""

    program: Program
    apart: Callable[[Node], object]
    ahead: Collection[Node] = ()
    once: Collection[Node] = ()
    style: str = COMPILED

    @cached_property
    def all(self) -> list[tuple[Node, ...]]:
        level: dict[Node, int] = {}
        joined: dict[Node, list[Node]] = {}
        order: list[list[Node]] = []
        for n in self.program.nodes:
            if n in self.once or n.op.kind is Kind.SOURCE:
                level[n] = 0
                continue
            level[n] = max((level[a] + (not self.moves(a)) for a in n.args), default=0)
            if (n.op.kind is Kind.VIEW and len(n.args) == 1 and not self._copies(n)) or self._work.is_done_by_matmul(n) or n in self.left_out:
                continue
            if n not in self.ahead and not self._waits(n):
                continue
            met = [joined[b] for a in n.args if (b := self.base(a)) in joined and self._joins(b, n, level)]
            chain = met[0] if met else []
            if not met:
                order.append(chain)
            for other in (c for c in met if c is not chain):  # chains that meet here are one
                joined |= dict.fromkeys(other, chain)
                chain += other
                other.clear()
            chain.append(n)
            if self._may_join(n):
                joined[n] = chain
        return [tuple(chain) for chain in order if chain]

    def _may_join(self, n: Node) -> bool:
        if self.style == CLASSIC and (n.op.kind is Kind.COMPOSITE or n.op is add and n not in self.ahead):
            return False
        return self.moves(n) and self.style != EAGER

    def _copies(self, n: Node) -> bool:
        """Whether a view is of what does not lie in its order."""
        return self.style == CLASSIC and n.op is reshape_op and n.args[0].op is permute_op

    @cached_property
    def _work(self) -> Work:
        return Work(self.program)

    @property
    def left_out(self) -> frozenset[Node]:
        """What is not run."""
        return self._work.left_out

    @cached_property
    def _known(self) -> dict[Node, bool]:
        return {}

    def moves(self, n: Node) -> bool:
        """Whether an op only moves memory, element by element or row by row."""
        if n not in self._known:
            self._known[n] = self._moves(n)
        return self._known[n]

    def _moves(self, n: Node) -> bool:
        if n.op.kind in (Kind.POINTWISE, Kind.VIEW, Kind.SOURCE):
            return not self._work.is_done_by_matmul(n)
        if n.op.kind is not Kind.COMPOSITE:
            return False
        size = sum(math.prod(t.layout.largest_local) for t in (*n.types, *(t for a in n.args for t in a.types)))
        floats = all(t.dtype.is_floating_point for a in n.args[:1] for t in a.types)
        return floats and flops(n) <= MANY * size

    def _joins(self, a: Node, n: Node, level: Mapping[Node, int]) -> bool:
        return self._may_join(n) and level[a] == level[n] and self.apart(a) == self.apart(n)

    def base(self, node: Node) -> Node:
        """What a view is of, what a matmul adds its bias to, and what is gathered in words alone."""
        while True:
            if node.op.kind is Kind.VIEW and len(node.args) == 1 or node.op is all_gather and node in self.left_out:
                node = node.args[0]
            elif self._work.is_done_by_matmul(node):
                node = next(a for a in node.args if a.op.kind is Kind.CONTRACT)
            else:
                return node

    # -- what the backward pass makes again

    @cached_property
    def awaited(self) -> dict[Node, bool]:
        """Forward values that the backward pass reads, and whether by more than chains."""
        found: dict[Node, bool] = {}
        for n in self.program.nodes:
            if n not in self.ahead and n.op.kind is not Kind.SOURCE:
                for a in n.args:
                    b = self.base(a)
                    if b in self.ahead and b not in self.once and b.op.kind is not Kind.SOURCE:
                        found[b] = found.get(b, False) or not self.moves(n)
        return found

    @cached_property
    def remade(self) -> frozenset[Node]:
        """Of these and of what the backward pass makes of them, element by element, what the chains that read it can make again of others."""
        made: set[Node] = set()  # of values that wait alone, and of constants
        for n in self.program.nodes:
            sources = [self.base(a) for a in n.args]
            if n.op.kind is Kind.POINTWISE and all(a.op.kind is Kind.SOURCE or a in self.once or a in self.awaited or a in made for a in sources):
                made.add(n)
        return frozenset(n for n in made if not (self.awaited.get(n, False) if n in self.ahead else self._is_read_by_more(n)))

    def _is_read_by_more(self, n: Node) -> bool:
        """Whether more than chains read a value, or it is given out."""
        users = self.program.users[n]
        return bool(self.program.outputs_of(n)) or any(not self.moves(u) or (u.op.kind is Kind.VIEW and self._is_read_by_more(u)) for u in users)

    def _waits(self, n: Node) -> bool:
        """Whether chains behind read a value where it lies in memory."""
        return self.style != COMPILED or n not in self.remade

    # -- what a kernel does

    def records(self, nodes: Sequence[Node]) -> Iterator[Op]:
        """Of one kernel."""
        if len(nodes) == 1 and nodes[0].op.attends is not None:
            yield from scores_in_memory(nodes[0]) if self.style == CLASSIC else [attention_of(nodes[0])]
        elif len(nodes) == 1 and nodes[0].op.kind is Kind.VIEW:
            yield MemoryBound("copy", 2.0 * local_bytes(nodes[0]))
        elif len(nodes) == 1 and not self._may_join(nodes[0]):
            yield from self._unfused(nodes[0]) if self.style == CLASSIC else self._work.of(nodes[0])
        else:
            yield from self._chain(nodes)

    def _unfused(self, n: Node) -> Iterator[Op]:
        """One op as that system ran it: losses step by step, masks of what a lookup finds in its slice, gradients of the weights of norms
        by two kernels that read all again."""
        ahead, full = n in self.ahead, n.op.kind is Kind.COMPOSITE
        if full and n.op.across and any(not a.dtype.is_floating_point for a in n.args):
            yield MemoryBound(n.op.name, float(memory_traffic(n)) * (2 if ahead else 1), 14 if ahead else 6)
            return
        yield from self._work.of(n)
        if full and n.op.local is not None and len(n.args) > 1 and n.args[0].layout.largest_local != n.args[0].shape:
            yield MemoryBound("which are at hand", 0.0, 4)
        if full and not ahead and len(n.types) > 1:
            yield MemoryBound(f"{n.op.name} of weights", float(sum(nbytes(a.type) for a in n.args)), 2)

    def _chain(self, nodes: Sequence[Node]) -> Iterator[MemoryBound]:
        read, again = self._reads(nodes)
        moved = sum(read.values()) + sum(local_bytes(n) for n in nodes if self._is_read_outside(n, set(nodes)))
        hard = sum(float(math.prod(n.types[0].layout.largest_local)) for n in (*nodes, *again) if n.op.transcendental)
        made = MemoryBound(" ".join(dict.fromkeys(n.op.name for n in nodes)), float(moved), math=hard)
        if moved:  # a rate of its own has an op alone
            yield replace(made, kind=made.name, elements=float(_widest(nodes[0]))) if len(nodes) == 1 else made

    def _reads(self, nodes: Sequence[Node]) -> tuple[dict[Node, int], set[Node]]:
        """The values a chain reads, with the bytes of each, and those of the forward pass that it makes again."""
        read, again, todo = dict[Node, int](), set[Node](), [x for n in nodes for x in n.args]
        while todo:
            x = todo.pop()
            b = self.base(x)
            if b in nodes or b in again or b.op.kind is Kind.SOURCE:
                continue
            if nodes[0] not in self.ahead and not self._waits(b):
                again.add(b)
                todo += b.args
            else:
                read[b] = min(read.get(b, local_bytes(b)), nbytes(x.type))
        return read, again

    def _is_read_outside(self, n: Node, inside: Collection[Node], of: Node | None = None) -> bool:
        of = n if of is None else of
        readers = [u for u in self.program.users[n] if u in self.ahead or self._waits(of)]
        return bool(self.program.outputs_of(n)) or any((u.op.kind is Kind.VIEW and self._is_read_outside(u, inside, of)) or
                                                       (u.op.kind is not Kind.VIEW and u not in inside) for u in readers)  # fmt: skip


def scores_in_memory(node: Node) -> Iterator[Op]:
    """Attention or its backward as Megatron of 2021 ran it: matmuls, and kernels for the softmax and for what it drops between them."""
    *heads, rows, width = query_and_key(node)[0].type.layout.largest_local
    keys, often, back, kind = keys_of(node), math.prod(heads), bool(node.op.attends), dtype_of(node)
    for _ in range(2 if back else 1):
        yield Gemm(rows, keys, width, often, kind, node.op.name, weight=False)
    scores = float(often * rows * keys * WIDTH[kind])
    # the fused kernel takes groups of four heads x samples of one row in 16 bits; else scale, mask and softmax are a kernel each
    passes, launches = ((6, 7), (3, 3)) if WIDTH[kind] > 2 else ((2, 3), (1, 1)) if often % 4 == 0 else ((16, 12), (9, 6))
    yield MemoryBound("softmax", passes[back] * scores, launches[back], walk="memory.softmax" if WIDTH[kind] > 2 else "")
    if node.attr("p"):
        yield MemoryBound("attention dropout", 2.5 * scores)
    for _ in range(2 if back else 1):
        yield Gemm(rows, width, keys, often, kind, node.op.name, weight=False)


def scores_kept(node: Node) -> float:
    """Bytes of scores that wait for the backward then: after the softmax, and of what is dropped a mask and the result."""
    *heads, rows, _ = query_and_key(node)[0].type.layout.largest_local
    return math.prod(heads) * rows * keys_of(node) * WIDTH[dtype_of(node)] * (2.5 if node.attr("p") else 1.0)


def local_bytes(node: Node) -> int:
    """Bytes of all its values on the busiest rank."""
    return sum(nbytes(t) for t in node.types)


def _widest(node: Node) -> int:
    return max(math.prod(t.layout.largest_local) for t in node.types)


__all__ = ["CLASSIC", "COMPILED", "EAGER", "Kernels", "local_bytes", "scores_kept"]
