"""What a trace reads from Python, with the places it was read at: compared again at each call, so that no answer is an old one.

Before a trace the loss and all modules are walked; while it runs, every function of the user's adds the globals it names and the variables it
closes over. A plain value is compared, a container by its parts, any other object by identity and by its attributes. A tensor is no
guard: it becomes an input that is read anew. What the trace itself leaves changed, random state too, is an effect.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from weft.frontend.capture.places import (
    SKIPPED,
    TABLES,
    Attributes,
    Cell,
    Change,
    Context,
    Place,
    copied,
    is_plain,
    random_state,
    slots,
    unchanged,
)
from weft.frontend.capture.read_values import ReadValues, hooks

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


class Reads(ReadValues):
    """All that one trace may have read, and what it left changed."""

    def __init__(self, model: nn.Module, loss: Any = None, batch: Any = None) -> None:
        self.model, self.loss = model, loss
        super().__init__(batch)
        self.shared = True  # isomorphic layers are traced once
        self._memos: list[tuple[Any, int]] = []  # functools' caches, and how often they did not know
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._codes: dict[int, types.CodeType] = {}  # by identity: a code's own hash is that of all it says
        self._free: dict[types.CodeType, dict[str, Any]] = {}
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
            self.hooks += [(t, hooks(t), f"the hooks of {words}.{n}") for n, t in table.items() if t is not None]
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
        self.contents.append((value, copied(value), words))
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, x in list(items):
            if not is_plain(x):
                self._walk(value, key, f"{words}[{key!r}]", depth + 1)

    def _object(self, value: Any, words: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.contents.append((own.keys(), frozenset(own), words))
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
        if not any(s is source for s, _ in self.sources):
            self.sources.append((source, random_state(source)))

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
        self.left = [*left, *self.changes()]
        for memo, misses in self._memos:  # it would give tensors of the trace, which have no values, to whoever asks next
            if memo.cache_info().misses != misses:
                memo.cache_clear()
        self.drew = any(random_state(source) != state for source, state in self.sources)

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
