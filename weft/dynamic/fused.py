"""A product and the fused kernel that reads it in one launch: tiles of the product stay in registers, and no round waits between the two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from weft.dynamic.cell import Cell
from weft.dynamic.emit_rounds import MULTIPLY, TileEmitter, Tiles
from weft.dynamic.emit_triton import HEADER
from weft.dynamic.phases import BACKWARD, FORWARD
from weft.dynamic.product import HIGH
from weft.dynamic.stages import Stage, stages
from weft.dynamic.store import Pointer
from weft.runtime import modules

# (fewest rows it is tried for, most rows, rows and lanes of a tile)
SIZES = ((0, 72, 16, 16), (33, 800, 64, 32), (150, 1 << 40, 64, 64))


@dataclass(eq=False)
class Code:
    """A stage ready to launch, with its arguments."""

    function: Any
    pointers: list[Pointer]
    matrices: list[fx.Node]
    products: list[fx.Node]
    lanes: int
    sums: int  # values of a product that a lane needs
    chosen: dict[tuple[Any, ...], Tiles | None] = field(default_factory=dict)  # by rows and device

    def tiles(self, rows: int) -> list[Tiles]:
        """Sizes worth a trial for so many rows."""
        fitting = [(r, lanes) for least, most, r, lanes in SIZES if least <= rows <= most]
        return [Tiles(r, lanes, 64 if lanes * self.sums <= 64 else 32, warps=4, precision="tf32x3") for r, lanes in fitting]

    def launch(self, tiles: Tiles, arguments: list[Any], span: tuple[int, int, int, int], first_edge: int) -> None:
        count = -(-(span[1] - span[0]) // tiles.rows) * -(-self.lanes // tiles.lanes)
        if count:
            self.function[(count,)](*arguments, *span, first_edge, *tiles.constants().values(), num_warps=tiles.warps)


def build(cells: Iterable[Cell]) -> dict[int, Code]:
    """Every kernel that can take in the products it reads: id of the kernel -> its code."""
    found = [(cell, stage) for cell in cells for phase in (*FORWARD, *BACKWARD) for stage in _joined(cell, phase)]
    writers = [TileEmitter(stage, cell, f"weft_with_{i}") for i, (cell, stage) in enumerate(found)]
    texts = [w.text() for w in writers]
    module = modules.load("\n\n".join([HEADER, HIGH, MULTIPLY, *texts])) if writers else None
    return {
        id(w.kernel): Code(getattr(module, w.name), w.pointers, w.matrices, w.stage.products, w.kernel.lanes, sum(map(len, map(w.offsets, w.stage.products))))
        for w in writers
    }  # fmt: skip


def _joined(cell: Cell, phase: str) -> list[Stage]:
    return [s for s in stages(cell, phase) or () if s.kernel is not None and s.products]
