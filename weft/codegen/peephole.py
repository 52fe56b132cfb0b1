"""Several nodes of a rank's program that one call does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.node import Node

Text = Callable[[Callable[[Node], str]], str]  # from the name of a value to the call


@dataclass(frozen=True, eq=False)
class Peephole:
    """Nodes done by one call: what it reads, what it gives, and its text."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    text: Text
    instead: tuple[tuple[Node, Node], ...] = ()  # results that are an input, overwritten
    starts: bool = False  # its result is under way, to be waited for
    early: bool = False  # done where the first of its nodes stands, not the last
    names: Mapping[str, Any] = field(default_factory=dict)  # what its text calls by name

    @property
    def last(self) -> bool:
        """Whether it overwrites what others read, and so comes after them."""
        return bool(self.instead)
