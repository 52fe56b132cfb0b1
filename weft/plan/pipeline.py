"""Orders in which pipeline stages take up their work: GPipe, 1F1B, interleaved 1F1B, zero-bubble (ZB-H1).

The eager kinds of 1F1B and zero-bubble begin with twice as many forwards, so that what travels between stages has a pass to travel in.

An action is forward, backward, or weight gradient of one micro-batch on one chunk of the stage's layers.
Virtual stage g = chunk * stages + stage; micro-batch j runs forward through g = 0, 1, ... and backward the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "weight"]


class Action(NamedTuple):
    kind: Kind
    chunk: int
    micro: int


Order = tuple[Action, ...]


@lru_cache(maxsize=256)
def orders(schedule: str, stages: int, micro: int, virtual: int = 1) -> tuple[Order, ...]:
    """What each stage does, in order."""
    make: dict[str, Callable[[int, int, int, int], list[Action]]] = {
        "gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved": _interleaved, "1f1b-eager": _eager,
    }  # fmt: skip
    if puts_off_weights(schedule):
        return _zero_bubble(stages, micro, schedule.endswith("eager"))
    return tuple(tuple(make[schedule](stage, stages, micro, virtual)) for stage in range(stages))


def puts_off_weights(schedule: str) -> bool:
    """Whether weight gradients are passes of their own."""
    return schedule.startswith("zero-bubble")


def in_flight(order: Order) -> int:
    """The most forwards of a stage whose backward has not run yet."""
    most = now = 0
    for action in order:
        now += {"forward": 1, "backward": -1, "weight": 0}[action.kind]
        most = max(most, now)
    return most


def most_kept(order: Order) -> int:
    """The most forwards of a stage whose activations are still needed: by the backward, or by weight gradients put off."""
    frees = "weight" if any(a.kind == "weight" for a in order) else "backward"
    most = now = 0
    for action in order:
        now += (action.kind == "forward") - (action.kind == frees)
        most = max(most, now)
    return most


def _gpipe(stage: int, stages: int, micro: int, virtual: int) -> list[Action]:
    forward = [Action("forward", 0, j) for j in range(micro)]
    return forward + [Action("backward", 0, j) for j in range(micro)]


def _one_forward_one_backward(stage: int, stages: int, micro: int, virtual: int) -> list[Action]:
    return _paired([(0, j) for j in range(micro)], [(0, j) for j in range(micro)], warm=stages - stage - 1)


def _eager(stage: int, stages: int, micro: int, virtual: int) -> list[Action]:
    return _paired([(0, j) for j in range(micro)], [(0, j) for j in range(micro)], warm=2 * (stages - stage - 1))


def _interleaved(stage: int, stages: int, micro: int, virtual: int) -> list[Action]:
    """Rounds of `stages` micro-batches through one chunk after another."""
    rounds = [range(first, min(first + stages, micro)) for first in range(0, micro, stages)]
    forward = [(chunk, j) for some in rounds for chunk in range(virtual) for j in some]
    backward = [(chunk, j) for some in rounds for chunk in reversed(range(virtual)) for j in some]
    return _paired(forward, backward, warm=2 * (stages - stage - 1) + (virtual - 1) * stages)


def _paired(forward: list[tuple[int, int]], backward: list[tuple[int, int]], warm: int) -> list[Action]:
    """`warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm = min(warm, len(forward))
    order = [Action("forward", *f) for f in forward[:warm]]
    for f, b in zip(forward[warm:], backward, strict=False):
        order += [Action("forward", *f), Action("backward", *b)]
    return order + [Action("backward", *b) for b in backward[len(forward) - warm :]]


def _zero_bubble(stages: int, micro: int, eager: bool = False) -> tuple[Order, ...]:
    """1F1B with the weight gradients put off: found by running it with equal times, filling idle slots with them.

    As many micro-batches are in flight as under 1F1B, so the memory is the same (Qi 2024, ZB-H1).
    """
    done: dict[tuple[str, int, int], int] = {}
    main = [(_eager if eager else _one_forward_one_backward)(s, stages, micro, 1) for s in range(stages)]
    late: list[list[int]] = [[] for _ in range(stages)]
    at, made = [0] * stages, [[] for _ in range(stages)]  # type: tuple[list[int], list[list[Action]]]
    clock = 0
    while any(at[s] < len(main[s]) or late[s] for s in range(stages)):
        ended: list[tuple[str, int, int]] = []
        for s in range(stages):
            action = main[s][at[s]] if at[s] < len(main[s]) else None
            # a weight gradient holds its activations, so no more of them may wait than 1F1B keeps
            full = len(late[s]) >= stages - s
            if action is not None and not full and _can(done, action, s, stages):
                at[s] += 1
                ended.append((action.kind, s, action.micro))
                late[s] += [action.micro] if action.kind == "backward" else []
                made[s].append(action)
            elif late[s]:
                made[s].append(Action("weight", 0, late[s].pop(0)))
        clock += 1
        done.update(dict.fromkeys(ended, clock))
    return tuple(tuple(order) for order in made)


def _can(done: dict[tuple[str, int, int], int], action: Action, stage: int, stages: int) -> bool:
    if action.kind == "forward":
        return stage == 0 or ("forward", stage - 1, action.micro) in done
    return ("forward", stage, action.micro) in done and (stage == stages - 1 or ("backward", stage + 1, action.micro) in done)
