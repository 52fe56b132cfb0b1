"""Places where Python values were read: what lay there, whether it still does, and putting it back. Containers, objects, closures and
sources of random numbers are places too.
"""

from __future__ import annotations

import enum
import pickle
import random
import types
import weakref
from collections import OrderedDict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.frontend.capture.batches import values
from weft.frontend.capture.isomorphic import PLAIN

TENSORS = ("_parameters", "_buffers", "_modules")
TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SKIPPED = {*TENSORS, "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
            "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", *TABLES}  # fmt: skip
_SAME = frozenset(PLAIN) | {complex}
MISSING = object()


class Cell:
    """A variable that a function closes over, as something with an item."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


class Context:
    """A context variable, as something with an item."""

    def __init__(self, variable: ContextVar[Any]) -> None:
        self.variable = variable

    def __getitem__(self, key: Any) -> Any:
        return self.variable.get(MISSING)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.variable.set(value)


@dataclass(eq=False)
class Place:
    """Where a value was read, and what it was."""

    box: Any
    key: Any
    value: Any
    words: str

    @property
    def where(self) -> tuple[int, Any]:
        """The same for every place that is this one."""
        anchor = self.box.cell if isinstance(self.box, Cell) else self.box.of if isinstance(self.box, Attributes) else self.box
        return id(anchor), self.key

    def now(self) -> Any:
        try:
            return self.box[self.key]
        except (KeyError, IndexError, ValueError):
            return MISSING

    def put(self, value: Any) -> None:
        if value is not MISSING:
            self.box[self.key] = value
        elif self.now() is not MISSING:
            del self.box[self.key]


@dataclass(frozen=True)
class Change:
    """A value that is another than when it was traced."""

    words: str
    before: Any
    now: Any
    place: Place | None = None  # where a number could be made an input

    def __str__(self) -> str:
        return f"{self.words}: {_shown(self.before)} when traced, {_shown(self.now)} now"


def _shown(x: Any) -> str:
    return "nothing" if x is MISSING else repr(x) if isinstance(x, PLAIN) else f"another {type(x).__name__}"


def is_number(x: Any) -> bool:
    return type(x) in (int, float)


def is_plain(x: Any) -> bool:
    return type(x) in _SAME or isinstance(x, (enum.Enum, np.generic))


def unchanged(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and (is_plain(before)) and bool(now == before))


class Contents:
    """What lies in a container, as an item."""

    def __init__(self, full: Any) -> None:
        self.full = full

    def __getitem__(self, _: Any) -> Any:
        return copied(self.full)

    def __setitem__(self, _: Any, copy: Any) -> None:
        restore(self.full, copy)


def changed_attributes(module: nn.Module, before: dict[str, Any], contents: list[tuple[Any, Any]], words: str) -> list[Change]:
    """A module's own attributes that are others than before, or hold others; hooks that came while it ran are among them."""
    own = module.__dict__
    names = {id(x): n for n, x in before.items() if n not in TENSORS}
    contents_named = [(f"{words}.{names[id(x)]}", x, copied(was)) for x, was in contents if id(x) in names]
    inside = [Change(text, was, copied(x), Place(Contents(x), 0, was, text)) for text, x, was in contents_named if not same_contents(x, was)]
    table = own.get("_modules")  # scripted modules keep another kind, which cannot be written into
    modules = next((was for x, was in contents if x is table), {}) if isinstance(table, dict) else {}
    return inside + _replaced(own, before, words) + (_replaced(table, modules, words) if isinstance(table, dict) else [])


def new_buffers(module: nn.Module, before: dict[str, Any], words: str) -> list[Change]:
    """Buffers that came while it ran, of which there was only the name, or that became tensors of another shape or dtype."""
    table = module._buffers
    came = [n for n, x in table.items() if isinstance(x, Tensor) and not same_type(x, before.get(n))]
    return [Change(f"{words}.{n}", was, table[n], Place(table, n, was, f"{words}.{n}")) for n in came for was in [before.get(n, MISSING)]]


def same_type(now: Tensor, before: Any) -> bool:
    """Whether both are tensors of one shape and dtype."""
    return isinstance(before, Tensor) and now.shape == before.shape and now.dtype == before.dtype


def _replaced(own: dict[str, Any], before: dict[str, Any], words: str) -> list[Change]:
    names = [n for n in dict.fromkeys([*before, *own]) if n not in SKIPPED]
    pairs = [(n, before.get(n, MISSING), own.get(n, MISSING)) for n in names]
    return [Change(f"{words}.{n}", a, b, Place(own, n, a, f"{words}.{n}")) for n, a, b in pairs if not unchanged(b, a)]


class Attributes:
    """An object's attributes as items."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, key: str) -> Any:
        return getattr(self.of, key, MISSING)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.of, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.of, key)


def same_kind(place: Place) -> bool:
    """Whether there still is a tensor of the same kind; its values may be others."""
    now = place.now()
    return now is place.value or (isinstance(now, Tensor) and same_type(now, place.value))


def slots(kind: type) -> list[str]:
    found = kind.__dict__.get("__slots__", ())
    return [n for n in ([found] if isinstance(found, str) else list(found)) if not n.startswith("__")]


def copied(full: Any) -> Any:
    if isinstance(full, (set, frozenset, type({}.keys()))):
        return frozenset(full)
    return dict(full) if isinstance(full, dict) else tuple(full)


def same_contents(full: Any, copy: Any) -> bool:
    if len(full) != len(copy):
        return False
    if isinstance(copy, frozenset):
        return bool(full == copy)
    if isinstance(copy, dict) and isinstance(full, dict) and all(map(is_, full.values(), copy.values())) and list(full) == list(copy):
        return True
    pairs = [(full.get(k, MISSING), x) for k, x in copy.items()] if isinstance(copy, dict) else zip(full, copy, strict=True)
    return all(a is b or not is_plain(b) or unchanged(a, b) for a, b in pairs)


def restore(full: Any, copy: Any) -> None:
    """Put back what lay in a container, also into one whose class refuses to be written into."""
    kind: Any = next((kind for kind in (list, deque, OrderedDict, dict, set) if isinstance(full, kind)), None)
    if kind is not None:
        kind.clear(full)
        kind.extend(full, copy) if kind in (list, deque) else kind.update(full, copy)


def shown_contents(copy: Any) -> str:
    text = repr(sorted(copy, key=str) if isinstance(copy, frozenset) else copy)
    return text if len(text) < 60 else f"{text[:57]}..."


def holds_traced(value: Any) -> bool:
    """Whether a tensor of the trace is in it, or a weak reference that is of one or of nothing any more, as recurrent layers keep them."""
    some = values(value, objects=False)
    return any(isinstance(x, FakeTensor) or (isinstance(x, weakref.ref) and isinstance(x(), (FakeTensor, type(None)))) for x in some)


def random_state(source: Any) -> bytes:
    """The state of a source of random numbers, as bytes that compare."""
    if isinstance(source, random.Random):
        return pickle.dumps(source.getstate())
    if isinstance(source, np.random.RandomState):
        return pickle.dumps(source.get_state())
    return pickle.dumps((source.bit_generator if isinstance(source, np.random.Generator) else source).state)


def set_random_state(source: Any, state: bytes) -> None:
    was = pickle.loads(state)
    if isinstance(source, random.Random):
        source.setstate(was)
    elif isinstance(source, np.random.RandomState):
        source.set_state(was)
    else:
        (source.bit_generator if isinstance(source, np.random.Generator) else source).state = was
