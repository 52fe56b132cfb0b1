"""The steps of one round as stages of a kernel that stays on the device for all rounds.

A stage works on tiles of rows by lanes. A product whose only reader is a fused kernel becomes part of that kernel's stage: its tile
stays in registers. All programs wait for each other only where a stage reads what another one wrote since the last wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from weft.dynamic.cell import Cell
from weft.dynamic.kernel import Kernel, access, lane_shape
from weft.dynamic.phases import base, domain
from weft.dynamic.store import Home, Stores
from weft.dynamic.trace import aten

Place = tuple[str, object]  # kind and key of a buffer


@dataclass(frozen=True)
class Part:
    """Columns of a product that have a buffer of their own."""

    home: Home
    offset: int
    width: int


@dataclass
class Stage:
    """A kernel with the products it reads in place, or a product alone, perhaps cut into parts."""

    kernel: Kernel | None
    products: list[fx.Node]
    parts: list[Part] = field(default_factory=list)
    reads: set[Place] = field(default_factory=set)
    writes: set[Place] = field(default_factory=set)
    waits: bool = False  # for all that was written before it

    @property
    def on_edges(self) -> bool:
        return self.kernel is None and domain(self.products[0]) == "edge"

    def needs(self, earlier: Iterable[Stage]) -> bool:
        """Whether it must not run beside any of `earlier`."""
        return any(s.writes & (self.reads | self.writes) or s.reads & self.writes for s in earlier)


def stages(cell: Cell, phase: str) -> list[Stage] | None:
    """The stages of a phase in order, or None where some step is neither a fused kernel nor a product with a weight."""
    steps, parts = cell.steps[phase], _parts(cell, phase)
    if parts is None or not all(isinstance(s, Kernel) or _is_product(cell, s, parts) for s in steps):
        return None
    out: list[Stage] = []
    for step in steps:
        if isinstance(step, Kernel):
            out.append(Stage(step, [p.products[0] for p in out if _read_in_place(cell, p, step)]))
            inside = set(out[-1].products)
            out = [s for s in out if s.kernel is not None or s.products[0] not in inside]
        else:
            out.append(Stage(None, [step], parts.get(step, [])))
    for stage in out:
        _touches(stage, cell.stores)
    return _with_waits(out)


def tail(these: list[Stage]) -> list[Stage]:
    """The stages after the last wait."""
    at = max((i for i, s in enumerate(these) if s.waits), default=0)
    return these[at:]


def head(these: list[Stage]) -> list[Stage]:
    """The stages before the first wait."""
    at = next((i for i, s in enumerate(these) if s.waits), len(these))
    return these[:at]


def _with_waits(these: list[Stage]) -> list[Stage]:
    beside: list[Stage] = []
    for stage in these:
        stage.waits = stage.needs(beside)
        beside = [stage] if stage.waits else [*beside, stage]
    return these


def _parts(cell: Cell, phase: str) -> dict[fx.Node, list[Part]] | None:
    """Results of a phase that are columns of a product without a buffer; None if a result is copied in another way."""
    out: dict[fx.Node, list[Part]] = {}
    for copied in cell.copies.get(phase, ()):
        found = access(copied.node, lane_shape(copied.node))
        whole = found is not None and found.dims == ((1, copied.home.columns, 1),)
        if found is None or not whole or found.source in cell.stores.homes or copied.home.domain != "row" or copied.home.at:
            return None
        out.setdefault(found.source, []).append(Part(copied.home, found.offset, copied.home.columns))
    return out


def _is_product(cell: Cell, node: fx.Node, parts: dict[fx.Node, list[Part]]) -> bool:
    """Rows of a buffer, or of a gathered state, times a matrix without rows, into a buffer or in parts into several."""
    if node.target is not aten.mm.default or node.meta["val"].dtype is not torch.float32:
        return False
    left, right = node.args
    stores, home = cell.stores, cell.stores.homes.get(node)
    known = left in stores.homes and not stores.homes[left].folded and not stores.homes[left].at
    gathered = left in stores.children and len(stores.children[left][0].shape) == 1
    lands = node in parts if home is None else not home.at and not home.folded and node not in parts
    return lands and not domain(right) and (known or gathered)


def _read_in_place(cell: Cell, stage: Stage, kernel: Kernel) -> bool:
    """Whether a product alone is read by this kernel only, lane by lane at its own rows."""
    if stage.kernel is not None or stage.on_edges or stage.parts:
        return False
    product = stage.products[0]
    readers = [loaded for loaded, access in kernel.loads.items() if access.source is product]
    whole = all(kernel.loads[r].has_rows and kernel.loads[r].dims == ((1, kernel.lanes, 1),) for r in readers)
    at_vertices = all(domain(user) == "row" for r in readers for user in r.users if user in set(kernel.nodes))
    alone = cell.stores.homes[product].kind == "scratch" and _readers(product) <= set(kernel.nodes)
    return bool(readers) and whole and at_vertices and alone


def _readers(node: fx.Node) -> set[fx.Node]:
    """Computed ops that look at a value."""
    return {n for n in node.graph.nodes if n.op == "call_function" and n.target is not None and _looks_at(n, node)}


def _looks_at(reader: fx.Node, node: fx.Node) -> bool:
    return base(reader) is reader and any(base(a) is node for a in reader.all_input_nodes)


def _touches(stage: Stage, stores: Stores) -> None:
    """The buffers a stage reads and writes."""
    inside = set(stage.products) if stage.kernel is not None else set()
    sources = [a for p in stage.products for a in p.args[:1]]
    stored = list(stage.products) if stage.kernel is None else list(stage.kernel.stored)
    if stage.kernel is not None:
        sources += [access.source for access in stage.kernel.loads.values() if access.source not in inside]
    for source in sources:
        for via in stores.gradients.get(source, ()):
            stage.reads.add(("message", via.key))
        if source in stores.children or source in stores.homes:
            stage.reads.add(_place(stores, source))
    stage.writes |= {(part.home.kind, part.home.key) for part in stage.parts}
    stage.writes |= {_place(stores, node) for node in stored if node in stores.homes}


def _place(stores: Stores, node: fx.Node) -> Place:
    pointer, _ = stores.where(node)
    return pointer.kind, pointer.key
