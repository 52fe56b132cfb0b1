"""Which way to run the rounds: every way is tried on real batches, and the one whose median run is fastest stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from weft.dynamic.emit_rounds import Tiles
from weft.runtime import replay

if TYPE_CHECKING:
    from weft.dynamic.engine import Plan

ENOUGH = 3  # runs of each way that are timed


@dataclass(frozen=True)
class Way:
    """Round by round, each step launched; or rounds in one kernel with tiles of these sizes: all, or those after the first large ones."""

    tiles: Tiles | None = None
    above: int | None = None  # rows; first rounds that have more are launched all the same

    def __str__(self) -> str:
        if (t := self.tiles) is None:
            return "launched"
        after = "" if self.above is None else f" after rounds above {self.above}"
        return f"resident{after} {t.rows}x{t.lanes}x{t.inner}/{t.warps}w/{t.depth}d/{t.per_processor}p {t.precision}"


def ways(plan: Plan, kinds: tuple[str, ...], device: torch.device, resident: bool | Way | None) -> list[Way]:
    """The ways a plan can be run in. `resident` asks for one kernel (True, or which), refuses it (False) or lets time decide."""
    if resident is False or not plan.triton or not plan.can_stay(kinds):
        return [Way()]
    if isinstance(resident, Way):
        return [resident]
    if not replay.is_accelerator(device):
        return [Way(Tiles(rows=16, lanes=16, inner=16, precision="tf32x3" if plan.in_parts else "ieee"))] if resident else [Way()]
    staying = to_try(torch.get_float32_matmul_precision())
    staying = staying if plan.in_parts else [w for w in staying if w.tiles is None or w.tiles.precision != "tf32x3"]
    return staying if resident and staying else [Way(), *staying]


def to_try(precision: str) -> list[Way]:
    """Kernels worth a trial, by the precision torch is told to keep."""
    products = "tf32x3" if precision == "highest" else "tf32"
    large = Tiles(rows=64, lanes=16, inner=32, warps=4, precision=products)
    small = Tiles(rows=32, lanes=16, inner=64, warps=4, per_processor=2, precision=products)
    return [Way(small, 160), Way(large, 160), *([] if precision == "highest" else [Way(large)])]


class Choice:
    """The ways that are left, and what is known of them."""

    def __init__(self, known: Sequence[Way]) -> None:
        self.left = list(known)
        self.times: dict[Way, list[float]] = {w: [] for w in known}
        self.refused: dict[Way, str] = {}

    @property
    def decided(self) -> bool:
        return len(self.left) == 1

    def now(self) -> Way:
        """The way to run the next batch in."""
        return min(self.left, key=lambda w: len(self.times[w]))

    def saw(self, way: Way, ms: float) -> None:
        self.times[way].append(ms)
        if not self.decided and way in self.left and all(len(self.times[w]) >= ENOUGH for w in self.left):
            self.settle()

    def settle(self) -> None:
        """Choose by what is known now."""
        known = [w for w in self.left if self.times[w]] or self.left[:1]
        self.left = [min(known, key=lambda w: median(self.times[w] or [0.0]))]

    def refuse(self, way: Way, why: str) -> None:
        """A way that does not run here, for want of registers say."""
        self.refused[way] = why
        self.left = [w for w in self.left if w != way] or [Way()]
        self.times.setdefault(self.left[0], [])
