"""Blocks inside which Python, or the model's mode, is as it was; whatever runs in them, it is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from weft.frontend.capture.guards import Reads
from weft.frontend.capture.places import copied, random_state, restore, same_contents, set_random_state, unchanged


@contextmanager
def in_mode(model: nn.Module, learning: bool) -> Iterator[None]:
    """Inside, the model trains or is in evaluation mode; parts of one that trains stay in the mode they are in. Afterwards every module is as it was."""
    modes = [(m, m.training) for m in model.modules()]
    if not (learning and model.training):
        model.train(learning)
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model is in evaluation mode; afterwards every module of it is in the mode it was in."""
    return in_mode(model, learning=False)


@contextmanager
def as_before(reads: Reads | None) -> Iterator[None]:
    """Inside, Python is as it was before the trace; afterwards as it was before this, whatever ran inside."""
    if reads is None:
        yield
        return
    places = [(p, p.now()) for p in (*reads.places, *(c.place for c in reads.left if c.place is not None))]
    containers = [(full, copied(full)) for full, _, _ in reads.contents]
    sources = [(source, random_state(source)) for source, _ in reads.sources]
    reads.undo()
    try:
        yield
    finally:
        reads.undo()
        for full, copy in containers:
            if not same_contents(full, copy):
                restore(full, copy)
        for place, value in places:
            if not unchanged(place.now(), value):
                place.put(value)
        for source, state in sources:
            set_random_state(source, state)
