"""One class of one batch while it runs: its buffers, its index arrays, and its steps bound to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from weft.dynamic.cell import Cell
from weft.dynamic.kernel import Kernel
from weft.dynamic.phases import domain, fill_in, is_sized
from weft.dynamic.schedule import Block
from weft.dynamic.store import Home, Pointer
from weft.dynamic.trace import aten
from weft.dynamic.vertex import Source
from weft.dynamic.workspace import Workspace

Bound = Callable[[int, int], None]
Compiled = Mapping[int, tuple[Callable[[int, int, int], None], list[Pointer]]]  # id of a Kernel -> function, its table


@dataclass
class Frame:
    """`rows` is a range of the class's rows; edges follow from it."""

    name: str
    cell: Cell
    block: Block
    places: int  # rows of the state buffers: all vertices and one row of zeros
    edges: int
    longest: tuple[int, int]  # rows and edges of the longest round
    index: Mapping[str, Tensor]
    workspace: Workspace
    compiled: Compiled

    def __post_init__(self) -> None:
        self.fixed: dict[fx.Node, Tensor] = {}
        self.local: dict[fx.Node, Any] = {}
        self.tables: list[np.ndarray[Any, Any]] = []
        low, high = self.block.start, self.block.start + self.block.count
        self._edge_first = self.index["edge_first"][low : high + 1]
        self._bound: dict[str, list[Bound]] = {}

    def run(self, phase: str, lo: int, hi: int) -> None:
        """All steps of a phase on rows [lo, hi)."""
        if phase not in self._bound:
            self._bound[phase] = [*map(self._bind, self.cell.steps[phase]), *self._copies(phase)]
        for step in self._bound[phase]:
            step(lo, hi)

    def whole(self, phase: str) -> None:
        if self.block.count or phase in ("weights", "after"):
            self.run(phase, 0, self.block.count)

    def has(self, phase: str) -> bool:
        return bool(self.cell.steps[phase] or self.cell.copies.get(phase))

    # --- where values are

    def buffer(self, home: Home) -> Tensor:
        """The rows of a home that belong to this class (or, for scratch, to the current round)."""
        whole = self._buffer(home)
        if home.kind not in ("state", "message"):
            return whole
        block = self.block
        start, count = (block.start, block.count) if home.domain == "row" else (block.edge_start, block.edge_count)
        return whole[start : start + count]

    def _buffer(self, home: Home) -> Tensor:
        edges = home.domain == "edge"
        if home.kind in ("state", "message"):
            rows = self.edges if edges else self.places
            return self.workspace.take((home.kind, home.key), (rows, *home.shape), home.dtype)
        rows = self.block.edge_count if edges else self.block.count
        return self.workspace.take((self.name, home.kind, home.key), (rows, *home.shape), home.dtype)

    def slice(self, home: Home, lo: int, hi: int) -> Tensor:
        """The rows of a home for rows [lo, hi) of the class."""
        if home.domain == "edge":
            lo, hi = self.edge_range(lo, hi)
        buffer = self.buffer(home)
        return buffer[: hi - lo] if home.kind == "scratch" else buffer[lo:hi]

    def edge_range(self, lo: int, hi: int) -> tuple[int, int]:
        base = self.block.edge_start
        return int(self._edge_first[lo]) - base, int(self._edge_first[hi]) - base

    def fetch(self, node: fx.Node, lo: int, hi: int) -> Tensor:
        """The value of a node for rows [lo, hi)."""
        if node in self.fixed:
            return self.fixed[node]
        stores = self.cell.stores
        if node in stores.homes:
            return stores.homes[node].show(self.slice(stores.homes[node], lo, hi))
        if node in self.local:
            return self.local[node]
        if node in stores.children:
            return self._gather(node, lo, hi)
        if node in stores.gradients:
            return self._collect(node, lo, hi)
        if node.op == "placeholder":
            return self._edge_rows(lo, hi)
        out = self._call(node, lo, hi)
        if not domain(node):
            self.fixed[node] = out
        return out

    def _gather(self, node: fx.Node, lo: int, hi: int) -> Tensor:
        """States of children; a view where they already lie in order."""
        home, row = self.cell.stores.children[node]
        if row.index == "edge_child":
            low, high = (e + self.block.edge_start for e in self.edge_range(lo, hi))
        else:
            low, high = lo + self.block.start, hi + self.block.start
        at = self.index[row.index][low:high]
        states = self._buffer(home)
        first = _run(at)
        return states.index_select(0, at) if first is None else states[first : first + len(at)]

    def _collect(self, node: fx.Node, lo: int, hi: int) -> Tensor:
        """The gradient of a state: the sum of the messages its readers sent."""
        like = node.meta["val"]
        out = torch.zeros((hi - lo, *like.shape[1:]), dtype=like.dtype, device=self.workspace.device)
        for via in self.cell.stores.gradients[node]:
            first = self.index[via.first][self.block.start + lo : self.block.start + hi + 1]
            at = self.index[via.index][int(first[0]) : int(first[-1])]
            edges = via.key[1] == "edge"
            home = Home("message", via.key, "edge" if edges else "row", tuple(like.shape[1:]), like.dtype)
            counts = first[1:] - first[:-1]
            to = torch.repeat_interleave(torch.arange(hi - lo, device=at.device), counts)
            out.index_add_(0, to, self._buffer(home).index_select(0, at))
        return out

    def _edge_rows(self, lo: int, hi: int) -> Tensor:
        low, high = (e + self.block.edge_start for e in self.edge_range(lo, hi))
        return self.index["edge_vertex"][low:high] - (self.block.start + lo)

    # --- steps

    def _bind(self, step: Kernel | fx.Node) -> Bound:
        if isinstance(step, Kernel):
            return self._kernel(step)
        home = self.cell.stores.homes.get(step)
        if step.target is aten.mm.default and home is not None and not domain(step.args[1]) and not home.at:
            return self._product(step, home)
        return self._other(step, home)

    def _kernel(self, kernel: Kernel) -> Bound:
        function, pointers = self.compiled[id(kernel)]
        table = np.array([self._address(p) for p in pointers], np.int64)
        self.tables.append(table)
        at = table.ctypes.data
        return lambda lo, hi: function(at, lo, hi)

    def _product(self, node: fx.Node, home: Home) -> Bound:
        left, right = node.args
        shape = (-1, node.meta["val"].shape[1])

        def step(lo: int, hi: int) -> None:
            out = self.slice(home, lo, hi).view(shape)
            torch.mm(self.fetch(left, lo, hi), self.fetch(right, lo, hi), out=out)

        return step

    def _other(self, node: fx.Node, home: Home | None) -> Bound:
        def step(lo: int, hi: int) -> None:
            value = self._call(node, lo, hi)
            if not domain(node):
                self.fixed[node] = value
            elif home is None:
                self.local[node] = value
            else:
                home.keep(self.slice(home, lo, hi), value)

        return step

    def _call(self, node: fx.Node, lo: int, hi: int) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: self.fetch(n, lo, hi))
        if is_sized(node):
            low, high = self.edge_range(lo, hi)
            args, kwargs = tuple(fill_in(a, hi - lo, high - low) for a in args), dict(kwargs)
        if node.target in _VIEWS_OF_ROWS:
            return args[0].reshape(args[1])
        return node.target(*args, **kwargs)

    def _copies(self, phase: str) -> list[Bound]:
        return [self._copy(c.node, c.home) for c in self.cell.copies.get(phase, ())]

    def _copy(self, node: fx.Node, home: Home) -> Bound:
        def step(lo: int, hi: int) -> None:
            rows = self.slice(home, lo, hi)
            value = self.fetch(node, lo, hi)
            home.keep(rows, value.expand(node.meta["val"].shape) if not domain(node) else value)

        return step

    def _address(self, pointer: Pointer) -> int:
        """What a kernel's table holds for a pointer."""
        block = self.block
        if pointer.kind == "index":
            array = self.index[str(pointer.key)]
            by_place = pointer.key in ("edge_first", "reader_first") or str(pointer.key).startswith("slot")
            by_place = by_place and not str(pointer.key).endswith("_reader")
            return array.data_ptr() + 8 * block.start * by_place
        if pointer.kind == "fixed":
            node = next(n for n in self.cell.traced.graph.nodes if n.name == pointer.key[0])
            value = self.fixed[node] = self.fetch(node, 0, 0).contiguous()
            return value.data_ptr()
        home = self._home(pointer)
        buffer = self._buffer(home)
        shift = 0
        if pointer.own and home.kind in ("state", "message") and home.domain == "row":
            shift = block.start
        elif pointer.own and home.kind not in ("state", "message", "scratch") and home.domain == "edge":
            shift = -block.edge_start  # kernels count edges through all classes
        return buffer.data_ptr() + shift * home.columns * buffer.element_size()

    def _home(self, pointer: Pointer) -> Home:
        if pointer.kind == "state" and not pointer.own:
            return next(h for h, _ in self.cell.stores.children.values() if h.key == pointer.key)
        if pointer.kind == "message" and not pointer.own:
            node = next(n for n, vs in self.cell.stores.gradients.items() for v in vs if v.key == pointer.key)
            like, edges = node.meta["val"], pointer.key[1] == "edge"
            return Home("message", pointer.key, "edge" if edges else "row", tuple(like.shape[1:]), like.dtype)
        homes = [*self.cell.stores.homes.values(), *(c.home for cs in self.cell.copies.values() for c in cs)]
        return next(h for h in homes if (h.kind, h.key) == (pointer.kind, pointer.key))

    def supply(self, values: Mapping[Source, Tensor]) -> None:
        """Weights, by the source that names them."""
        for source, node in self.cell.traced.sources.items():
            if source in values:
                self.fixed[node] = values[source]


_VIEWS_OF_ROWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


def _run(at: Tensor) -> int | None:
    """The first number if the others follow one by one."""
    if at.device.type != "cpu" or len(at) == 0:
        return None
    array = at.numpy()
    first = int(array[0])
    if int(array[-1]) - first != len(array) - 1 or not (np.diff(array) == 1).all():
        return None
    return first

