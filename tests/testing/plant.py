"""Planting a fault: one line of a function, one facet of an op, or one value of a module made weaker for a while."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from weft.core import layout, node
from weft.core.node import op_named


class Weakening(Protocol):
    """A change of the system that can be undone."""

    def planted(self) -> Any: ...


@dataclass(frozen=True)
class Line:
    """`old`, which stands once in the source of a function (`module:name` or `module:Class.name`), becomes `new`."""

    where: str
    old: str
    new: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        function = _function(self.where)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise LookupError(f"{self.where} has {source.count(self.old)} times {self.old!r}: bring the fault up to date")
        made: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), self.where, "exec"), function.__globals__, made)
        before, function.__code__ = function.__code__, inspect.unwrap(made[function.__name__]).__code__
        try:
            yield
        finally:
            function.__code__ = before


@dataclass(frozen=True)
class Facet:
    """A facet of an op has another value."""

    op: str
    facet: str
    value: Any

    @contextmanager
    def planted(self) -> Iterator[None]:
        op = op_named(self.op)
        before = getattr(op, self.facet)
        object.__setattr__(op, self.facet, self.value)
        try:
            yield
        finally:
            object.__setattr__(op, self.facet, before)


def _function(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = inspect.unwrap(found)
    return function


@contextmanager
def plant(weakening: Weakening) -> Iterator[None]:
    """The weakening in force, and nothing remembered from before it or after it."""
    with _forgetting(), weakening.planted():
        yield


@contextmanager
def _forgetting() -> Iterator[None]:
    """Nodes made meanwhile are not mixed with others: their types may follow from other rules."""
    kept = list(node._built.items())
    _forget()
    try:
        yield
    finally:
        _forget()
        node._built.update(kept)


def _forget() -> None:
    node._built.clear()
    for cached in (layout._canonical, layout._layout_of, layout.finest, layout._atom_positions, node._inferred):
        cached.cache_clear()
