"""A schedule as text: what runs together, how much, and how far that is from the fewest batches possible."""

from __future__ import annotations

from typing import Any

from weft.dynamic.schedule import Schedule

WIDTH = 40
MOST = 60  # rounds drawn before the middle is left out


def draw(schedule: Schedule) -> str:
    """One line per batch, in the order they run."""
    lines = [_headline(schedule)]
    sizes = [r.stop - r.start for r in schedule.rounds]
    names = [_name(schedule, r.klass) for r in schedule.rounds]
    widest, label = max(sizes, default=1), max(map(len, names), default=0)
    rows = [
        f"{i:4}  {name:<{label}}  {size:6}  {edges:6}  {'█' * max(1, round(size / widest * WIDTH))}"
        for i, (name, size, edges) in enumerate(zip(names, sizes, (r.edge_stop - r.edge_start for r in schedule.rounds), strict=True))
    ]
    if len(rows) > MOST:
        left = len(rows) - MOST
        rows = [*rows[: MOST // 2], f"      ... {left} more batches ...", *rows[-MOST // 2 :]]
    if rows:
        lines += ["", f"      {'batch':<{label}}  {'rows':>6}  {'edges':>6}", *rows]
    slots = _read_by_slot(schedule)
    if slots:
        lines += ["", f"{slots - schedule.gathered} of {slots} rows read one by one already lie in order; the rest are copied together"]
    return "\n".join(lines)


def as_data(schedule: Schedule) -> dict[str, Any]:
    """A schedule as plain data: how much there is, and each batch as (vertices, rows, edges)."""
    s = schedule.structure
    rounds = [(_name(schedule, r.klass), r.stop - r.start, r.edge_stop - r.edge_start) for r in schedule.rounds]
    return {
        "samples": len(s), "vertices": int(s.vertices), "edges": len(s.child), "batches": len(rounds), "least": int(schedule.lower_bound),
        "policy": schedule.policy, "rounds": rounds,
    }  # fmt: skip


def _headline(schedule: Schedule) -> str:
    s = schedule.structure
    batches, least = len(schedule.rounds), schedule.lower_bound
    bound = "the fewest possible" if batches == least else f"at least {least} are needed"
    return f"{len(s)} samples, {s.vertices} vertices, {len(s.child)} edges: {batches} batches by {schedule.policy} ({bound})"


def _name(schedule: Schedule, klass: int) -> str:
    block = schedule.blocks[klass]
    return f"{schedule.structure.kinds[block.kind]}{'' if block.has_children else ' (no children)'}"


def _read_by_slot(schedule: Schedule) -> int:
    return sum(schedule.reads[b.kind].slots * b.count for b in schedule.blocks.values() if b.has_children)
