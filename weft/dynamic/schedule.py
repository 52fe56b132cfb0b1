"""A structure laid out for running: rounds, the place of every vertex, and who reads whom, all as arrays.

A class is a type of vertex with or without children. Each class owns one block of rows in every buffer; inside it the
vertices lie round after round, and inside a round in the order in which later rounds read them. So a round is a
slice, all vertices of a class are a slice, and the children of a round are often one too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import StructureError
from weft.core.picture import html_of
from weft.dynamic import native
from weft.dynamic.native import Ints
from weft.dynamic.policy import Policy, batches, lower_bound, policy
from weft.dynamic.structure import NO_CHILD, Structure

T = TypeVar("T")


REST = -1  # stands for the children read together


@dataclass(frozen=True)
class Reads:
    """What a vertex function reads of its children: the first `slots` one by one, and perhaps the rest together."""

    slots: int = 0
    rest: bool = False
    optional: frozenset[int] = frozenset()  # which of the slots, or the `REST`, may be absent and then read zeros

    @property
    def needs(self) -> int:
        """How many children a vertex that has any must have."""
        return max((k + 1 for k in range(self.slots) if k not in self.optional), default=0)


@dataclass(frozen=True)
class Block:
    """The rows of one class."""

    kind: int
    has_children: bool
    start: int
    count: int
    edge_start: int
    edge_count: int

    def name(self, kinds: Sequence[str]) -> str:
        """Of its class: the type, and a plus where it has children."""
        return f"{kinds[self.kind]}{'+' if self.has_children else ''}"


class Round(NamedTuple):
    """One batch: rows and edges counted from the beginning of the class's block."""

    klass: int
    start: int
    stop: int
    edge_start: int
    edge_stop: int

    @property
    def span(self) -> tuple[int, int, int, int]:
        return self.start, self.stop, self.edge_start, self.edge_stop


