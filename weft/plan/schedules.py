"""Pipeline schedules, one record each: in which order every stage takes up its passes. One more record is one more schedule, everywhere.

A pass is the forward, the backward or the weight gradients of one micro-batch on one chunk of a stage's layers. Virtual stage
g = chunk * stages + stage; micro-batch j runs forward through g = 0, 1, ... and backward the other way. Every schedule begins with
some forwards and then takes one forward and one backward in turn; they differ in how many they begin with.
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


@dataclass(frozen=True)
class Schedule:
    """`warm(later, stages, micro, chunks)` forwards come before the first backward of a stage that so many later stages follow.

    `searched`: whether a planner looks at it. `titan` is torch's name for it, or for the nearest that cuts the model alike.
    """

    name: str
    warm: Callable[[int, int, int, int], int]
    defers_weights: bool = False  # weight gradients are passes of their own, which fill what would be idle
    hides_sends: bool = False  # so many forwards ahead that what travels between stages has a pass to travel in
    takes_chunks: bool = False  # several chunks of layers on a stage, in rounds of as many micro-batches as there are stages
    searched: bool = True
    titan: str = ""

    def orders(self, stages: int, micro: int, chunks: int = 1) -> tuple[Order, ...]:
        """What each stage does, in order."""
        return _orders(self, stages, micro, chunks)

    def in_flight(self, stages: int, micro: int, chunks: int = 1) -> tuple[int, ...]:
        """The most forwards of each stage whose activations are still needed, by the backward or by weight gradients put off."""
        return _in_flight(self, stages, micro, chunks)

    def may_take(self, stages: int, micro: int) -> bool:
        """Whether it can run so many micro-batches."""
        return not self.takes_chunks or micro % stages == 0


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
    )
}  # fmt: skip
PLAIN, CHUNKED = "1f1b", "interleaved"  # where none is named; where none is, and stages have several chunks


@lru_cache(maxsize=256)
def _orders(schedule: Schedule, stages: int, micro: int, chunks: int) -> tuple[Order, ...]:
    rounds = [range(first, min(first + stages, micro)) for first in range(0, micro, stages)]
    forward = [(chunk, j) for some in rounds for chunk in range(chunks) for j in some]
    backward = [(chunk, j) for some in rounds for chunk in reversed(range(chunks)) for j in some]
    made = [_paired(forward, backward, schedule.warm(stages - s - 1, stages, micro, chunks)) for s in range(stages)]
    return _with_weights(made) if schedule.defers_weights else tuple(map(tuple, made))


@lru_cache(maxsize=4096)
def _in_flight(schedule: Schedule, stages: int, micro: int, chunks: int) -> tuple[int, ...]:
    """A few rounds show it: after them a stage frees as much as it takes up."""
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
    """With the weight gradients put off: found by running it with equal times, filling idle slots with them."""
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
