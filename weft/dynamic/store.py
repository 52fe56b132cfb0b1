"""Where the values of a class live.

full      one buffer for all vertices (or edges) of the class, rounds after each other: for what another phase reads
scratch   one buffer as long as the longest round: for what only the same round reads
state     what parents gather: one buffer over all classes, by place
message   gradients on their way to children: one buffer over all classes, by place or by edge
output    what is pushed and is no state; push: gradients of outputs. Over all classes, by place
pull      rows of an input in the order of the class
fixed     values without rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from weft.core.node import Node
from weft.dynamic.phases import domain
from weft.dynamic.sizes import EDGES, ROWS

Key = tuple[str, ...]


@dataclass(frozen=True)
class Home:
    """The buffer of a value: its kind, its name within the kind, one row per vertex or per edge."""

    kind: str
    key: Key
    domain: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int = 0  # the dim of the value that holds the rows
    folded: tuple[int, int] | None = None  # that dim holds several slices per row: (slices before the rows, slices after)

    @property
    def columns(self) -> int:
        return prod(self.shape)

    def show(self, rows: Tensor) -> Tensor:
        """The value as its readers expect it, from rows of the buffer."""
        if self.folded:
            rows = rows.unflatten(1, self.folded).movedim(0, 1).flatten(0, 2)
        return rows.movedim(0, self.at) if self.at else rows

    def keep(self, rows: Tensor, value: Tensor) -> None:
        """Write a value into rows of the buffer."""
        value = value.movedim(self.at, 0) if self.at else value
        if self.folded:
            value = value.unflatten(0, (self.folded[0], len(rows), self.folded[1])).movedim(1, 0)
        rows.copy_(value.reshape(rows.shape))


@dataclass(frozen=True)
class Pointer:
    """An argument of a kernel: an index array by its name, a value without rows, or a buffer."""

    to: str | Node | Home
    own: bool = False  # row 0 of a buffer is the first row of the class


@dataclass(frozen=True)
class Row:
    """Which row of a buffer: `of` itself, or what an index array says at `of`."""

    of: str
    index: str = ""


@dataclass(frozen=True)
class Via:
    """One way in which gradients reach a state: the rows index[first[v]] .. index[first[v+1]] of a message buffer."""

    home: Home
    first: str
    index: str


@dataclass
class Stores:
    """The homes of one class's values, and how to find a value in them."""

    names: dict[Node, str] = field(default_factory=dict)
    homes: dict[Node, Home] = field(default_factory=dict)
    children: dict[Node, tuple[Home, Row]] = field(default_factory=dict)  # gathered states: (state, which row)
    gradients: dict[Node, Sequence[Via]] = field(default_factory=dict)  # d_state sources: where they are summed from

    def where(self, node: Node) -> tuple[Pointer, Row]:
        """The buffer and row in which a kernel finds a value of its vertex `v` or edge `e`."""
        if node in self.children:
            home, row = self.children[node]
            return Pointer(home), row
        if not domain(node):
            return Pointer(node), Row("0")
        home = self.homes[node]
        if home.domain == "row":
            row = Row("v - lo" if home.kind == "scratch" else "v")
        else:  # edges count through all classes; e0 and eb are the first of this call and of this class
            row = Row({"scratch": "e - e0", "message": "e"}.get(home.kind, "e - eb"))
        return Pointer(home, own=home.domain == "row" or home.kind != "message"), row

    def columns(self, node: Node) -> int:
        if node in self.children:
            return self.children[node][0].columns
        return self.homes[node].columns if node in self.homes else prod(node.shape)


def home_of(node: Node, kind: str, key: Key) -> Home:
    """Rows come first in a buffer: a value [a, vertices * k, b] is kept as rows of [k, a, b]."""
    shape, unit = node.shape, _unit(node)
    at = _row_dim(node)
    inner = () if shape[at] == unit else (shape[at] // unit,)
    return Home(kind, key, domain(node), (*inner, *shape[:at], *shape[at + 1 :]), node.dtype, at, _folded(node) if inner else None)


def message_home(key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Home:
    """Where the gradients of a state are that are sent in one way."""
    return Home("message", key, "edge" if key[1] == "edge" else "row", shape, dtype)


def _unit(node: Node) -> int:
    return ROWS if domain(node) == "row" else EDGES


def _row_dim(node: Node) -> int:
    return next(i for i, n in enumerate(node.shape) if n and n % _unit(node) == 0)


def _folded(node: Node) -> tuple[int, int]:
    """How the dim that holds several slices per row is ordered: slices before the rows, and after them."""
    at = _row_dim(node)
    slices = node.shape[at] // _unit(node)
    for x in (a for a in node.args if domain(a) == domain(node)):
        here = _row_dim(x)
        folded = _folded(x)[0] if x.shape[here] > _unit(x) else 1
        if node.op.name == "reshape":
            before = folded * prod(x.shape[:here]) // prod(node.shape[:at])
            return before, slices // before
        if x.shape[here] == node.shape[at]:
            return folded, slices // folded
    return 1, slices