class Schedule:
    """Where every vertex is and when it runs. Place `vertices` (one past the last) is a row of zeros: no child."""

    def __init__(self, structure: Structure, reads: Mapping[str, Reads], policy: str | Policy = "auto") -> None:
        s = self.structure = structure
        self._kept: dict[Hashable, Any] = {}
        self.reads = [reads[k] if k in reads else _unknown(s, i, reads) for i, k in enumerate(s.kinds)]
        self.policy = policy
        by_level = self._levels() if policy in ("auto", "depth") else None
        if by_level is None:
            self._step_by_step()
        else:
            self._take(by_level)

    def _levels(self) -> native.Levels | None:
        """All at once where every level holds one class and every vertex has the children it reads, as in most graphs."""
        s = self.structure
        slots, rest = [r.slots for r in self.reads], [r.rest for r in self.reads]
        return native.levels(s.first, s.child, s.kind, s.row, s.depth, slots, rest)

    def _take(self, found: native.Levels) -> None:
        self.klass, self.vertex, self.place = found.klass, found.vertex, found.place
        self.batch = self.structure.depth
        self.round_klass, self.round_start, self.round_size = found.rounds.T
        self.rows = found.rows
        self.row_range = {k: (low, high) for k, (low, high) in enumerate(found.range.tolist()) if high >= low}
        self.edge_first, self.edge_child, self.edge_parent = found.edge_first, found.edge_child, found.edge_parent
        self.slot_child = self._slots_of(lambda: self.structure.arity[self.vertex])

    def _step_by_step(self) -> None:
        s = self.structure
        slots, rest = (_per_vertex(s, [getattr(r, name) for r in self.reads]) for name in ("slots", "rest"))
        _check_arity(s, self.reads, slots, rest)
        self.klass = s.kind * 2 + (s.arity > 0)
        self.batch = (policy(self.policy) if isinstance(self.policy, str) else self.policy)(s, self.klass)
        self._place_vertices()
        self._edges(slots, rest)

    def __getstate__(self) -> dict[str, Any]:
        """As it goes to another process: without what models keep with it."""
        return {**self.__dict__, "_kept": {}}

    def _repr_html_(self) -> str:
        return html_of(self)

    def seated(self, rooms: Ints) -> tuple[Schedule, list[int]] | None:
        """The same graphs in rooms (class, rows, edges) that run in order, and the rooms taken; vertices that need not run yet may wait."""
        s = self.structure
        slots, rest = (_per_vertex(s, [getattr(r, name) for r in self.reads]) for name in ("slots", "rest"))
        degree = np.where(rest, s.arity - np.minimum(slots, s.arity), 0)
        room = native.seat(s.first, s.child, s.depth, self.klass, degree, rooms)
        if room is None:
            return None
        used = np.bincount(room, minlength=len(rooms)) > 0
        batch = (np.cumsum(used) - 1)[room]
        return Schedule(s, dict(zip(s.kinds, self.reads, strict=True)), lambda *_: batch), np.flatnonzero(used).tolist()

    def _place_vertices(self) -> None:
        """Order the vertices, then place them: the blocks of the classes, in each the rounds in the order they run."""
        s, count = self.structure, batches(self.batch)
        sizes = np.bincount(self.batch, minlength=count) if count else np.empty(0, np.int64)
        start = np.zeros(count + 1, np.int64)
        np.cumsum(sizes, out=start[1:])
        by_round = native.order(s.first, s.child, self.batch, start)
        of_round = self.klass[by_round[start[:-1]]] if count else np.empty(0, np.int64)  # the class each round runs
        runs = np.argsort(of_round, kind="stable")
        self.vertex = by_round[native.spans(start[runs], sizes[runs])]
        self.place = np.empty(s.vertices + 1, np.int64)
        self.place[self.vertex] = np.arange(s.vertices)
        self.place[s.vertices] = s.vertices  # absent children (-1) index this
        placed = np.zeros(count, np.int64)
        placed[runs] = np.cumsum(sizes[runs]) - sizes[runs]
        self.round_klass, self.round_start, self.round_size = of_round, placed, sizes

    def _edges(self, slots: NDArray[Any], rest: NDArray[Any]) -> None:
        """Edges to the rest of the children, by place of the parent; and one array per slot."""
        s, v = self.structure, self.vertex
        arity = s.arity[v]
        slots, rest = (a if a.ndim == 0 else a[v] for a in (slots, rest))
        fixed = np.minimum(slots, arity)
        degree = np.where(rest, arity - fixed, 0)
        self.edge_first, self.edge_child, self.edge_parent = native.edges(s.first, s.child, v, fixed, degree, self.place)
        self.slot_child = self._slots_of(lambda: arity)

    def _slots_of(self, arity: Callable[[], Ints]) -> list[Ints]:
        """Where the k-th child of every place is, for each k that some type reads."""
        most = max((r.slots for r in self.reads), default=0)
        if not most:
            return []
        slots = _per_vertex(self.structure, [r.slots for r in self.reads])
        slots, count = slots if slots.ndim == 0 else slots[self.vertex], arity()
        return [self._slot(k, count, slots) for k in range(most)]

    def _slot(self, k: int, arity: Ints, slots: Ints) -> Ints:
        s, v = self.structure, self.vertex
        has = (arity > k) & (slots > k)
        at = np.where(has, s.first[v] + k, 0)
        child = np.where(has, s.child[at], NO_CHILD) if len(s.child) else np.full(len(v), NO_CHILD)
        return self.place[child]

    @cached_property
    def row_range(self) -> dict[int, tuple[int, int]]:
        """The lowest and the highest input row of every class."""
        found = {k: self.rows[b.start : b.start + b.count] for k, b in self.blocks.items()}
        return {k: (int(rows.min()), int(rows.max())) for k, rows in found.items()}

    @cached_property
    def rows(self) -> Ints:
        """The input row of every place."""
        return self.structure.row[self.vertex]

    @cached_property
    def blocks(self) -> dict[int, Block]:
        """The rows and edges of every class that occurs."""
        counts: dict[int, int] = {}
        for k, size in zip(self.round_klass.tolist(), self.round_size.tolist(), strict=True):
            counts[k] = counts.get(k, 0) + size
        out, low = {}, 0
        for k in sorted(counts):
            high = low + counts[k]
            edges = int(self.edge_first[low]), int(self.edge_first[high])
            out[k] = Block(k // 2, bool(k % 2), low, high - low, edges[0], edges[1] - edges[0])
            low = high
        return out

    @cached_property
    def rounds(self) -> list[Round]:
        """The batches in the order they run."""
        low, high = self.round_start, self.round_start + self.round_size
        columns = (self.round_klass, low, high, self.edge_first[low], self.edge_first[high])
        blocks = self.blocks
        out = []
        for k, start, stop, edge_start, edge_stop in zip(*(c.tolist() for c in columns), strict=True):
            row, edge = blocks[k].start, blocks[k].edge_start
            out.append(Round(k, start - row, stop - row, edge_start - edge, edge_stop - edge))
        return out

    @cached_property
    def lower_bound(self) -> int:
        return lower_bound(self.structure, self.klass)

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once: layouts for this or that run are kept with their schedule."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @cached_property
    def gathered(self) -> int:
        """Rows a round must copy together because the children it reads one by one do not already lie in order."""
        copied = 0
        for r in (r for r in self.rounds if self.blocks[r.klass].has_children):
            low = self.blocks[r.klass].start
            for child in self.slot_child[: self.reads[self.blocks[r.klass].kind].slots]:
                at = child[low + r.start : low + r.stop]
                copied += 0 if len(at) == 0 or (np.diff(at) == 1).all() else len(at)
        return copied


def _per_vertex(s: Structure, of_kind: list[Any]) -> NDArray[Any]:
    """A fact about types for every vertex; one number where there is one type."""
    facts = np.array(of_kind)
    return facts[0] if len(facts) == 1 else facts[s.kind]


def _check_arity(s: Structure, reads: list[Reads], slots: NDArray[Any], rest: NDArray[Any]) -> None:
    """A vertex has no children, or as many as its function reads."""
    wrong = (s.arity > slots) & ~rest
    if slots.any():
        wrong |= (s.arity > 0) & (s.arity < _per_vertex(s, [r.needs for r in reads]))
    if wrong.any():
        v = int(np.argmax(wrong))
        sample, number = s.sample_of(v)
        own = reads[s.kind[v]]
        wanted = f"{own.slots}{' or more' if own.rest else ''}"
        raise StructureError(
            f"sample {sample}: vertex {number} has {s.arity[v]} children",
            needed=f"{wanted} children, as its type {s.kinds[s.kind[v]]!r} reads, or none",
            found=f"{s.arity[v]}",
            try_="read any number with v.gather(name) and v.reduce, or allow absent ones with optional=True",
        )
    if s.child.min(initial=0) < 0:
        _check_absent(s, reads)


def _check_absent(s: Structure, reads: list[Reads]) -> None:
    for at in np.flatnonzero(s.child == NO_CHILD).tolist():
        v = int(np.searchsorted(s.first, at, side="right")) - 1
        own, k = reads[s.kind[v]], at - int(s.first[v])
        if (k if k < own.slots else REST) not in own.optional:
            sample, number = s.sample_of(v)
            raise StructureError(
                f"sample {sample}: vertex {number} lacks child {k}",
                needed=f"all children that type {s.kinds[s.kind[v]]!r} reads",
                found="an absent child (None or -1)",
                try_="gather it with optional=True, which reads zeros",
            )


def _unknown(s: Structure, kind: int, reads: Mapping[str, Reads]) -> Reads:
    of_kind = np.flatnonzero(s.kind == kind)
    if not len(of_kind):
        return Reads()
    sample, number = s.sample_of(int(of_kind[0]))
    raise StructureError(
        f"sample {sample}: vertex {number} has a type the model does not know",
        needed=" or ".join(repr(k) for k in reads), found=repr(s.kinds[kind]),
    )  # fmt: skip
