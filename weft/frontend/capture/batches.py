"""A batch by its leaves: what a user hands to a step, whatever it is made of, taken apart and put together again."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import CaptureError
from weft.core.names import part

_OPAQUE = (Tensor, nn.Module, torch.Size, str, bytes, enum.Enum, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def children(value: Any, objects: bool = True) -> list[tuple[Any, Any]] | None:
    """The parts of a container and the keys they stand at, of any object its attributes or what it says; None for a leaf."""
    if isinstance(value, _OPAQUE):
        return None
    if hasattr(type(value), "batch_parts"):
        return list(value.batch_parts())
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    own = getattr(value, "__dict__", None) if objects else None
    return list(own.items()) if isinstance(own, dict) and type(value).__module__ != "builtins" else None


def leaves(name: str, value: Any, objects: bool = True, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name; a container that holds itself is a leaf."""
    inside = None if id(value) in around else children(value, objects)
    if inside is None:
        yield name, value
        return
    for key, child in inside:
        yield from leaves(f"{name}.{_part(value, key)}", child, objects, (*around, id(value)))


def values(value: Any, objects: bool = True, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Every leaf, unnamed."""
    inside = None if id(value) in around else children(value, objects)
    if inside is None:
        yield value
        return
    for _, child in inside:
        yield from values(child, objects, (*around, id(value)))


def named_batch(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by the names their inputs have."""
    return tensors(_root(batch), batch)


def samples_in(shapes: Iterable[Sequence[int]]) -> int:
    """How many samples a batch of such tensors has: what most of them begin with, since others may be a mask or positions that all samples share."""
    return next((size for size, _ in Counter(shape[0] for shape in shapes if shape).most_common(1)), 0)


def changed(batch: Any, leaf: Callable[[str, Any], Any]) -> Any:
    """The same batch with another value at each leaf, which is given with its name; containers without one that changed are kept themselves."""
    return _changed(_root(batch), batch, leaf)


def _root(batch: Any) -> str:
    return "batch.0" if isinstance(batch, Tensor) else "batch"


def _changed(name: str, value: Any, leaf: Callable[[str, Any], Any], around: tuple[int, ...] = ()) -> Any:
    inside = None if id(value) in around else children(value)
    if inside is None:
        return leaf(name, value)
    new = [(key, child, _changed(f"{name}.{_part(value, key)}", child, leaf, (*around, id(value)))) for key, child in inside]
    return value if all(a is b for _, a, b in new) else _rebuilt(value, [(key, b) for key, _, b in new])


def tensors(name: str, value: Any, objects: bool = True) -> dict[str, Tensor]:
    """The tensors of a value by name. Two of one name are refused: one would be taken for the other."""
    found: dict[str, Tensor] = {}
    for key, x in leaves(name, value, objects):
        if isinstance(x, Tensor):
            if key in found:
                raise CaptureError("two tensors have one name", needed="keys that print differently", found=key)
            found[key] = x
    return found


def _part(value: Any, key: Any) -> str:
    return str(key) if isinstance(value, (tuple, list)) else part(key)


def _rebuilt(value: Any, items: list[tuple[Any, Any]]) -> Any:
    if hasattr(type(value), "with_batch_parts"):
        return value.with_batch_parts(items)
    if isinstance(value, tuple):
        parts = [x for _, x in items]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return dict(items)
    new = copy.copy(value)
    for key, x in items:
        if isinstance(value, (Mapping, list)):
            new[key] = x
        else:
            object.__setattr__(new, key, x)
    return new
