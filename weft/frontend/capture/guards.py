"""What a trace reads from Python, with the places it was read at: compared again at each call, so that no answer is an old one.

Before a trace the loss and all modules are walked; while it runs, every function of the user's adds the globals it names and the variables it
closes over. A plain value is compared, a container by its parts, any other object by identity and by its attributes. A tensor is no
guard: it becomes an input that is read anew. What the trace itself leaves changed, random state too, is an effect.
"""

from __future__ import annotations

import enum
import functools
import gc
import pickle
import random
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import RuntimeFault
from weft.core.node import Node, toposort
from weft.frontend.capture.alike import PLAIN
from weft.frontend.capture.batches import leaves, tensors, values

DEPTH, MOST = 6, 50_000  # how deep containers and objects are followed, and how many places are kept at most
_TENSORS = ("_parameters", "_buffers", "_modules")
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SKIPPED = {*_TENSORS, "_non_persistent_buffers_set", "_is_full_backward_hook", "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
            "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", *_TABLES}  # fmt: skip
_SAME = frozenset(PLAIN) | {complex}
_CONTAINERS = (list, tuple, dict, set, frozenset)
_OPAQUE = ("torch", "weft", "numpy", "logging", "threading", "builtins", "weakref", "_thread", "_io", "io", "re", "collections.abc", "ctypes")
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_ROOT, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_LIBRARIES = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


