"""Pipeline schedules, one record each: in which order every stage takes up its passes. One more record is one more schedule, everywhere.

A pass is the forward, the backward or the weight gradients of one micro-batch on one chunk of a stage's layers. Virtual stage
g = chunk * stages + stage; micro-batch j runs forward through g = 0, 1, ... and backward the other way. Most schedules begin with
some forwards and then take one forward and one backward in turn; they differ in how many they begin with. Those that fold have their
second chunk come back from the last stage to the first, as a V: both ends of the model are on the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from weft.cost.pipeline import waiting

Kind = Literal["forward", "backward", "weight"]


class Action(NamedTuple):
    kind: Kind
    chunk: int
    micro: int


Order = tuple[Action, ...]
KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True)
class Schedule:
    """`warm(later, stages, micro, chunks)` forwards come before the first backward of a stage that so many later stages follow; or else
    `folded(stage, stages, micro)` is all that a stage does of two chunks.

    `searched`: whether a planner looks at it. `titan` is torch's name for it, or for the nearest that shards the model the same.
    """

    name: str
    warm: Callable[[int, int, int, int], int] = lambda later, stages, micro, chunks: later
    folded: Callable[[int, int, int], Order] | None = None
    rounds: int = 0  # of as many micro-batches as there are stages; fewer are not taken
    defers_weights: bool = False  # weight gradients are passes of their own, which fill what would be idle
    hides_sends: bool = False  # so many forwards ahead that what is sent between stages has a pass to be sent in
    takes_chunks: bool = False  # several chunks of layers on a stage, in rounds of as many micro-batches as there are stages
    searched: bool = True
    titan: str = ""

    def orders(self, stages: int, micro: int, chunks: int = 1) -> tuple[Order, ...]:
        """What each stage does, in order."""
        return _orders(self, stages, micro, chunks)

    def in_flight(self, stages: int, micro: int, chunks: int = 1) -> tuple[int, ...]:
        """The most forwards of each stage whose activations are still needed, by the backward or by weight gradients deferred."""
        return _in_flight(self, stages, micro, chunks)

    def may_take(self, stages: int, micro: int) -> bool:
        """Whether it can run so many micro-batches."""
        if self.folded is not None:
            return micro >= self.rounds * stages
        return not self.takes_chunks or micro % stages == 0

    def places(self, stages: int, chunks: int) -> tuple[int, ...]:
        """The number g of every part of the model, first to last."""
        plain = tuple(range(stages * chunks))
        return plain[:stages] + plain[:-stages - 1 : -1] if self.folded is not None else plain


def _zero_bubble_v(stage: int, stages: int, micro: int) -> Order:
    """Qi 2024, ZB-V: as much in memory as by 1F1B, weight gradients last, no idle slot where a forward, a backward and weight gradients take the same."""
    many = max(2 * stages - 1, micro)  # as if there were enough to fill the pipeline; those that are not there are left out
    line = _StagePasses()
    line.add(2 * (stages - stage) - 1, "F0")
    line.add(stage, "F1 F0")
    line.add(stages - stage, "F1 B1 W1")
    while line.count["F1"] < line.count["F0"] or line.count["F0"] < many:
        line.add(1, "F0 B0 W0 F1 B1 W1" if line.count["F0"] < many else "B0 W0 F1 B1 W1")
    line.add(stage, "B0 B1")
    line.add(stages - stage, "B0 W0")
    line.add(line.count["B1"] - line.count["W1"], "W1")
    line.add(line.count["B0"] - line.count["W0"], "W0")
    return tuple(a for a in line.made if a.micro < micro)


def _dual_pipe_v(stage: int, stages: int, micro: int) -> Order:
    """DeepSeek 2025, DualPipe-V: forwards of one chunk overlapped with backwards of the other, so that what one sends may hide behind the other."""
    line, later, half = _StagePasses(), stages - stage - 1, (stage + 1) // 2
    line.add(2 * later, "F0")
    line.add(stage + 1, "F0 F1")
    line.add(later, "B1 W1 F1")
    line.add(micro - 2 * stages + stage + 1, "F0 B1 W1 F1 B0 W0")
    line.add(later, "B1 W1 F1 B0 W0")
    line.add(half, "B1 W1 B0 W0")  # from here on weight gradients are put off
    line.add(1 - stage % 2, "B1 W1 B0")
    line.add(stage + 1 - half - (1 - stage % 2), "B1 B0")
    for _ in range(later):
        line.add_late()
        line.add(1, "B0")
    while line.add_late():
        pass
    return tuple(line.made)


class _StagePasses:
    """The passes of a stage as they are added, each of the next micro-batch of its kind and chunk: F0 is a forward of chunk 0."""

    def __init__(self) -> None:
        self.made: list[Action] = []
        self.count = {f"{kind}{chunk}": 0 for kind in KINDS for chunk in range(2)}

    def add(self, times: int, text: str) -> None:
        for what in text.split() * times:
            self.made.append(Action(KINDS[what[0]], int(what[1]), self.count[what]))
            self.count[what] += 1

    def add_late(self) -> bool:
        """The weight gradients that have waited longest; whether there were any."""
        waits = [a.chunk for a in self.made if a.kind == "backward" and a.micro >= self.count[f"W{a.chunk}"]]
        self.add(1, f"W{waits[0]}" if waits else "")
        return bool(waits)


SCHEDULES = {
    s.name: s
    for s in (
        Schedule("1f1b", lambda later, stages, micro, chunks: later, titan="1F1B"),
        Schedule("gpipe", lambda later, stages, micro, chunks: micro, searched=False, titan="GPipe"),  # no faster than 1f1b, and keeps more
        Schedule(
            "interleaved", lambda later, stages, micro, chunks: 2 * later + (chunks - 1) * stages, takes_chunks=True, titan="Interleaved1F1B"
        ),
        Schedule(  # Qi 2024, ZB-H1
            "zero-bubble", lambda later, stages, micro, chunks: later, defers_weights=True, titan="1F1B",
        ),
        Schedule(
            "1f1b-eager", lambda later, stages, micro, chunks: 2 * later, hides_sends=True, titan="1F1B",
        ),
        Schedule(
            "zero-bubble-eager", lambda later, stages, micro, chunks: 2 * later, defers_weights=True, hides_sends=True, titan="1F1B",
        ),
        Schedule(
            "zero-bubble-v", folded=_zero_bubble_v, defers_weights=True, takes_chunks=True, searched=False, titan="ZBVZeroBubble",
        ),
        Schedule(
            "dual-pipe-v", folded=_dual_pipe_v, rounds=2, defers_weights=True, takes_chunks=True, searched=False, titan="DualPipeV",
        ),
    )
}  # fmt: skip
PLAIN, CHUNKED = "1f1b", "interleaved"  # where none is named; where none is, and stages have several chunks


@lru_cache(maxsize=256)
def _orders(schedule: Schedule, stages: int, micro: int, chunks: int) -> tuple[Order, ...]:
    if schedule.folded is not None:
        return tuple(schedule.folded(stage, stages, micro) for stage in range(stages))
    rounds = [range(first, min(first + stages, micro)) for first in range(0, micro, stages)]
    forward = [(chunk, j) for some in rounds for chunk in range(chunks) for j in some]
    backward = [(chunk, j) for some in rounds for chunk in reversed(range(chunks)) for j in some]
    made = [_paired(forward, backward, schedule.warm(stages - s - 1, stages, micro, chunks)) for s in range(stages)]
    return _with_weights(made) if schedule.defers_weights else tuple(map(tuple, made))


@lru_cache(maxsize=4096)
def _in_flight(schedule: Schedule, stages: int, micro: int, chunks: int) -> tuple[int, ...]:
    """A few rounds show it: after them a stage frees as much as it takes up."""
    if schedule.folded is not None:
        few = min(micro, 4 * stages)
        return tuple(int(max(waiting(order, [1] * chunks))) for order in schedule.orders(stages, few, chunks))
    few = min(micro, (2 if chunks == 1 else 3) * stages)
    plan = schedule.orders(stages, few - few % stages if chunks > 1 else few, chunks)
    warm = (min(micro * chunks, schedule.warm(stages - s - 1, stages, micro, chunks) + 1) for s in range(stages))
    return tuple(max(*map(int, waiting(order, [1] * chunks)), n) for order, n in zip(plan, warm, strict=True))


def _paired(forward: list[tuple[int, int]], backward: list[tuple[int, int]], warm: int) -> list[Action]:
    """`warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm = min(warm, len(forward))
    order = [Action("forward", *f) for f in forward[:warm]]
    for f, b in zip(forward[warm:], backward, strict=False):
        order += [Action("forward", *f), Action("backward", *b)]
    return order + [Action("backward", *b) for b in backward[len(forward) - warm :]]


def _with_weights(main: list[list[Action]]) -> tuple[Order, ...]:
    """With the weight gradients deferred: found by running it with equal times, filling idle slots with them."""
    stages = len(main)
    done: set[tuple[str, int, int]] = set()
    late: list[list[int]] = [[] for _ in main]
    at, made = [0] * stages, [[] for _ in main]  # type: tuple[list[int], list[list[Action]]]
    while any(at[s] < len(main[s]) or late[s] for s in range(stages)):
        ended: list[tuple[str, int, int]] = []
        for s in range(stages):
            action = main[s][at[s]] if at[s] < len(main[s]) else None
            full = len(late[s]) >= stages - s  # what waits holds its activations
            if action is not None and not full and _can(done, action, s, stages):
                at[s] += 1
                ended.append((action.kind, s, action.micro))
                late[s] += [action.micro] if action.kind == "backward" else []
                made[s].append(action)
            elif late[s]:
                made[s].append(Action("weight", 0, late[s].pop(0)))
        done.update(ended)
    return tuple(map(tuple, made))


def _can(done: set[tuple[str, int, int]], action: Action, stage: int, stages: int) -> bool:
    if action.kind == "forward":
        return stage == 0 or ("forward", stage - 1, action.micro) in done
    return ("forward", stage, action.micro) in done and (stage == stages - 1 or ("backward", stage + 1, action.micro) in done)
