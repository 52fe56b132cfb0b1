"""A schedule as the index arrays kernels read, exact or padded to a template.

A template fixes how many rows every round may have, so that all shapes are known before the graphs are: what was recorded for one
batch can be replayed for the next. Rows that no vertex takes have no readers, so their gradient is zero and they change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.dynamic import native
from weft.dynamic.native import Ints
from weft.dynamic.schedule import Block, Round, Schedule
from weft.dynamic.store import Key


@dataclass(frozen=True)
class Layout:
    """Blocks and rounds of rows, and the arrays that say who is where. `place` maps vertices to rows."""

    blocks: dict[int, Block]
    rounds: Sequence[Round]
    rows: int  # row `rows`, one past the last, stands for an absent child: it is zero
    edges: int
    arrays: dict[str, Ints]
    place: Ints
    gaps: frozenset[int]  # classes in which some row has no input

    @cached_property
    def packed(self) -> Ints:
        """All arrays after each other, to go to a device in one copy."""
        return np.concatenate(list(self.arrays.values()))

    def slices(self) -> dict[str, tuple[int, int]]:
        """Where each array is in `packed`."""
        ends = np.cumsum([len(a) for a in self.arrays.values()]).tolist()
        return {name: (end - len(a), end) for (name, a), end in zip(self.arrays.items(), ends, strict=True)}


def exact(s: Schedule, sent: set[Key]) -> Layout:
    """No row too many."""
    return s.keep(("exact", frozenset(sent)), lambda: _exact(s, sent))


def _exact(s: Schedule, sent: set[Key]) -> Layout:
    arrays = {
        "edge_first": s.edge_first, "edge_child": s.edge_child, "edge_vertex": s.edge_parent,
        "row": s.rows,
    }  # fmt: skip
    arrays |= {f"slot{k}": child for k, child in enumerate(s.slot_child)}
    n = s.structure.vertices
    gaps = (k for k, (low, _) in s.row_range.items() if low < 0)
    return Layout(s.blocks, s.rounds, n, len(s.edge_child), arrays | _readers(arrays, n, sent), s.place, frozenset(gaps))


def _readers(arrays: dict[str, Ints], rows: int, sent: set[Key]) -> dict[str, Ints]:
    """Who reads each row, in the ways in which gradients are sent."""
    out: dict[str, Ints] = {}
    hows = {how for _, how in sent}
    if hows & {"edge", "vertex"}:
        first, edge = native.reverse(arrays["edge_child"], rows + 1)
        out |= {"reader_first": first, "reader_edge": edge, "reader_vertex": arrays["edge_vertex"][edge]}
    for name in [a for a in arrays if a.startswith("slot") and a in hows]:
        out[f"{name}_first"], out[f"{name}_reader"] = native.reverse(arrays[name], rows + 1)
    return out


@dataclass(frozen=True)
class RoundLimits:
    """What one round may hold."""

    klass: int
    rows: int
    edges: int

    def holds(self, r: Round) -> bool:
        """Spare edges need a spare row."""
        rows, edges = self.rows - (r.stop - r.start), self.edges - (r.edge_stop - r.edge_start)
        return self.klass == r.klass and rows >= (edges > 0) and edges >= 0


@dataclass(frozen=True, eq=False)  # compared often, as a key: by identity
class Template:
    """How many rows and edges each round may have."""

    rooms: tuple[RoundLimits, ...]
    slots: int

    def fit(self, s: Schedule) -> tuple[Schedule, list[int]] | None:
        """A schedule of the same graphs that fits, and for each of its rounds the room that takes it; None if there is none."""
        taken = self.holds(s)
        if taken is None and len(s.slot_child) <= self.slots:
            return s.seated(np.array([(room.klass, room.rows, room.edges) for room in self.rooms], np.int64).reshape(-1, 3))
        return None if taken is None else (s, taken)

    def holds(self, s: Schedule) -> list[int] | None:
        """For each round of a schedule the room that takes it, or None if it does not fit."""
        taken, at = [], 0
        for r in s.rounds:
            while at < len(self.rooms) and not self.rooms[at].holds(r):
                at += 1
            if at == len(self.rooms):
                return None
            taken.append(at)
            at += 1
        return taken if len(s.slot_child) <= self.slots else None

    @cached_property
    def cost(self) -> int:
        """In rows: a round costs about as much as some hundred."""
        return sum(room.rows + 100 for room in self.rooms)

    def seat(self, s: Schedule, taken: list[int]) -> tuple[dict[int, Block], list[Round], Ints]:
        """Blocks and rounds, each class with its own run of rows, and the row at which each round of the schedule begins."""
        rounds, used = _after_each_other(self.rooms)
        blocks = _blocks(used)
        return blocks, rounds, np.array([blocks[rounds[at].klass].start + rounds[at].start for at in taken], np.int64)


def _after_each_other(rooms: Sequence[RoundLimits]) -> tuple[list[Round], dict[int, tuple[int, int]]]:
    """Rounds that fill their rooms, and the rows and edges each class has then."""
    rounds, used = list[Round](), dict[int, tuple[int, int]]()
    for room in rooms:
        row, edge = used.get(room.klass, (0, 0))
        used[room.klass] = row + room.rows, edge + room.edges
        rounds.append(Round(room.klass, row, row + room.rows, edge, edge + room.edges))
    return rounds, used


def _blocks(used: dict[int, tuple[int, int]]) -> dict[int, Block]:
    """The classes after each other."""
    blocks, at, edge = dict[int, Block](), 0, 0
    for k in sorted(used):
        blocks[k] = Block(k // 2, bool(k % 2), at, used[k][0], edge, used[k][1])
        at, edge = at + used[k][0], edge + used[k][1]
    return blocks


def template(s: Schedule, before: Template | None = None) -> Template:
    """A template with room for this schedule, others like it, and all that fitted `before`.

    What finds no room in its round may wait for a later one of its class, so rounds have little to spare, unless they are the only one.
    """
    rounds = Counter(r.klass for r in s.rounds)
    rooms = [_room(r, 0.5 if rounds[r.klass] > 1 else 4.0) for r in s.rounds]
    if rooms:  # graphs a little deeper than these
        rooms += [RoundLimits(rooms[-1].klass, 8, -(-8 * rooms[-1].edges // rooms[-1].rows))] * (6 if before else 2)
    if before is not None:
        rooms = _join(rooms, list(before.rooms))
    return Template(tuple(rooms), max(len(s.slot_child), before.slots if before else 0))


def _room(r: Round, slack: float) -> RoundLimits:
    """Room for a few more than a round has, in eights: there are always spare rows to take the spare edges."""
    rows, edges = r.stop - r.start, r.edge_stop - r.edge_start
    more = -(-int(rows + slack * rows**0.5 + 3) // 8) * 8
    return RoundLimits(r.klass, more, max(-(-more * edges // rows), int(edges + slack * edges**0.5)))


def _join(a: list[RoundLimits], b: list[RoundLimits]) -> list[RoundLimits]:
    """A sequence of rooms that holds what either holds."""
    out, i, j = list[RoundLimits](), 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i].klass == b[j].klass:
            out.append(RoundLimits(a[i].klass, max(a[i].rows, b[j].rows), max(a[i].edges, b[j].edges)))
            i, j = i + 1, j + 1
        elif j == len(b) or (i < len(a) and a[i].klass in {room.klass for room in b[j:]}):
            out.append(a[i])
            i += 1
        else:
            out.append(b[j])
            j += 1
    return out


def padded(s: Schedule, taken: list[int], t: Template, sent: set[Key]) -> Layout:
    """The schedule in the rows of a template."""
    blocks, rounds, starts = t.seat(s, taken)
    rows, edges = sum(b.count for b in blocks.values()), sum(b.edge_count for b in blocks.values())
    order = np.argsort(s.round_start, kind="stable")
    new = np.append(native.spans(starts[order], s.round_size[order]), rows)  # old place -> new, and the row of zeros
    degree, old_degree = np.zeros(rows, np.int64), np.diff(s.edge_first)
    degree[new[:-1]] = old_degree
    _spare_edges(degree, new[:-1], blocks, rounds)
    first = np.zeros(rows + 1, np.int64)
    np.cumsum(degree, out=first[1:])
    child = np.full(edges, rows, np.int64)
    child[native.spans(first[new[:-1]], old_degree)] = new[s.edge_child]
    row = np.full(rows, -1, np.int64)
    row[new[:-1]] = s.rows
    arrays = {"edge_first": first, "edge_child": child, "edge_vertex": np.repeat(np.arange(rows), degree), "row": row}
    for k in range(t.slots):
        arrays[f"slot{k}"] = np.full(rows, rows, np.int64)
        if k < len(s.slot_child):
            arrays[f"slot{k}"][new[:-1]] = new[s.slot_child[k]]
    arrays |= _readers(arrays, rows, sent)
    out = Layout(blocks, rounds, rows, edges, arrays, new[s.place], frozenset(blocks))
    out.packed  # noqa: B018 - worked out now, ahead of the run
    return out


def _spare_edges(degree: Ints, used: Ints, blocks: dict[int, Block], rounds: Sequence[Round]) -> None:
    """Edges no vertex has go to rows of the same round that no vertex has, evenly, so that no row is slow."""
    free = np.ones(len(degree), bool)
    free[used] = False
    for r in rounds:
        start = blocks[r.klass].start
        here = slice(start + r.start, start + r.stop)
        rows = np.flatnonzero(free[here]) + here.start
        spare = r.edge_stop - r.edge_start - int(degree[here].sum())
        if spare:
            degree[rows] = spare // len(rows) + (np.arange(len(rows)) < spare % len(rows))