class _Cell:
    """A variable that a function closes over, as something with an item."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: Any) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: Any, value: Any) -> None:
        self.cell.cell_contents = value


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
        anchor = self.box.cell if isinstance(self.box, _Cell) else self.box.of if isinstance(self.box, _Attributes) else self.box
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


MISSING = object()


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


def _plain(x: Any) -> bool:
    return type(x) in _SAME or isinstance(x, (enum.Enum, np.generic))


def _unchanged(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and (_plain(before)) and bool(now == before))


@dataclass
class Asked:
    """A number that the batch alone decides and Python asked for: the trace serves batches that give the same."""

    node: Node
    held: dict[Node, Tensor]  # constants it reads
    words: str
    value: Any = None

    def of(self, batch: Mapping[str, Tensor]) -> Any:
        found = dict(self.held)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for n in toposort([self.node]):
                if n not in found:
                    found[n] = _whole(n, batch) if n.op.name == "input" else n.op.run(*(found[a] for a in n.args), **dict(n.attrs))
            return found[self.node].item()

    def holds(self, batch: Mapping[str, Tensor]) -> bool:
        now = self.of(batch)
        return bool(now == self.value or (now != now and self.value != self.value))


def _whole(n: Node, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch[n.attr("name")]
    if tuple(x.shape) != n.shape:
        raise RuntimeFault(
            "Python asks for a number that the full batch decides",
            needed=f"the full batch on every rank: {n.attr('name').removeprefix('batch.')} {list(n.shape)}",
            found=f"{list(x.shape)}, a part of it",
            try_="give every rank the full batch",
        )
    return x.detach().cpu()


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
        self.asked: list[Asked] = []
        self.left: list[Change] = []  # what the trace changed
        self.drew = False  # whether it drew random numbers in Python
        self.shared = True  # layers alike are traced once
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
            if name not in _SKIPPED:
                self._walk(own, name, f"{words}.{name}")
        for table in (module._parameters, module._buffers):
            self.hooks += [(t, _hooks(t), f"the hooks of {words}.{n}") for n, t in table.items() if t is not None]
            self.flags += [(t, t.requires_grad, f"{words}.{n}.requires_grad") for n, t in table.items() if t is not None]
            self.places += [Place(table, n, t, f"{words}.{n}") for n, t in table.items()]
        for name, child in module._modules.items():
            self.places.append(Place(module._modules, name, child, f"{words}.{name}"))
        for name in _TABLES:
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
        named = [k for k, x in vars(kind).items() if not k.startswith("__") and (_plain(x) or isinstance(x, (Tensor, *_CONTAINERS)))]
        for name in named:
            self._walk(_Attributes(kind), name, f"{kind.__name__}.{name}")

    def _walk(self, box: Any, key: Any, words: str, depth: int = 0, library: bool = False) -> None:
        value = box[key]
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor):
                self.tensors.setdefault(id(value), Place(box, key, value, words))
            return
        if len(self.places) > MOST:
            return
        self.places.append(Place(box, key, value, words))
        if _plain(value) or depth > DEPTH or id(value) in self._seen:
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
            self._walk([value.func], 0, words, depth + 1)
            self._container(value.args, words, depth + 1)
            self._container(value.keywords, words, depth + 1)
        elif isinstance(value, types.MethodType):
            self._walk([value.__self__], 0, words, depth + 1)
            self._walk([value.__func__], 0, words, depth + 1)
        elif isinstance(value, types.FunctionType):
            if value.__code__.co_filename.startswith((_ROOT, _TORCH)):
                return
            self._closure(value)
            for name in vars(value):
                self._walk(vars(value), name, f"{words}.{name}", depth + 1)
        elif not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) and not type(value).__module__.startswith(_OPAQUE):
            self._object(value, words, depth)

    def _container(self, value: Any, words: str, depth: int) -> None:
        self.wholes.append((value, _copied(value), words))
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, x in list(items):
            if not _plain(x):
                self._walk(value, key, f"{words}[{key!r}]", depth + 1)

    def _object(self, value: Any, words: str, depth: int) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.wholes.append((own.keys(), frozenset(own), words))
            for name in list(own):
                self._walk(own, name, f"{words}.{name}", depth + 1)
        for base in type(value).__mro__[:-1]:
            for name in [n for n in _slots(base) if hasattr(value, n)]:
                self._walk(_Attributes(value), name, f"{words}.{name}", depth + 1)

    def _closure(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._free.pop(code, None)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._alive.append(cell)
                try:
                    self._walk(_Cell(cell), 0, f"{name} of {function.__qualname__}")
                except ValueError:  # a variable that has no value yet
                    continue

    def _source(self, source: Any) -> None:
        if not any(s is source for s, _ in self._sources):
            self._sources.append((source, _state(source)))

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
        self._globals(frame.f_globals, code.co_names, Path(home).name, home.startswith(_LIBRARIES))
        missing = [n for n in code.co_freevars if n != "__class__"]
        if missing and not home.startswith(_LIBRARIES):
            held = frame.f_locals
            self._free.setdefault(code, {n: held[n] for n in missing if n in held})
            self._note_tensors(code)

    def _note_tensors(self, code: types.CodeType) -> None:
        """Where the function is kept is looked up later; that a tensor comes from there is known at once."""
        for name, value in self._free.get(code, {}).items():
            if isinstance(value, Tensor):
                self._closures({code})
                return
            if isinstance(value, nn.Module) or not _plain(value):
                self._walk([value], 0, f"{name} of {code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}")

    def _globals(self, table: dict[str, Any], names: tuple[str, ...], home: str, library: bool) -> None:
        for name in names:
            if name not in table or (id(table), name) in self._named:
                continue
            self._named.add((id(table), name))
            value = table[name]
            if isinstance(value, types.ModuleType) or (library and not _plain(value) and not isinstance(value, (Tensor, *_SOURCES))):
                continue
            if isinstance(value, type):
                if not library and not value.__module__.startswith(_OPAQUE):
                    self._class(value)
                continue
            self._walk(table, name, f"{name} of {home}", library=library)
        for owner in [table[n] for n in names if isinstance(table.get(n), types.ModuleType)]:
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
        held, cells = self._free.get(function.__code__, {}), dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        try:
            return all(_unchanged(cells[n].cell_contents, x) for n, x in held.items() if _plain(x))
        except ValueError:  # a variable that has no value yet
            return False

    def settle(self, left: list[Change]) -> None:
        """After the trace: find the functions whose variables were read, and what was left changed."""
        values = {(code, n): x for code, held in self._free.items() for n, x in held.items()}
        if self._free:
            at = len(self.places)
            self._closures(set(self._free))
            for p in self.places[at:]:  # as they were when the function was called
                if isinstance(p.box, _Cell):
                    was = [x for (_, n), x in values.items() if p.words.startswith(f"{n} of ") and _plain(x)]
                    p.value = was[0] if len(was) == 1 and _plain(p.value) else p.value
        self.left = [*left, *self.changes(None)]
        self.drew = any(_state(source) != state for source, state in self._sources)

    def undo(self) -> None:
        """Take back what the trace left in Python."""
        for whole, copy, _ in self.wholes:
            if not _same_whole(whole, copy):
                _restore(whole, copy)
        for place in self.places:
            if not _unchanged(place.now(), place.value):
                place.put(place.value)
        for change in reversed(self.left):
            if change.place is not None:
                change.place.put(change.before)
        for source, state in self._sources:
            _set_state(source, state)

    def forget_tensors(self) -> None:
        """Take tensors of the trace out of what the user keeps: they stand for no value."""
        for whole, copy, _ in self.wholes:
            if holds_traced(whole):
                _restore(whole, copy)
        for place in self.places:
            if holds_traced(place.now()):
                place.put(place.value)
        for change in self.keeps_tensors:
            if change.place is not None:
                change.place.put(change.before)

    def redo(self) -> None:
        """Leave in the modules' attributes what the trace left there."""
        for change in self.left:
            if change.place is not None:
                change.place.put(change.now)

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
                if now is not value and not _unchanged(now, value):
                    return False
            for whole, size in self._lengths:
                if len(whole) != size:
                    return False
            if any(self._empty) or not all(map(_as_it_was, self.tensors.values())):
                return False
        except (KeyError, IndexError, ValueError):
            return False
        if any(not _same_whole(whole, copy) for whole, copy, _ in self.wholes) or any(t.requires_grad is not f for t, f, _ in self.flags):
            return False
        if any(_hooks(t) != many for t, many, _ in self.hooks):
            return False
        if any(not np.array_equal(a, copy, equal_nan=a.dtype.kind == "f") for a, copy, _ in self.arrays):
            return False
        now = _environment()
        return all(now[k] == x for k, x in self._environment.items()) and self._batch_holds(batch) and self._answers_hold(batch)

    def _answers_hold(self, batch: Any) -> bool:
        given = tensors("batch.0" if isinstance(batch, Tensor) else "batch", batch) if self.asked else {}
        return all(asked.holds(given) for asked in self.asked)

    @functools.cached_property
    def _flat(self) -> list[tuple[Any, Any, Any]]:
        return [(p.box, p.key, p.value) for p in self._compared]

    @functools.cached_property
    def _compared(self) -> list[Place]:
        numbers = {p.where for p, _ in self.lifted.values() if isinstance(p, Place)}
        return [p for p in self.places if p.where not in numbers]

    @functools.cached_property
    def _empty(self) -> list[Any]:
        return [whole for whole, size, _ in self.sizes if not size]

    @functools.cached_property
    def _lengths(self) -> list[tuple[Any, int]]:
        return [(whole, size) for whole, size, _ in self.sizes if size]

    def _batch_holds(self, batch: Any) -> bool:
        now = _plain_leaves(batch)
        if now.keys() != self.batch.keys():
            return False
        return all(_unchanged(now[n], x) or (n in self.lifted and type(now[n]) is type(x)) for n, x in self.batch.items())

    def in_any_mode(self) -> Reads:
        """The same, whatever the modules' training modes are: it was traced in evaluation mode, and shall be run in it."""
        self.places = [p for p in self.places if p.key != "training"]
        self._environment.pop("torch's grad mode", None)
        return self

    def of_values(self) -> Reads:
        """What it read of plain values alone: the modules' parameters, hooks and attributes have been made others on purpose."""
        self.in_any_mode()
        self.places = [p for p in self.places if _plain(p.value)]
        self.wholes = [whole for whole in self.wholes if not whole[2].endswith(_TABLES)]
        self.sizes, self.hooks, self.flags, self.batch = [], [], [], _plain_leaves(None)
        self.fixed = [(p, p.value._version) for p in self.tensors.values()]
        return self

    def held_fast(self) -> list[Change]:
        """What is another than when it was traced, tensors that Python keeps included."""
        found = [] if self.hold() else self.changes(None)
        moved = [p for p, version in self.fixed if p.now() is not p.value or p.value._version != version]
        return found + [Change(p.words, "its values", "others") for p in moved]

    def tensors_now(self, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Constants of the trace; those that Python keeps, as they are now."""
        return {n: self.read_anew[n].now().detach() if n in self.read_anew else x for n, x in constants.items()}

    def changes(self, batch: Any) -> list[Change]:
        """What is another than when it was traced, in words."""
        numbers = {p.where for p, _ in self.lifted.values() if isinstance(p, Place)}
        moved = [(p, p.now()) for p in self.places if p.where not in numbers]
        found = [Change(p.words, p.value, now, p) for p, now in moved if not _unchanged(now, p.value)]
        found += [Change(words, _text(copy), _text(_copied(whole))) for whole, copy, words in self.wholes if not _same_whole(whole, copy)]
        found += [Change(words, f"{size} of them", f"{len(whole)}") for whole, size, words in self.sizes if len(whole) != size]
        found += [Change(p.words, p.value, p.now()) for p in self.tensors.values() if not _as_it_was(p)]
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
                if not _unchanged(b, a) and not (n in self.lifted and type(a) is type(b))
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards every module of it is in the mode it was in."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


@contextmanager
def as_before(reads: Reads | None) -> Iterator[None]:
    """Inside, Python is as it was before the trace; afterwards as it was before this, whatever ran inside."""
    if reads is None:
        yield
        return
    places = [(p, p.now()) for p in reads.places]
    wholes = [(whole, _copied(whole)) for whole, _, _ in reads.wholes]
    sources = [(source, _state(source)) for source, _ in reads._sources]
    reads.undo()
    try:
        yield
    finally:
        reads.undo()
        for whole, copy in wholes:
            if not _same_whole(whole, copy):
                _restore(whole, copy)
        for place, value in places:
            if not _unchanged(place.now(), value):
                place.put(value)
        for source, state in sources:
            _set_state(source, state)


class _Contents:
    """What lies in a container, as an item."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def __getitem__(self, _: Any) -> Any:
        return _copied(self.whole)

    def __setitem__(self, _: Any, copy: Any) -> None:
        _restore(self.whole, copy)


def changed_attributes(module: nn.Module, before: dict[str, Any], contents: list[tuple[Any, Any]], words: str) -> list[Change]:
    """A module's own attributes that are others than before, or hold others; hooks that came while it ran are among them."""
    own = module.__dict__
    names = {id(x): n for n, x in before.items() if n not in _TENSORS}
    held = [(f"{words}.{names[id(x)]}", x, _copied(was)) for x, was in contents if id(x) in names]
    inside = [Change(text, was, _copied(x), Place(_Contents(x), 0, was, text)) for text, x, was in held if not _same_whole(x, was)]
    return inside + _replaced(own, before, words)


def _replaced(own: dict[str, Any], before: dict[str, Any], words: str) -> list[Change]:
    names = [n for n in dict.fromkeys([*before, *own]) if n not in _SKIPPED]
    pairs = [(n, before.get(n, MISSING), own.get(n, MISSING)) for n in names]
    return [Change(f"{words}.{n}", a, b, Place(own, n, a, f"{words}.{n}")) for n, a, b in pairs if not _unchanged(b, a)]


class _Attributes:
    """An object's attributes as items."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __getitem__(self, key: str) -> Any:
        return getattr(self.of, key, MISSING)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.of, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.of, key)


def _hooks(t: Tensor) -> int:
    own, after = t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)
    return (len(own) if own else 0) + (len(after) if after else 0)


def _as_it_was(place: Place) -> bool:
    """Whether there still is a tensor of the same kind; its values may be others."""
    now = place.now()
    return now is place.value or (isinstance(now, Tensor) and now.shape == place.value.shape and now.dtype == place.value.dtype)


def _slots(kind: type) -> list[str]:
    found = kind.__dict__.get("__slots__", ())
    return [n for n in ([found] if isinstance(found, str) else list(found)) if not n.startswith("__")]


def _copied(whole: Any) -> Any:
    if isinstance(whole, (set, frozenset, type({}.keys()))):
        return frozenset(whole)
    return dict(whole) if isinstance(whole, dict) else tuple(whole)


def _same_whole(whole: Any, copy: Any) -> bool:
    if len(whole) != len(copy):
        return False
    if isinstance(copy, frozenset):
        return bool(whole == copy)
    pairs = [(whole.get(k, MISSING), x) for k, x in copy.items()] if isinstance(copy, dict) else zip(whole, copy, strict=True)
    return all(a is b or not _plain(b) or _unchanged(a, b) for a, b in pairs)


def _restore(whole: Any, copy: Any) -> None:
    if isinstance(whole, list):
        whole[:] = copy
    elif isinstance(whole, (dict, set)):
        whole.clear()
        whole.update(copy)


def _text(copy: Any) -> str:
    text = repr(sorted(copy, key=str) if isinstance(copy, frozenset) else copy)
    return text if len(text) < 60 else f"{text[:57]}..."


def _plain_leaves(batch: Any) -> dict[str, Any]:
    """All of a batch but its tensors, of which the place alone is read."""
    return {n: Tensor if isinstance(x, Tensor) else x for n, x in leaves("batch", batch)}


def holds_traced(value: Any) -> bool:
    """Whether a tensor of the trace is in it, or a weak reference that is of one or of nothing any more, as recurrent layers keep them."""
    return any(isinstance(x, FakeTensor) or (isinstance(x, weakref.ref) and _traced(x())) for x in values(value, objects=False))


def _traced(referred: Any) -> bool:
    return referred is None or isinstance(referred, FakeTensor)


@functools.cache
def _devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ("cpu",) if found is None else ("cpu", found.type)


def _environment() -> dict[str, Any]:
    """Modes of torch that a trace runs under."""
    found = {f"torch's autocast on {k}": (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _devices()}
    return {"torch's default dtype": torch.get_default_dtype(), "torch's grad mode": torch.is_grad_enabled(), **found}


def _state(source: Any) -> bytes:
    """The state of a source of random numbers, as bytes that compare."""
    if isinstance(source, random.Random):
        return pickle.dumps(source.getstate())
    if isinstance(source, np.random.RandomState):
        return pickle.dumps(source.get_state())
    return pickle.dumps((source.bit_generator if isinstance(source, np.random.Generator) else source).state)


def _set_state(source: Any, state: bytes) -> None:
    was = pickle.loads(state)
    if isinstance(source, random.Random):
        source.setstate(was)
    elif isinstance(source, np.random.RandomState):
        source.set_state(was)
    else:
        (source.bit_generator if isinstance(source, np.random.Generator) else source).state = was
