"""What a trace reads from Python, with the places it was read at: compared again at each call, so that no answer is an old one.

Before a trace the loss and all modules are walked; while it runs, every function of the user's adds the globals it names and the variables it
closes over. A plain value is compared, a container by its parts, any other object by identity and by its attributes. A tensor is no
guard: it becomes an input that is read anew. What the trace itself leaves changed, random state too, is an effect.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.frontend.capture.batch_numbers import Answers, BatchNumber
from weft.frontend.capture.batches import leaves, named_batch
from weft.frontend.capture.kept import Kept, NotConstant
from weft.frontend.capture.places import (
    MISSING,
    SKIPPED,
    TABLES,
    Attributes,
    Cell,
    Change,
    Contents,
    Context,
    Place,
    copied,
    holds_traced,
    is_plain,
    random_state,
    restore,
    same_contents,
    same_kind,
    set_random_state,
    shown_contents,
    slots,
    unchanged,
)

DEPTH, MOST = 12, 50_000  # how deep containers and objects, which count twice, are followed, and how many places are kept at most
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OPAQUE = (
    "torch",
    "weft",
    "numpy",
    "logging",
    "threading",
    "builtins",
    "weakref",
    "_thread",
    "_io",
    "io",
    "re",
    "collections.abc",
    "ctypes",
)
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_ROOT, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARIES = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


class Reads:
    """All that one trace may have read, and what it left changed."""

    def __init__(self, model: nn.Module, loss: Any = None, batch: Any = None) -> None:
        self.model, self.loss = model, loss
        self.batch = _plain_leaves(batch)
        self.places: list[Place] = []
        self.sizes: list[tuple[Any, int, str]] = []
        self.wholes: list[tuple[Any, Any, str]] = []  # containers, with what was in them
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
        self.shared = True  # isomorphic layers are traced once
        self.answers: Answers | None = None  # where questions that the state decides are answered
        self.kept: Kept | None = None  # constants that earlier calls left
        self._memos: list[tuple[Any, int]] = []  # functools' caches, and how often they did not know
        self._sources: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._codes: dict[int, types.CodeType] = {}  # by identity: a code's own hash is that of all it says
        self._free: dict[types.CodeType, dict[str, Any]] = {}
        self._environment = _environment()
        for source in (random._inst, np.random.mtrand._rand):  # type: ignore[attr-defined]
            self._source(source)
        for path, module in model.named_modules():
            self._module(module, f"model.{path}" if path else "model")
        if loss is not None:
            self._walk([loss], 0, "the loss")

    # -- walking -------------------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, words: str) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        own = module.__dict__
        self.sizes.append((own, len(own), f"the attributes of {words}"))
        for name in own:
            if name not in SKIPPED:
                self._walk(own, name, f"{words}.{name}")
        for table in (module._parameters, module._buffers):
            self.hooks += [(t, _hooks(t), f"the hooks of {words}.{n}") for n, t in table.items() if t is not None]
            self.flags += [(t, t.requires_grad, f"{words}.{n}.requires_grad") for n, t in table.items() if t is not None]
            self.places += [Place(table, n, t, f"{words}.{n}") for n, t in table.items()]
        for name, child in module._modules.items():
            self.places.append(Place(module._modules, name, child, f"{words}.{name}"))
        for name in TABLES:
            if own[name]:
                self._container(own[name], f"{words}.{name}", 1)
            else:
                self.sizes.append((own[name], 0, f"{words}.{name}"))
        for base in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
            if not base.__module__.startswith("torch."):
                self._class(base)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        followed = (Tensor, functools._lru_cache_wrapper, *_CONTAINERS)
        named = [k for k, x in vars(kind).items() if not k.startswith("__") and (is_plain(x) or isinstance(x, followed))]
        for name in named:
            self._walk(Attributes(kind), name, f"{kind.__name__}.{name}")

    def _walk(self, box: Any, key: Any, words: str, depth: int = 0, library: bool = False) -> None:
        value = box[key]
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor):
                self.tensors.setdefault(id(value), Place(box, key, value, words))
            return
        if len(self.places) > MOST:
            return
        self.places.append(Place(box, key, value, words))
        if is_plain(value) or depth > DEPTH or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._foreign(module, f"{words}.{path}" if path else words)
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, _SOURCES):
            self._source(value)
        elif isinstance(value, np.ndarray):
            self.arrays.append((value, value.copy(), words))
        elif not library:
            self._inside(value, words, depth)

    def _foreign(self, module: nn.Module, words: str) -> None:
        """A module that is no part of the model, such as a teacher: its tensors are read anew."""
        if id(module) in self._seen:
            return
        for table in (module._parameters, module._buffers):
            for name, t in table.items():
                if t is not None:
                    self.tensors.setdefault(id(t), Place(table, name, t, f"{words}.{name}"))
        self._module(module, words)
        foreign = {id(module._parameters), id(module._buffers)}
        self.places = [p for p in self.places if id(p.box) not in foreign]

    def _inside(self, value: Any, words: str, depth: int) -> None:
        if isinstance(value, _CONTAINERS):
            self._container(value, words, depth)
        elif isinstance(value, functools.partial):
            self._walk([value.func], 0, words, depth + 2)
            self._container(value.args, words, depth + 2)
            self._container(value.keywords, words, depth + 2)
        elif isinstance(value, types.MethodType):
            self._walk([value.__self__], 0, words, depth + 2)
            self._walk([value.__func__], 0, words, depth + 2)
        elif isinstance(value, types.ModuleType):
            self._environ(value)
        elif isinstance(value, ContextVar):
            self._walk(Context(value), 0, words, depth + 2)
        elif isinstance(value, threading.local):
            self._object(value, words, depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._memos.append((value, value.cache_info().misses))
        elif isinstance(value, types.FunctionType):
            if value.__code__.co_filename.startswith((_ROOT, _TORCH)):
                return
            self._closure(value)
            self._container(vars(value), words, depth)
            self._container(value.__defaults__ or (), words, depth)
        elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) and not type(value).__module__.startswith(_OPAQUE):
            self._object(value, words, depth)

    def _container(self, value: Any, words: str, depth: int) -> None:
        self.wholes.append((value, copied(value), words))
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, x in list(items):
            if not is_plain(x):
                self._walk(value, key, f"{words}[{key!r}]", depth + 1)

    def _object(self, value: Any, words: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.wholes.append((own.keys(), frozenset(own), words))
            for name in list(own):
                self._walk(own, name, f"{words}.{name}", depth + 2)
        for base in type(value).__mro__[:-1]:
            for name in [n for n in slots(base) if hasattr(value, n)]:
                self._walk(Attributes(value), name, f"{words}.{name}", depth + 2)

    def _closure(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._free.pop(code, None)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._alive.append(cell)
                try:
                    self._walk(Cell(cell), 0, f"{name} of {function.__qualname__}")
                except ValueError:  # a variable that has no value yet
                    continue

    def _environ(self, module: types.ModuleType) -> None:
        if module is os and id(os.environ) not in self._seen:
            self._seen.add(id(os.environ))
            self._container(os.environ._data, "os.environ", 0)  # type: ignore[attr-defined]

    def _source(self, source: Any) -> None:
        if not any(s is source for s, _ in self._sources):
            self._sources.append((source, random_state(source)))

    # -- while the trace runs ------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, functions that run are looked at the first time they are called.

        Nothing is collected meanwhile: a collection that begins while a profiler is being called ends Python 3.11 where somebody listens to it.
        """
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before if before is None or callable(before) else None)
            if collects:
                gc.enable()
            if before is not None and not callable(before):  # cProfile's own object, which sets itself
                before.enable()

    def _called(self, frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or id(code := frame.f_code) in self._codes:
            return
        self._codes[id(code)] = code
        home = code.co_filename
        if home.startswith((_TORCH, _ROOT, "<")) or (home.startswith(_STDLIB) and not home.startswith(_LIBRARIES)):
            return
        with torch._C.DisableTorchFunction():  # looking at a tensor is nothing that the function does
            self._globals(frame.f_globals, code.co_names, Path(home).name, home.startswith(_LIBRARIES))
            missing = [n for n in code.co_freevars if n != "__class__"]
            if missing and not home.startswith(_LIBRARIES):
                values_of = frame.f_locals
                self._free.setdefault(code, {n: values_of[n] for n in missing if n in values_of})
                self._note_tensors(code)

    def _note_tensors(self, code: types.CodeType) -> None:
        """Where the function is kept is looked up later; that a tensor comes from there is known at once."""
        for name, value in self._free.get(code, {}).items():
            if isinstance(value, Tensor):
                self._closures({code})
                return
            if isinstance(value, nn.Module) or not is_plain(value):
                self._walk([value], 0, f"{name} of {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}")

    def _globals(self, table: dict[str, Any], names: tuple[str, ...], home: str, library: bool) -> None:
        for name in names:
            if name not in table or (id(table), name) in self._named:
                continue
            self._named.add((id(table), name))
            value = table[name]
            if isinstance(value, types.ModuleType) or (library and not is_plain(value) and not isinstance(value, (Tensor, *_SOURCES))):
                continue
            if isinstance(value, type):
                if not library and not value.__module__.startswith(_OPAQUE):
                    self._class(value)
                continue
            self._walk(table, name, f"{name} of {home}", library=library)
        for owner in [table[n] for n in names if isinstance(table.get(n), types.ModuleType)]:
            if not library:
                self._environ(owner)
            if not library and not owner.__name__.startswith(_OPAQUE) and not str(getattr(owner, "__file__", _STDLIB)).startswith(_STDLIB):
                own = vars(owner)
                for name in names:
                    if name in own and (id(own), name) not in self._named and not isinstance(own[name], (type, types.ModuleType)):
                        self._named.add((id(own), name))
                        self._walk(own, name, f"{owner.__name__}.{name}")

    @functools.cached_property
    def _named(self) -> set[tuple[int, str]]:
        return set()

    def _closures(self, codes: set[types.CodeType]) -> None:
        """Functions of these codes; of several of one code, those that have the values it was called with, if any has."""
        found = [f for f in gc.get_referrers(*codes) if isinstance(f, types.FunctionType) and f.__code__ in codes]
        called = [f for f in found if self._had(f)]
        for f in called + [f for f in found if f.__code__ not in {g.__code__ for g in called}]:
            self._closure(f)

    def _had(self, function: types.FunctionType) -> bool:
        values_of, cells = (
            self._free.get(function.__code__, {}),
            dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)),
        )
        try:
            return all(unchanged(cells[n].cell_contents, x) for n, x in values_of.items() if is_plain(x))
        except ValueError:  # a variable that has no value yet
            return False

    def finish(self, left: list[Change]) -> None:
        """After the trace: find the functions whose variables were read, and what was left changed."""
        values = {(code, n): x for code, values_of in self._free.items() for n, x in values_of.items()}
        if self._free:
            at = len(self.places)
            self._closures(set(self._free))
            for p in self.places[at:]:  # as they were when the function was called
                if isinstance(p.box, Cell):
                    was = [x for (_, n), x in values.items() if p.words.startswith(f"{n} of ") and is_plain(x)]
                    p.value = was[0] if len(was) == 1 and is_plain(p.value) else p.value
        self.left = [*left, *self.changes(None)]
        for memo, misses in self._memos:  # it would give tensors of the trace, which have no values, to whoever asks next
            if memo.cache_info().misses != misses:
                memo.cache_clear()
        self.drew = any(random_state(source) != state for source, state in self._sources)

    def undo(self) -> None:
        """Take back what the trace left in Python."""
        for full, copy, _ in self.wholes:
            if not same_contents(full, copy):
                restore(full, copy)
        for place in self.places:
            if not unchanged(place.now(), place.value):
                place.put(place.value)
        for change in reversed(self.left):
            if change.place is not None:
                change.place.put(change.before)
        for source, state in self._sources:
            set_random_state(source, state)

    def forget_tensors(self) -> None:
        """Take tensors of the trace out of what the user keeps: they stand for no value."""
        for full, copy, _ in self.wholes:
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
        named = {id(c.place.box.whole) for c in self.left if c.place is not None and isinstance(c.place.box, Contents)}
        inside = [(full, copy, words) for full, copy, words in self.wholes if id(full) not in named and holds_traced(full)]
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

    def hold(self, batch: Any = None) -> bool:
        """Whether all that was read still is what it was."""
        try:
            for box, key, value in self._flat:
                now = box[key]
                if now is not value and not unchanged(now, value):
                    return False
            for full, size in self._lengths:
                if len(full) != size:
                    return False
            if any(self._empty) or not all(map(same_kind, self.tensors.values())) or self._moved():
                return False
        except (KeyError, IndexError, ValueError):
            return False
        if any(not same_contents(full, copy) for full, copy, _ in self.wholes) or any(t.requires_grad is not f for t, f, _ in self.flags):
            return False
        if any(_hooks(t) != many for t, many, _ in self.hooks):
            return False
        if any(not np.array_equal(a, copy, equal_nan=a.dtype.kind == "f") for a, copy, _ in self.arrays):
            return False
        now = _environment()
        return all(now[k] == x for k, x in self._environment.items()) and self._batch_holds(batch) and self._answers_hold(batch)

    def _answers_hold(self, batch: Any) -> bool:
        given = named_batch(batch) if self.asked else {}
        return all(asked.holds(given, self.answers) for asked in self.asked)

    @functools.cached_property
    def _flat(self) -> list[tuple[Any, Any, Any]]:
        return [(p.box, p.key, p.value) for p in self._compared]

    @functools.cached_property
    def _compared(self) -> list[Place]:
        numbers = {p.where for p, _ in self.lifted.values() if isinstance(p, Place)}
        return [p for p in self.places if p.where not in numbers]

    @functools.cached_property
    def _empty(self) -> list[Any]:
        return [full for full, size, _ in self.sizes if not size]

    @functools.cached_property
    def _lengths(self) -> list[tuple[Any, int]]:
        return [(full, size) for full, size, _ in self.sizes if size]

    def _batch_holds(self, batch: Any) -> bool:
        now = _plain_leaves(batch)
        if now.keys() != self.batch.keys():
            return False
        return all(unchanged(now[n], x) or (n in self.lifted and type(now[n]) is type(x)) for n, x in self.batch.items())

    def in_any_mode(self) -> Reads:
        """The same, whatever the modules' training modes are: it was traced in evaluation mode, and shall be run in it."""
        self.places = [p for p in self.places if p.key != "training"]
        return self.in_any_grad_mode()

    def in_any_grad_mode(self) -> Reads:
        """The same with gradients and without: what was traced is forward alone."""
        self._environment.pop("torch's grad mode", None)
        return self

    def in_any_precision(self) -> Reads:
        """The same under autocast and without: the trace was made without."""
        self._environment = {k: x for k, x in self._environment.items() if "autocast" not in k}
        return self

    def of_values(self, sharded: nn.Module) -> Reads:
        """What it read of plain values, of modes and of hooks of the module's parts: its parameters and its own forward have been made others."""
        self.in_any_grad_mode()
        own = [sharded.__dict__, *(sharded.__dict__[k] for k in TABLES)]
        self.places = [p for p in self.places if is_plain(p.value)]
        self.wholes = [full for full in self.wholes if not any(full[0] is x for x in own)]
        self.sizes = [size for size in self.sizes if not any(size[0] is x for x in own)]
        self.hooks, self.flags, self.batch = [], [], _plain_leaves(None)
        self.fixed = [(p, p.value._version) for p in self.tensors.values()]
        return self

    def changed_since(self) -> list[Change]:
        """What is another than when it was traced, tensors that Python keeps included."""
        return [] if self.hold() else self.changes(None)

    def _moved(self) -> list[Place]:
        return [p for p, version in self.fixed if p.now() is not p.value or p.value._version != version]

    def tensors_now(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constants of the trace; those that Python keeps, as they are now."""
        return {n: self.read_anew[n].now().detach() if n in self.read_anew else x for n, x in constants.items()}

    def changes(self, batch: Any) -> list[Change]:
        """What is another than when it was traced, in words."""
        numbers = {p.where for p, _ in self.lifted.values() if isinstance(p, Place)}
        moved = [(p, p.now()) for p in self.places if p.where not in numbers]
        found = [Change(p.words, p.value, now, p) for p, now in moved if not unchanged(now, p.value)]
        found += [
            Change(words, shown_contents(copy), shown_contents(copied(full)))
            for full, copy, words in self.wholes
            if not same_contents(full, copy)
        ]
        found += [Change(words, f"{size} of them", f"{len(full)}") for full, size, words in self.sizes if len(full) != size]
        found += [Change(p.words, p.value, p.now()) for p in self.tensors.values() if not same_kind(p)]
        found += [Change(p.words, "its values", "others") for p in self._moved()]
        found += [Change(words, many, _hooks(t)) for t, many, words in self.hooks if _hooks(t) != many]
        found += [Change(words, f, t.requires_grad) for t, f, words in self.flags if t.requires_grad is not f]
        found += [Change(words, "its values", "others") for a, copy, words in self.arrays if not np.array_equal(a, copy)]
        now = _environment()
        found += [Change(k, x, now[k]) for k, x in self._environment.items() if now[k] != x]
        if batch is not None:
            given = _plain_leaves(batch)
            keys = dict.fromkeys([*self.batch, *given])
            pairs = [(n, self.batch.get(n, MISSING), given.get(n, MISSING)) for n in keys]
            found += [
                Change(f"{n} of the batch" if n != "batch" else "the batch", a, b)
                for n, a, b in pairs
                if not unchanged(b, a) and not (n in self.lifted and type(a) is type(b))
            ]
        return found

    def numbers(self, batch: Any) -> dict[str, float]:
        """The inputs that are numbers in Python, as they are now."""
        given = _plain_leaves(batch) if any(isinstance(p, str) for p, _ in self.lifted.values()) else {}
        return {name: given[p] if isinstance(p, str) else p.now() for name, (p, _) in self.lifted.items()}


@contextmanager
def unheard() -> Iterator[None]:
    """Inside is work of weft's and torch's own, which need not be listened to call by call."""
    listener = sys.getprofile()
    if not isinstance(getattr(listener, "__self__", None), Reads):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(listener)


def _hooks(t: Tensor) -> int:
    own, after = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    return (len(own) if own else 0) + (len(after) if after else 0)


def _plain_leaves(batch: Any) -> dict[str, Any]:
    """All of a batch but its tensors, of which the place alone is read; arrays by what is in them."""
    return {n: Tensor if isinstance(x, Tensor) else _contents(x) if isinstance(x, np.ndarray) else x for n, x in leaves("batch", batch)}


def _contents(x: np.ndarray) -> str:
    return f"array of {x.dtype}{list(x.shape)}: {hashlib.sha256(x.tobytes()).hexdigest()}" if x.dtype != object else repr(x.tolist())


@functools.cache
def _devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


def _environment() -> dict[str, Any]:
    """Modes of torch that a trace runs under."""
    found = {f"torch's autocast on {k}": (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _devices()}
    return {"torch's default dtype": torch.get_default_dtype(), "torch's grad mode": torch.is_grad_enabled(), **found}
