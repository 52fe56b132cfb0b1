"""What JSON data must look like: kinds with limits, put together, and the first place where a value does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import PlanError

MOST = 1 << 20  # entries of a list or object, and anything counted
LARGE = 1 << 31


@dataclass(frozen=True)
class Misfit:
    """Where, what was needed, what was found. `keys` where an object has others than it should."""

    path: str
    needed: str
    found: str
    keys: bool = False


@dataclass(frozen=True)
class Kind:
    """A single value, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not self.fits(value):
            yield Misfit(path, self.words, short(value))


@dataclass(frozen=True)
class Listed:
    """A list, every entry of one kind."""

    of: Any
    most: int = MOST

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not isinstance(value, list) or len(value) > self.most:
            yield Misfit(path, f"a list of at most {self.most:,}", short(value))
            return
        for i, entry in enumerate(value):
            yield from self.of.misfits(entry, f"{path}[{i}]")


@dataclass(frozen=True)
class Row:
    """A list of so many entries, each of its own kind."""

    of: tuple[Any, ...]

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not isinstance(value, list) or len(value) != len(self.of):
            yield Misfit(path, f"a list of {len(self.of)}", short(value))
            return
        for i, (kind, entry) in enumerate(zip(self.of, value, strict=True)):
            yield from kind.misfits(entry, f"{path}[{i}]")


@dataclass(frozen=True)
class Mapped:
    """An object with names that are free, every value of one kind."""

    of: Any
    keys: Any = None
    most: int = MOST

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not isinstance(value, dict) or len(value) > self.most:
            yield Misfit(path, f"an object of at most {self.most:,}", short(value))
            return
        for name, entry in value.items():
            if self.keys is not None:
                yield from self.keys.misfits(name, f"a name in {path}")
            yield from self.of.misfits(entry, _under(path, name))


@dataclass(frozen=True)
class Record:
    """An object with these names, of which some may be left out, and no others unless it is open."""

    of: Mapping[str, Any]
    optional: tuple[str, ...] = ()
    open: bool = False

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not isinstance(value, dict):
            yield Misfit(path, "an object", short(value))
            return
        lacking = [k for k in self.of if k not in value and k not in self.optional]
        odd = [k for k in value if k not in self.of and not self.open]
        if lacking or odd:
            found = f"unknown {', '.join(map(short, odd[:4]))}" if odd else "not there"
            yield Misfit(path, ", ".join(lacking or self.of), found.replace("'", ""), keys=True)
            return
        for name, entry in value.items():
            if name in self.of:
                yield from self.of[name].misfits(entry, _under(path, name))


@dataclass(frozen=True)
class Maybe:
    """A value of a kind, or null."""

    of: Any

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if value is not None:
            yield from self.of.misfits(value, path)


def integer(low: int = 0, high: int = MOST) -> Kind:
    return Kind(f"an integer of {low} to {high:,}", lambda x: type(x) is int and low <= x <= high)


def number(low: float = -1e18, high: float = 1e18) -> Kind:
    words = f"a number of {low:g} to {high:g}"
    return Kind(words, lambda x: type(x) in (int, float) and low <= x <= high)


def text(longest: int = 4000) -> Kind:
    return Kind(f"a text of at most {longest:,} characters", lambda x: isinstance(x, str) and len(x) <= longest)


def one_of(*words: str) -> Kind:
    return Kind(" or ".join(words), lambda x: isinstance(x, str) and x in words)


flag = Kind("true or false", lambda x: isinstance(x, bool))
word = Kind("a word", lambda x: isinstance(x, str) and re.fullmatch(r"[A-Za-z_][\w.]{0,79}", x) is not None)


def fit(kind: Any, data: Any, where: str) -> None:
    """Refuse data that is not of a kind, at the first place where it is not."""
    odd = next(kind.misfits(data, ""), None)
    if odd is not None:
        of = f"{odd.path} of {where}" if odd.path else where
        raise PlanError(f"{of} cannot be read" if odd.keys else f"{of} is of the wrong kind", needed=odd.needed, found=odd.found)


def short(value: Any) -> str:
    """A value in a line, however long it is."""
    if isinstance(value, (list, dict)) and len(value) > 8:
        first = ", ".join(short(name) for name in list(value)[:3])
        return f"a list of {len(value):,}" if isinstance(value, list) else f"an object with {first} and {len(value) - 3:,} more keys"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def _under(path: str, name: str) -> str:
    text = name if len(name) <= 60 else name[:57] + "..."
    return f"{path}.{text}" if path else text
