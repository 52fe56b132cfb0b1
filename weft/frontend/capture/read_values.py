"""What a trace has read from Python: compared with what is there now, put back as it was, or left as the trace left it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from weft.frontend.capture.batch_numbers import Answers, BatchNumber
from weft.frontend.capture.batches import leaves, named_batch
from weft.frontend.capture.kept import Kept, NotConstant
from weft.frontend.capture.places import (
    MISSING,
    TABLES,
    Change,
    Contents,
    Place,
    copied,
    holds_traced,
    is_plain,
    restore,
    same_contents,
    same_kind,
    set_random_state,
    shown_contents,
    unchanged,
)


class ReadValues:
    """Values, containers, tensors and sources of random numbers with the places they were read at, and what the trace changed there."""

    def __init__(self, batch: Any) -> None:
        self.batch = plain_leaves(batch)
        self.places: list[Place] = []
        self.sizes: list[tuple[Any, int, str]] = []
        self.contents: list[tuple[Any, Any, str]] = []  # containers, with what was in them
        self.arrays: list[tuple[np.ndarray, np.ndarray, str]] = []
        self.hooks: list[tuple[Tensor, int, str]] = []  # how many hooks parameters have
        self.flags: list[tuple[Tensor, bool, str]] = []
        self.tensors: dict[int, Place] = {}
        self.read_anew: dict[str, Place] = {}  # inputs of the program that are tensors found at a place
        self.lifted: dict[str, tuple[Place | str, torch.dtype]] = {}  # inputs that are numbers: at a place, or of the batch by name
        self.fixed: list[tuple[Place, int]] = []  # tensors in Python that may not change
        self.asked: list[BatchNumber] = []
        self.left: list[Change] = []  # what the trace changed
        self.drew = False  # whether it drew random numbers in Python
        self.answers: Answers | None = None  # where questions that the state decides are answered
        self.kept: Kept | None = None  # constants that earlier calls left
        self.sources: list[tuple[Any, Any]] = []  # of random numbers, with their states
        self.environment = environment()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Take back what the trace left in Python."""
        for full, copy, _ in self.contents:
            if not same_contents(full, copy):
                restore(full, copy)
        for place in self.places:
            if not unchanged(place.now(), place.value):
                place.put(place.value)
        for change in reversed(self.left):
            if change.place is not None:
                change.place.put(change.before)
        for source, state in self.sources:
            set_random_state(source, state)

    def forget_tensors(self) -> None:
        """Take tensors of the trace out of what the user keeps: they stand for no value."""
        for full, copy, _ in self.contents:
            if holds_traced(full):
                restore(full, copy)
        for place in self.places:
            if holds_traced(place.now()):
                place.put(place.value)
        for change in self.keeps_tensors:
            if change.place is not None:
                change.place.put(change.before)

    def keep(self) -> bool:
        """Give values to what the trace left and depends on no input; whether there is any, and nothing else of the trace is left."""
        named = {id(c.place.box.full) for c in self.left if c.place is not None and isinstance(c.place.box, Contents)}
        inside = [(full, copy, words) for full, copy, words in self.contents if id(full) not in named and holds_traced(full)]
        left = [*self.left, *(Change(words, copy, copied(full), Place(Contents(full), 0, copy, words)) for full, copy, words in inside)]
        if self.kept is None or not any(holds_traced(c.now) for c in left):
            return False
        try:
            self.left = [replace(c, now=self.kept.with_values(c.now)) if c.place is not None else c for c in left]
        except NotConstant:
            return False
        return not self.keeps_tensors

    def redo(self) -> None:
        """Leave in the modules' attributes what the trace left there."""
        for change in self.left:
            if change.place is not None:
                change.place.put(change.now)

    def resized(self, model: nn.Module) -> dict[str, Change]:
        """Buffers that the trace left as tensors of another shape or dtype, by name."""
        left = {c.words: c for c in self.left if isinstance(c.before, Tensor)}
        return {n: left[f"model.{n}"] for n, _ in model.named_buffers() if f"model.{n}" in left}

    @property
    def keeps_tensors(self) -> list[Change]:
        """Changes that would carry a tensor of one step into the next."""
        return [c for c in self.left if holds_traced(c.now)]

    # -- at each call --------------------------------------------------------------------------------------------------

    def hold(self, batch: Any = MISSING) -> bool:
        """Whether all that was read still is what it was."""
        return next(self._moved(batch), None) is None and self._answers_hold(batch)

    def changes(self, batch: Any = MISSING) -> list[Change]:
        """What is another than when it was traced, in words; of the batch too, where one is given."""
        return list(self._moved(batch))

    def _moved(self, batch: Any) -> Iterator[Change]:
        numbers = {p.where for p, _ in self.lifted.values() if isinstance(p, Place)}
        for p in self.places:
            try:
                now = p.box[p.key]
            except (KeyError, IndexError, ValueError):
                now = MISSING
            if now is not p.value and not unchanged(now, p.value) and p.where not in numbers:
                yield Change(p.words, p.value, now, p)
        for full, size, words in self.sizes:
            if len(full) != size:
                yield Change(words, f"{size} of them", f"{len(full)}")
        for full, copy, words in self.contents:
            if not same_contents(full, copy):
                yield Change(words, shown_contents(copy), shown_contents(copied(full)))
        yield from (Change(p.words, p.value, p.now()) for p in self.tensors.values() if not same_kind(p))
        yield from (Change(p.words, "its values", "others") for p, v in self.fixed if p.now() is not p.value or p.value._version != v)
        yield from (Change(words, many, hooks(t)) for t, many, words in self.hooks if hooks(t) != many)
        yield from (Change(words, f, t.requires_grad) for t, f, words in self.flags if t.requires_grad is not f)
        for array, was, words in self.arrays:
            if not np.array_equal(array, was, equal_nan=was.dtype.kind == "f"):
                yield Change(words, "its values", "others")
        mode = environment()
        yield from (Change(k, x, mode[k]) for k, x in self.environment.items() if mode[k] != x)
        if batch is not MISSING:
            yield from self._moved_in(plain_leaves(batch))

    def _moved_in(self, given: dict[str, Any]) -> Iterator[Change]:
        for n in dict.fromkeys([*self.batch, *given]):
            was, now = self.batch.get(n, MISSING), given.get(n, MISSING)
            if not unchanged(now, was) and not (n in self.lifted and type(was) is type(now)):
                yield Change(f"{n} of the batch" if n != "batch" else "the batch", was, now)

    def _answers_hold(self, batch: Any) -> bool:
        given = named_batch(batch) if self.asked else {}
        return all(asked.holds(given, self.answers) for asked in self.asked)

    def in_any_mode(self) -> Self:
        """The same, whatever the modules' training modes are: it was traced in evaluation mode, and shall be run in it."""
        self.places = [p for p in self.places if p.key != "training"]
        return self.in_any_grad_mode()

    def in_any_grad_mode(self) -> Self:
        """The same with gradients and without: what was traced is forward alone."""
        self.environment.pop("torch's grad mode", None)
        return self

    def in_any_precision(self) -> Self:
        """The same under autocast and without: the trace was made without."""
        self.environment = {k: x for k, x in self.environment.items() if "autocast" not in k}
        return self

    def of_values(self, sharded: nn.Module) -> Self:
        """What it read of plain values, of modes and of hooks of the module's parts: its parameters and its own forward have been made others."""
        self.in_any_grad_mode()
        own = [sharded.__dict__, *(sharded.__dict__[k] for k in TABLES)]
        self.places = [p for p in self.places if is_plain(p.value)]
        self.contents = [full for full in self.contents if not any(full[0] is x for x in own)]
        self.sizes = [size for size in self.sizes if not any(size[0] is x for x in own)]
        self.hooks, self.flags = [], []
        self.fixed = [(p, p.value._version) for p in self.tensors.values()]
        return self

    def tensors_now(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constants of the trace; those that Python keeps, as they are now."""
        return {n: self.read_anew[n].now().detach() if n in self.read_anew else x for n, x in constants.items()}

    def numbers(self, batch: Any) -> dict[str, float]:
        """The inputs that are numbers in Python, as they are now."""
        given = plain_leaves(batch) if any(isinstance(p, str) for p, _ in self.lifted.values()) else {}
        return {name: given[p] if isinstance(p, str) else p.now() for name, (p, _) in self.lifted.items()}


def hooks(t: Tensor) -> int:
    own, after = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    return (len(own) if own else 0) + (len(after) if after else 0)


def plain_leaves(batch: Any) -> dict[str, Any]:
    """All of a batch but its tensors, of which the place alone is read; arrays by what is in them."""
    return {n: Tensor if isinstance(x, Tensor) else _contents(x) if isinstance(x, np.ndarray) else x for n, x in leaves("batch", batch)}


def _contents(x: np.ndarray) -> str:
    return f"array of {x.dtype}{list(x.shape)}: {hashlib.sha256(x.tobytes()).hexdigest()}" if x.dtype != object else repr(x.tolist())


@functools.cache
def _devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


def environment() -> dict[str, Any]:
    """Modes of torch that a trace runs under."""
    found = {f"torch's autocast on {k}": (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _devices()}
    return {"torch's default dtype": torch.get_default_dtype(), "torch's grad mode": torch.is_grad_enabled(), **found}
