"""Kernels that read the same tensors and do not wait for one another become one, as Inductor has it; the pair that saves most comes first.

Two may when they walk alike: over equally many elements, or down the same columns. They must be near in the order of the program (`FAR`), lest
much waits for the later one. On an accelerator a sum down the columns of a tall tensor also joins a kernel along its rows, however far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch.fx import Node

from bench.inductor.torch_ops import alone, elements_of, has_value, over_rows, pads, reduced, size_of, summed

FAR = 64  # results between
LEAST = 10  # bytes both must read
LARGE, TALL, WIDE = 5 * 2**20, 4096, 16384  # elements and rows from which, and columns up to which, rows and columns are summed in one pass


def merge(groups: Sequence[Sequence[Node]], reads: Callable[[Node], Sequence[Node]], accelerator: bool) -> list[list[Node]]:
    """The groups, some of them joined. Each comes after those it reads; `reads` says what a node reads, looking through what is computed anew."""
    work = _Merge([list(g) for g in groups], reads, accelerator)
    while work.once():
        pass
    return [g for g in work.groups if g]


@dataclass(frozen=True)
class Walk:
    """How a kernel goes over memory: so many results, each of so many elements; down the columns or not."""

    results: int
    each: int = 1
    columns: bool = False

    @staticmethod
    def of(group: Sequence[Node]) -> Walk:
        sums = [Walk(_results(n), reduced(n), over_rows(n)) for n in group if summed(n)]
        return max(sums, key=lambda w: w.elements) if sums else Walk(max(elements_of(n) for n in group))

    @property
    def elements(self) -> int:
        return self.results * self.each

    def like(self, other: Walk) -> bool:
        if self.columns or other.columns:
            return self == other
        return self.elements == other.elements and (1 in (self.each, other.each) or self.each == other.each)

    def across(self, other: Walk) -> bool:
        """Whether one sums the rows and the other the columns of a tensor so tall that one pass over it is worth it."""
        along, down = (other, self) if self.columns else (self, other)
        if along.columns or not down.columns or (along.results, along.each) != (down.each, down.results):
            return False
        rows, columns = along.results, along.each
        return along.elements >= LARGE and rows >= max(TALL, 2 * columns) and 1 < columns <= WIDE


def _results(node: Node) -> int:
    value = node.meta["val"]
    return int((value[0] if isinstance(value, (tuple, list)) else value).numel())


class _Merge:
    """Groups by their place; one that has joined another is left empty. What a group waits for is a set of bits, one for each place."""

    def __init__(self, groups: list[list[Node]], reads: Callable[[Node], Sequence[Node]], accelerator: bool) -> None:
        self.groups, self.accelerator = groups, accelerator
        home = {n.name: i for i, group in enumerate(groups) for n in group}
        self.inputs = [{i.name: i for n in g for i in reads(n) if home.get(i.name) != at and has_value(i)} for at, g in enumerate(groups)]
        self.own = [1 << at for at in range(len(groups))]
        self.above: list[int] = []
        for at, given in enumerate(self.inputs):
            before = [home[name] for name in given if home.get(name, at) < at]
            self.above.append(_union(self.above[b] | self.own[b] for b in before))
        self.walks = [Walk.of(g) for g in groups]
        self.span = _spans(groups, {name for given in self.inputs for name in given})
        self.mixed: set[int] = set()

    def once(self) -> bool:
        """Join the pairs that may, best first. Whether there were any."""
        pairs = sorted(self._pairs(), key=lambda pair: self._gain(*pair), reverse=True)
        return sum(self._join(a, b) for a, b in pairs) > 0

    def _pairs(self) -> list[tuple[int, int]]:
        readers: dict[str, list[int]] = defaultdict(list)
        for at, group in enumerate(self.groups):
            if group and not pads(group[0]) and (not alone(group[0]) or over_rows(group[0])):
                for name in self.inputs[at]:
                    readers[name].append(at)
        found = {pair for those in readers.values() for pair in combinations(those, 2)}
        return [pair for pair in found if self._may(*pair)]

    def _shared(self, a: int, b: int) -> int:
        return sum(size_of(i) for name, i in self.inputs[a].items() if name in self.inputs[b])

    def _across(self, a: int, b: int) -> bool:
        whole = (i for name, i in self.inputs[a].items() if name in self.inputs[b] and elements_of(i) >= self.walks[a].elements)
        return self.accelerator and not {a, b} & self.mixed and self.walks[a].across(self.walks[b]) and any(whole)

    def _gain(self, a: int, b: int) -> tuple[bool, int, int, int]:
        alike = (self.walks[a].each > 1) == (self.walks[b].each > 1)
        saved = self.walks[a].elements if self._across(a, b) else self._shared(a, b)
        return alike, saved, -self._far(a, b), -a

    def _far(self, a: int, b: int) -> int:
        (first, last), (begin, end) = self.span[a], self.span[b]
        return max(abs(first - end), abs(begin - last))

    def _may(self, a: int, b: int) -> bool:
        if self.above[a] & self.own[b] or self.above[b] & self.own[a]:
            return False
        if self._across(a, b):
            return True
        near = self._far(a, b) <= FAR and self.walks[a].like(self.walks[b]) and not {a, b} & self.mixed
        return near and self._shared(a, b) >= LEAST

    def _join(self, a: int, b: int) -> bool:
        """The second into the first, if both are still there and may."""
        if not self.groups[a] or not self.groups[b] or not self._may(a, b):
            return False
        if self._across(a, b):
            self.mixed.add(a)
        self.groups[a] += self.groups[b]
        self.groups[b] = []
        self.inputs[a] |= self.inputs[b]
        self.walks[a] = max(self.walks[a], self.walks[b], key=lambda w: (w.each > 1, not w.columns))
        self.span[a] = min(self.span[a][0], self.span[b][0]), max(self.span[a][1], self.span[b][1])
        self.own[a] |= self.own[b]
        self.above[a] |= self.above[b]
        for at, group in enumerate(self.groups):
            if group and self.above[at] & self.own[a]:
                self.above[at] |= self.own[a] | self.above[a]
        return True


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _spans(groups: Sequence[Sequence[Node]], read: Collection[str]) -> list[tuple[int, int]]:
    """The first and last result of each group: kernels of their own, sums, and what other kernels read, counted through the program."""
    nodes = groups[0][0].graph.nodes if groups else ()
    made = {n.name for g in groups for n in g if alone(n) or summed(n) or n.name in read}
    count, at = 0, {}
    for node in nodes:
        count += node.name in made
        at[node.name] = count
    return [(min(at[n.name] for n in g), max(at[n.name] for n in g)) for g in groups]
