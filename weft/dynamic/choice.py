"""Which way to run the rounds: every way is recorded on real batches, then all run one batch in turn, and the fastest stays."""

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

ENOUGH = 3  # batches that each way has run before they are compared, so that its template has grown
PATIENCE = 12  # batches of each way after which those that never held a batch together with the others are no longer waited for


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
        self.ran = dict.fromkeys(known, 0)  # batches
        self.times: dict[Way, list[float]] = {w: [] for w in known}
        self.refused: dict[Way, str] = {}
        self._patience = PATIENCE * len(self.left)

    @property
    def decided(self) -> bool:
        return len(self.left) == 1

    @property
    def due(self) -> bool:
        """Whether the ways should be compared on the next batch that all of them hold."""
        return not self.decided and all(self.ran[w] >= ENOUGH for w in self.left)

    def now(self) -> Way:
        """The way to run the next batch in."""
        return min(self.left, key=lambda w: self.ran[w])

    def runs(self, way: Way) -> None:
        """A batch is run in this way."""
        self.ran[way] = self.ran.get(way, 0) + 1
        self._patience -= 1
        if self._patience < 0 and not self.decided:
            self.settle()

    def wait_for(self, way: Way) -> None:
        """A way has no room for a batch that the others hold: let it run some more."""
        self.ran[way] = 0

    def saw(self, way: Way, ms: float) -> None:
        self.times[way].append(ms)

    def settle(self) -> None:
        """Choose by what is known now; where nothing is, the first."""
        known = [w for w in self.left if self.times[w]] or self.left[:1]
        self.left = [min(known, key=lambda w: median(self.times[w] or [0.0]))]

    def refuse(self, way: Way, why: str) -> None:
        """A way that does not run here, for want of registers say."""
        self.refused[way] = why
        self.left = [w for w in self.left if w != way] or [Way()]
        self.ran.setdefault(self.left[0], 0)
        self.times.setdefault(self.left[0], [])
