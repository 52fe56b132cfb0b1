"""Fused groups over vertices and the edges to their children: rows that indices name, and sums over the edges of each vertex.

The kernel works on vertices v in [lo, hi) and columns j; column j of a value depends only on column j of others. A value that reads a row of an
edge e belongs to the edge, and `segment` makes one of the vertex from those of its edges. A pass over the edges comes before all that reads what it
adds up: level i of a value says how many passes it must wait for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from weft.codegen.expr import Level, Slot, Value, make, ordered
from weft.codegen.text import Writer, bare, uses


@dataclass(frozen=True)
class RowSlot(Slot):
    """A tensor of which a kernel reads or writes one row for a vertex or an edge.

    `of` is the row, or the place in the array `via` that names it, in v, e, lo and the first edges e0 of the call and eb of the class. Column j lies at
    offset + sum over dims of (j / after % size) * stride.
    """

    pointer: Hashable = None
    of: str = "v"
    via: Hashable = None
    columns: int = 0  # of a row; 0: it has no rows
    offset: int = 0
    dims: tuple[tuple[int, int, int], ...] = ()  # (after, size, stride), slowest first

    @property
    def of_edge(self) -> bool:
        return self.of.startswith("e")

    def column(self, lane: str, over: str = "/") -> str:
        """The address of a column within the row."""
        terms = [str(self.offset)] if self.offset else []
        for i, (after, size, stride) in enumerate(self.dims):
            if stride:
                at = lane if after == 1 else f"({lane} {over} {after})"
                at = at if i == 0 else f"({at} % {size})"
                terms.append(at if stride == 1 else f"{at} * {stride}")
        return " + ".join(terms) or "0"


@dataclass(frozen=True)
class Messages(Slot):
    """What the readers of a vertex sent it: of each (rows, first, index) the sum of the rows index[first[v]] up to index[first[v + 1]]."""

    paths: tuple[tuple[Hashable, Hashable, Hashable], ...] = ()


def segment(value: Value, op: str = "sum") -> Value:
    """The sum or maximum over the edges of a vertex; 0 where it has none."""
    return make("segment", (value,), name=op)


@dataclass(frozen=True)
class RowGroup:
    """What one kernel stores. `first` is the array that says where the edges of each vertex begin, `real` the type arithmetic is done in."""

    lanes: int
    real: str
    first: Hashable
    stores: tuple[tuple[RowSlot, Value], ...]


class RowEmitter:
    """A row group on its way to text. A subclass says what the language is like."""

    def __init__(self, group: RowGroup, name: str) -> None:
        self.group, self.name = group, name
        self.arguments: dict[Hashable, str] = {}  # pointers in order, and of what type they are
        self.values = list(ordered(v for _, v in group.stores))
        self.names = {v: f"{'x' if v.fn == 'load' else 't'}{i}" for i, v in enumerate(self.values)}
        self.level: dict[Value, int] = {}
        self.of_edges: set[Value] = set()
        for v in self.values:
            self.level[v] = max((self.level[a] for a in v.args), default=0) + (v.fn == "segment")
            if v.fn != "segment" and (isinstance(v.slot, RowSlot) and v.slot.of_edge or any(a in self.of_edges for a in v.args)):
                self.of_edges.add(v)
        self.kept = self._kept()
        self.known: dict[Value, str] = {}  # made by an earlier pass, and its text

    def at(self, pointer: Hashable, dtype: str = "i64") -> str:
        """The name of an argument."""
        self.arguments.setdefault(pointer, dtype)
        return f"p{list(self.arguments).index(pointer)}"

    def body(self) -> Iterator[str]:
        """All that happens to one vertex, pass after pass."""
        for v in self.values:
            if isinstance(v.slot, Messages):
                yield from self.collect(v, v.slot)
                self.known[v] = self.reload(v)
        for level in range(1 + max(self.level.values())):
            yield from self._vertices(level)
            yield from self._edges(level)

    def _vertices(self, level: int) -> Iterator[str]:
        keep = [v for v in self.kept if self.level[v] == level and v not in self.known]
        stores = [(slot, v) for slot, v in self.group.stores if not slot.of_edge and self.level[v] == level]
        if keep or stores:
            yield from self._sweep(stores, keep)

    def _edges(self, level: int) -> Iterator[str]:
        """One pass over the edges: what is stored of them, and the sums that wait for it."""
        sums = [v for v in self.values if v.fn == "segment" and self.level[v] == level + 1]
        stores = [(slot, v) for slot, v in self.group.stores if slot.of_edge and self.level[v] == level]
        if sums or stores:
            yield from self.over_edges(sums, list(self._sweep(stores, sums=sums)))
            self.known |= {v: self.reload(v) for v in sums}

    def _sweep(self, stores: list[tuple[RowSlot, Value]], keep: Iterable[Value] = (), sums: Iterable[Value] = ()) -> Iterator[str]:
        """The statements of one pass: values, what is kept for later passes, stores and sums."""
        ends = [*keep, *(v for _, v in stores), *(v.args[0] for v in sums)]
        writer, lines, needed = self.writer(), list[str](), self._needed(ends)
        writer.names |= self.known
        count = uses(needed)
        for v in needed:
            if v.fn == "load":
                assert isinstance(v.slot, RowSlot)
                lines += self.define(v, self.read(v.slot))
            elif count.get(v, 0) + ends.count(v) > 1 or v in self.kept:
                lines += self.define(v, bare(writer.text(v)))
            else:
                continue
            writer.name(v, self.names[v])
        lines += [self.store(slot, bare(writer.text(v))) for slot, v in stores]
        lines += [self.add(v, bare(writer.text(v.args[0]))) for v in sums]
        yield from self.columns(lines)
        self.known |= {v: self.reload(v) for v in keep}

    def _needed(self, ends: list[Value]) -> list[Value]:
        """What is to be worked out for `ends` of what varies and is not known yet, arguments first."""
        found, todo = set[Value](), list(ends)
        while todo:
            v = todo.pop()
            if v not in self.known and v not in found and (v.level is Level.ELEMENT or v in ends):
                found.add(v)
                todo += v.args
        return [v for v in self.values if v in found]

    def _kept(self) -> list[Value]:
        """What is worked out of a vertex in one pass and read in another."""
        made = [v for v in self.values if v.fn not in ("load", "segment") and v not in self.of_edges and v.level is Level.ELEMENT]
        by_edges = {a for v in self.values if v in self.of_edges or v.fn == "segment" for a in v.args}
        by_edges |= {v for slot, v in self.group.stores if slot.of_edge}
        later = {a for v in self.values for a in v.args if self.level[a] != self.level[v]}
        return [v for v in made if v in by_edges or v in later]

    # -- what a language says --------------------------------------------------------------------------------------------------------

    def writer(self) -> Writer:
        raise NotImplementedError

    def collect(self, value: Value, slot: Messages) -> Iterator[str]:
        """Add up what was sent."""
        raise NotImplementedError

    def reload(self, value: Value) -> str:
        """A value in a later pass than the one that made it."""
        raise NotImplementedError

    def read(self, slot: RowSlot) -> str:
        raise NotImplementedError

    def define(self, value: Value, text: str) -> list[str]:
        """Give a value its name, and keep it if a later pass reads it."""
        raise NotImplementedError

    def store(self, slot: RowSlot, text: str) -> str:
        raise NotImplementedError

    def add(self, total: Value, text: str) -> str:
        """One edge more in a sum or maximum."""
        raise NotImplementedError

    def columns(self, lines: list[str]) -> Iterator[str]:
        """Statements, for every column."""
        raise NotImplementedError

    def over_edges(self, sums: list[Value], lines: list[str]) -> Iterator[str]:
        """Statements for every edge of the vertex, sums from their start to their end."""
        raise NotImplementedError
