"""The layers of a captured model: where they may be split, and what of them may be recomputed.

A *matmul* multiplies by a weight. What is made between matmuls alone, and read by one, is its *middle*: an activation, or attention,
which is known by an op that mixes several activations. Ways of running a layer again, in these terms:

    activation   the middles without such an op
    ffn          these, and the matmuls they come from
    selective    all middles
    per-op       all but the mixing ops and every second matmul, matmuls of one operand being one
    full         everything
    offload      nothing: all that the backward pass reads is kept by the host
    X-offload    X, from inputs that are kept by the host

A layer may be split into two where a single value passes, between its attention and the next matmul.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from weft.core.node import Node
from weft.frontend.capture import Captured
from weft.ops.registry import Kind
from weft.plan.spec import OFFLOAD
from weft.plan.split import Cut, Forward, Region, narrow

ATTENTION, FFN, FULL = 0, 1, 2  # which half of a layer
PERIOD = 8  # blocks of a unit that repeats, at most
ROWS = 4  # of blocks of one kind each, at most
MOST_OF_IT = 0.75  # of all blocks that rows must hold for a model to be a stack


def of_host(mode: str) -> tuple[str, str]:
    """Which part of a layer a way is about, and what of it the host keeps."""
    if not mode.endswith(OFFLOAD):
        return mode, ""
    return (mode.removesuffix(f"-{OFFLOAD}"), "inputs") if mode != OFFLOAD else ("full", "all")


@dataclass(frozen=True)
class Row:
    """`count` units of `period` blocks each, the first of them after `start` others."""

    start: int
    period: int
    count: int

    @property
    def blocks(self) -> int:
        return self.period * self.count


class Layers:
    """Repeated blocks in order."""

    def __init__(self, captured: Captured) -> None:
        self.forward = Forward(captured)
        self.blocks = self.forward.blocks

    @property
    def count(self) -> int:
        return len(self.blocks)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Stretches of blocks that repeat, in order, with blocks that come once as rows of one, as dense layers before those with experts are. Where
        that makes too many rows, those that repeat alone, or the one that is most of the model."""
        every = tuple(self._rows(0, self.count))
        repeated = tuple(row for row in every if row.count > 1)
        best = max(repeated, key=lambda row: row.blocks, default=None)
        most = (best,) if best and best.blocks >= MOST_OF_IT * self.count else repeated
        return next((rows for rows in (every, repeated) if len(rows) <= ROWS), most) if repeated else ()

    def _rows(self, first: int, last: int) -> Iterator[Row]:
        best = self._longest(first, last)
        if best.count > 1:
            yield from self._rows(first, best.start)
            yield best
            yield from self._rows(best.start + best.blocks, last)
        else:
            yield from (Row(i, 1, 1) for i in range(first, last))

    def _longest(self, first: int, last: int) -> Row:
        """The longest stretch of some blocks that repeats, alone or with neighbours of other kinds; of equal ones that of the shorter unit."""
        kinds = {id(b): g for g, group in enumerate(self.forward.captured.blocks) for b in group}
        kind, best = [kinds[id(b)] for b in self.blocks], Row(first, 1, 0)
        for period in range(1, min(PERIOD, (last - first) // 2) + 1):
            start = first
            for i in range(first, last + 1):
                goes_on = i < last and (i < start + period or kind[i] == kind[i - period]) and (i == start or self._follows(i))
                if not goes_on:
                    found = Row(start, period, (i - start) // period)
                    best = max(best, found if self._same_ends(found) else best, key=lambda r: (r.blocks, -r.period))
                    start = i if i == start + 1 or i < start + period else max(start + 1, i - period + 1)
        return best

    def _follows(self, i: int) -> bool:
        """Whether a block reads what the one before it gives."""
        return any(x in self.blocks[i].inputs for x in self.forward.given(self.blocks[i - 1]))

    def _same_ends(self, row: Row) -> bool:
        """Whether every unit gives as much as the first, of the same types."""
        ends = [[n.type for n in self.forward.given(self.blocks[i])] for i in range(row.start + row.period - 1, row.start + row.blocks, row.period)]
        return row.count > 1 and all(e == ends[0] for e in ends)

    def nodes(self, k: int, half: int = FULL) -> list[Node]:
        """Of a layer, or of half of one that has a middle, in order."""
        own = sorted((n for n in self.blocks[k].nodes if n in self.forward.at), key=self.forward.at.__getitem__)
        if half == FULL:
            return own
        middle = self.middle(k)
        before = self._before(middle, set(own)) if middle is not None else set()
        return [n for n in own if (n in before) == (half == ATTENTION)]

    def _before(self, end: Node, own: set[Node]) -> set[Node]:
        found, todo = set[Node](), [end]
        while todo:
            n = todo.pop()
            if n in own and n not in found:
                found.add(n)
                todo += n.args
        return found

    # -- where they may be split

    def end(self, halves: int) -> Cut | None:
        """The values that pass after so many half layers; None where that is no place to split."""
        if halves == 0:
            return tuple(n for n in self.blocks[0].inputs if n in self.forward.active) or None
        if halves % 2 == 0:
            return self.forward.given(self.blocks[halves // 2 - 1])
        middle = self.middle(halves // 2)
        return None if middle is None else (middle,)

    def middle(self, k: int) -> Node | None:
        """The value that attention hands to the feed-forward, where it passes alone."""
        nodes = self.nodes(k)
        readers = [product for product, made, _ in self._middles(nodes) if self._has_mixing(made)]
        if len(readers) != 1:
            return None
        after = nodes.index(readers[0])
        until = next((i for i, n in enumerate(nodes) if i > after and (n in self._products or self._mixes(n))), len(nodes))
        alone = narrow(nodes, self.forward.active, self.forward.given(self.blocks[k]))
        between = [i for i in alone if after < i < until]
        return nodes[between[-1]] if between else None

    # -- what may be recomputed

    def again(self, k: int, mode: str, half: int = FULL) -> list[Region]:
        """The regions of a layer that are recomputed in this way, or kept by the host; none where it has no such part."""
        part, host = of_host(mode)
        if host:
            return [replace(r, host=host) for r in self.again(k, part, half)]
        nodes = self.nodes(k, half)
        within = frozenset(nodes)
        if mode == "full":
            return [Region(within, within)] if nodes else []
        if mode == "per-op":
            return [Region(frozenset(self._but_every_second(nodes)), within)]
        chosen = [(made, sources) for _, made, sources in self._middles(nodes) if mode == "selective" or not self._has_mixing(made)]
        return [Region(frozenset(made | sources if mode == "ffn" else made), within) for made, sources in chosen]

    def _middles(self, nodes: Collection[Node]) -> Iterator[tuple[Node, set[Node], set[Node]]]:
        """A matmul, what stands between it and others, and these; of what several read, the first alone."""
        own, seen = set(nodes), set[Node]()
        for p in (n for n in nodes if n in self._products):
            found, sources, todo = set[Node](), set[Node](), [a for a in p.args if a in self.forward.active]
            while todo:
                n = todo.pop()
                if n not in own:
                    break
                if n in self._products:
                    sources.add(n)
                elif n not in found:
                    found.add(n)
                    todo += [a for a in n.args if a in self.forward.active]
            else:
                if found - seen:
                    yield p, found - seen, sources
                    seen |= found

    def _but_every_second(self, nodes: Collection[Node]) -> Iterator[Node]:
        seen = dict[Node, int]()
        for n in nodes:
            if n in self._products:
                operand = next(a for a in n.args if a in self.forward.active)
                if seen.setdefault(operand, len(seen)) % 2 == 0:
                    continue
            if n in self.forward.active and not self._mixes(n):
                yield n

    def _has_mixing(self, nodes: Collection[Node]) -> bool:
        return any(self._mixes(n) for n in nodes)

    def _mixes(self, n: Node) -> bool:
        """Not an op on single elements, and one of several activations."""
        return n.op.kind in (Kind.COMPOSITE, Kind.CONTRACT) and len({a for a in n.args if a in self.forward.active}) > 1

    @cached_property
    def _products(self) -> set[Node]:
        active, fixed = self.forward.active, self.forward.fixed
        every = (n for b in self.blocks for n in b.nodes if n.op.kind is Kind.CONTRACT and len(n.args) == 2)
        return {n for n in every if sum(a in active for a in n.args) == 1 and any(a in fixed for a in n.args)}


__all__ = ["ATTENTION", "FFN", "FULL", "Layers", "Row"]
