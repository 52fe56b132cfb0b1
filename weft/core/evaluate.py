"""What nodes are, run one by one by their own meaning, where the values of inputs are known: numbers that Python asks for, constants, bodies of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from weft.core.node import Node, toposort


def values_of(nodes: Iterable[Node], found: MutableMapping[Node, Any], given: Callable[[Node], Any] | None = None) -> list[Any]:
    """The values of nodes. Those in `found` are known, and what is computed is added; `given` tells the values of other inputs."""
    wanted = list(nodes)
    for n in toposort(wanted):
        if n not in found:
            found[n] = given(n) if given is not None and n.op.is_input else n.op.run(*(found[a] for a in n.args), **dict(n.attrs))
    return [found[n] for n in wanted]
