"""Split a fused group where a total over all ranks must be known before work can go on.

Phase p of a value: 0 for what is in memory, max over arguments, plus one for a total.
What a later phase needs is read again or computed again, whichever moves fewer bytes. Over the values v of a phase:
    choose the cheapest set C of values to read, so that every needed value is computed from C alone
which is a minimum vertex separator: cost(v) is the bytes to read v (a reduce reads every rank's copy), plus the bytes to have
written it where no slot holds it; infinite where v did not exist before this phase.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.codegen.expr import BYTES, Group, Level, Slot, Value, load, ordered


@dataclass
class Phase:
    """One sweep over all rows: values to read, values to compute in order, what to store and what to add up."""

    number: int
    stores: list[tuple[Slot, Value]] = field(default_factory=list)
    totals: list[Value] = field(default_factory=list)
    reads: dict[Value, Value] = field(default_factory=dict)  # a value and the load or reduce that brings it
    body: list[Value] = field(default_factory=list)  # per-element values, arguments first, reads left out


@dataclass(frozen=True)
class PhasedGroup:
    """A group in phases; `stash` are the slots added to carry values from one phase to a later one."""

    group: Group
    phases: tuple[Phase, ...]
    stash: tuple[Slot, ...]
    totals: tuple[Value, ...]


def split_phases(group: Group, world: int) -> PhasedGroup:
    """Divide `group` into phases, moving the fewest bytes over `world` ranks."""
    return _PhaseSplitter(group, world).split()


class _PhaseSplitter:
    def __init__(self, group: Group, world: int) -> None:
        self.group, self.world = group, world
        self.values = list(ordered(group.roots))
        self.when: dict[Value, int] = {}
        for v in self.values:
            self.when[v] = max((self.when[a] for a in v.args), default=0) + (v.fn == "total")
        last = max([*(self.when[v] for _, v in group.stores), *(self.when[v] - 1 for v in group.numbers)])
        self.phases = [Phase(p) for p in range(last + 1)]
        self.stash: list[Slot] = []

    def split(self) -> PhasedGroup:
        for slot, value in self.group.stores:
            self.phases[self.when[value]].stores.append((slot, value))
        totals = [v for v in self.values if v.fn == "total"]
        for value, number in self._latest(totals).items():
            self.phases[number].totals.append(value)
        for phase in reversed(self.phases):  # a later phase may ask an earlier one to store more
            self._fill(phase)
        return PhasedGroup(self.group, tuple(self.phases), tuple(self.stash), tuple(totals))

    def _latest(self, totals: list[Value]) -> dict[Value, int]:
        """The last phase in which each total can still be taken: late ones often read what is read anyway."""
        due = dict.fromkeys(self.values, math.inf)
        due.update(dict.fromkeys(self.group.numbers, len(self.phases)))
        due.update({v: self.when[v] for _, v in self.group.stores})
        for v in reversed(self.values):
            for a in v.args:
                due[a] = min(due[a], due[v] - (v.fn == "total"))
        return {t: int(due[t]) - 1 for t in totals}

    def _fill(self, phase: Phase) -> None:
        ends = [*(v for _, v in phase.stores), *(t.args[0] for t in phase.totals)]
        needed = [v for v in ends if v.level == Level.ELEMENT]
        for v in min_vertex_cut(needed, lambda v: self._cost(v, phase)):
            phase.reads[v] = self._reader(v, phase)
        below = _reachable(needed, set(phase.reads))
        phase.body = [v for v in ordered(needed) if v in below - set(phase.reads) and v.level == Level.ELEMENT]

    def _cost(self, v: Value, phase: Phase) -> float:
        return min(self._reread_bytes(v, phase), self._stashed(v, phase))

    def _reread_bytes(self, v: Value, phase: Phase) -> float:
        """Bytes to read `v` from where it already is."""
        alive, gone = self._memory(phase)
        if v in alive:
            return alive[v].nbytes
        if v.slot is None or v.slot in gone:
            return math.inf
        return v.slot.nbytes * (self.world if v.fn == "reduce" else 1)

    def _stashed(self, v: Value, phase: Phase) -> float:
        return 2 * BYTES[self.group.compute] if self.when[v] < phase.number else math.inf

    def _memory(self, phase: Phase) -> tuple[dict[Value, Slot], set[Slot]]:
        """What earlier phases have stored where, and the slots whose first content is gone."""
        done = [store for p in self.phases[: phase.number] for store in p.stores]
        return {v: slot for slot, v in done}, {slot for slot, _ in done}

    def _reader(self, v: Value, phase: Phase) -> Value:
        alive, _ = self._memory(phase)
        if self._reread_bytes(v, phase) <= self._stashed(v, phase):
            return load(alive[v]) if v in alive else v
        slot = self._new_stash(v)
        self.phases[self.when[v]].stores.append((slot, v))
        return load(slot)

    def _new_stash(self, v: Value) -> Slot:
        """A place for `v`: the reduced slot's own slice if it may be overwritten, else new memory."""
        dtype = self.group.compute
        reusable = v.fn == "reduce" and v.slot is not None and v.slot.disposable and v.slot.dtype == dtype
        inside = v.slot.name if reusable and v.slot else ""
        self.stash.append(Slot(f"stash{len(self.stash)}", dtype, inside=inside))
        return self.stash[-1]


def _reachable(roots: list[Value], stop: set[Value]) -> set[Value]:
    seen: set[Value] = set()
    stack = list(roots)
    while stack:
        v = stack.pop()
        if v not in seen:
            seen.add(v)
            stack.extend(() if v in stop else v.args)
    return seen


def min_vertex_cut(needed: list[Value], cost: Callable[[Value], float]) -> list[Value]:
    """The cheapest set of per-element values from which all of `needed` follow (maximum flow, shortest paths first)."""
    values = [v for v in ordered(needed) if v.level == Level.ELEMENT]
    source, sink = -1, -2
    capacity: dict[int, dict[int, float]] = {source: {}, sink: {}}

    def edge(a: int, b: int, c: float) -> None:
        capacity.setdefault(a, {})[b] = capacity.setdefault(a, {}).get(b, 0.0) + c
        capacity.setdefault(b, {}).setdefault(a, 0.0)

    number = {v: i for i, v in enumerate(values)}
    for v, i in number.items():  # a value is an edge from its inner side to its outer side
        edge(2 * i, 2 * i + 1, cost(v))
        parents = [a for a in v.args if a in number]
        for a in parents:
            edge(2 * number[a] + 1, 2 * i, math.inf)
        if not parents:
            edge(source, 2 * i, math.inf)
    for v in needed:
        if v in number:
            edge(2 * number[v] + 1, sink, math.inf)
    seen = _saturate(capacity, source, sink)
    return [v for v, i in number.items() if 2 * i in seen and 2 * i + 1 not in seen]


def _saturate(capacity: dict[int, dict[int, float]], source: int, sink: int) -> set[int]:
    """Push flow until no path is left; return the side of the separator that `source` is on."""
    while True:
        came: dict[int, int] = {source: source}
        queue = deque([source])
        while queue and sink not in came:
            a = queue.popleft()
            for b, c in capacity[a].items():
                if c > 0 and b not in came:
                    came[b] = a
                    queue.append(b)
        if sink not in came:
            return set(came)
        path = [sink]
        while path[-1] != source:
            path.append(came[path[-1]])
        steps = list(zip(path[1:], path, strict=False))
        flow = min(capacity[a][b] for a, b in steps)
        for a, b in steps:
            capacity[a][b] -= flow
            capacity[b][a] += flow
