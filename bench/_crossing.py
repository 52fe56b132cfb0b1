"""A tensor from the mesh of one stage to that of the next, held differently on both: which host sends what to which.

Indices of a dim that the same ranks hold, on either side, are one class, and a product of classes is a cell c, of b_c bytes. Let A_c be the
hosts that have c, B_c those that need it, each with one link that carries both ways at once; inside a host bytes are free. With x_ch what
host h sends of c,

    sum over h in A_c of x_ch = b_c,      T >= sum over c of x_ch for every h,      T least

by linear programming. A cell goes to one host of B_c, and on from each to the next; so it enters every host once, no host passes on more
than it got, and the busiest link carries max(T, the most bytes any host needs). Nothing that crosses these links can do better.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.core.layout import Layout


@dataclass(frozen=True)
class Cell:
    """Some indices of every dim, who has them and who needs them."""

    dims: tuple[tuple[int, ...], ...]
    have: tuple[int, ...]
    need: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(map(len, self.dims))


@dataclass(frozen=True)
class Message:
    """Elements `first` to `last` of a cell, in order, from a sending host through the receiving ones."""

    cell: Cell
    first: int
    last: int
    sender: int
    through: tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """All messages, and what they bring onto each link."""

    messages: tuple[Message, ...]
    itemsize: int

    @cached_property
    def sent(self) -> Counter[tuple[str, int]]:
        """Bytes that leave each host: of the sending side, and of the receiving side as it passes things on."""
        return self._count(lambda m: [("source", m.sender), *(("target", h) for h in m.through[:-1])])

    @cached_property
    def received(self) -> Counter[tuple[str, int]]:
        return self._count(lambda m: [("target", h) for h in m.through])

    @property
    def busiest(self) -> int:
        """Bytes over the link that carries most, either way."""
        return max([*self.sent.values(), *self.received.values()], default=0)

    def _count(self, links: Callable[[Message], list[tuple[str, int]]]) -> Counter[tuple[str, int]]:
        found: Counter[tuple[str, int]] = Counter()
        for m in self.messages:
            for link in links(m):
                found[link] += (m.last - m.first) * self.itemsize
        return found


def crossing(source: Layout, target: Layout, hosts: str, itemsize: int) -> Crossing:
    """The messages that bring a tensor from one mesh to another; `hosts` is the axis of both that tells hosts apart."""
    cells = list(_cells(source, target, hosts))
    return Crossing(tuple(itertools.chain.from_iterable(map(_messages, cells, _shares(cells), itertools.count()))), itemsize)


def naive(source: Layout, target: Layout, itemsize: int) -> int:
    """Bytes that cross if every receiving rank is sent its own copy."""
    return sum(math.prod(target.local_shape(c)) for c in target.mesh.places()) * itemsize


def _cells(source: Layout, target: Layout, hosts: str) -> Iterator[Cell]:
    sides = (source, target)
    classes = [_classes(sides, d) for d in range(source.rank)]
    ranks = [list(side.mesh.places()) for side in sides]
    for combo in itertools.product(*(c.items() for c in classes)):
        held = [set.intersection(*(set(who[k]) for who, _ in combo)) for k in range(2)]
        have, need = (tuple(sorted({ranks[k][r][hosts] for r in held[k]})) for k in range(2))
        yield Cell(tuple(tuple(at) for _, at in combo), have, need)


def _classes(sides: Sequence[Layout], dim: int) -> Mapping[tuple[tuple[int, ...], ...], list[int]]:
    """The indices of a dim by the ranks that hold them, on each side."""
    holders: list[list[list[int]]] = [[[] for _ in range(side.shape[dim])] for side in sides]
    for k, side in enumerate(sides):
        for r, coords in enumerate(side.mesh.places()):
            for i in side.positions(dim, coords).tolist():
                holders[k][i].append(r)
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for i in range(sides[0].shape[dim]):
        found.setdefault(tuple(tuple(h[i]) for h in holders), []).append(i)
    return found


def _shares(cells: Sequence[Cell]) -> list[dict[int, float]]:
    """Of every cell, the elements each of its hosts sends, so that the busiest sends least."""
    from scipy.optimize import linprog

    pairs = [(k, h) for k, cell in enumerate(cells) for h in cell.have]
    everyone = sorted({h for _, h in pairs})
    whole = [[float(k == j) for k, _ in pairs] + [0.0] for j in range(len(cells))]
    loads = [[float(h == j) for _, h in pairs] + [-1.0] for j in everyone]
    found = linprog(
        [0.0] * len(pairs) + [1.0], A_ub=loads, b_ub=[0.0] * len(everyone), A_eq=whole, b_eq=[c.elements for c in cells], method="highs"
    )
    shares: list[dict[int, float]] = [{} for _ in cells]
    for (k, h), x in zip(pairs, found.x, strict=False):
        shares[k][h] = float(x)
    return shares


def _messages(cell: Cell, shares: Mapping[int, float], turn: int) -> Iterator[Message]:
    """Whole elements for the shares; receivers take turns at being the first."""
    first, reached = 0, 0.0
    start = turn % len(cell.need)
    through = (*cell.need[start:], *cell.need[:start])
    for host, share in shares.items():
        reached += share
        last = cell.elements if host == cell.have[-1] else min(cell.elements, round(reached))
        if last > first:
            yield Message(cell, first, last, host, through)
        first = last
