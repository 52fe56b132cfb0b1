"""A kernel for all rounds, bound to the buffers of one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.dynamic.emit_rounds import Code, Tiles
from weft.dynamic.frame import Frame
from weft.dynamic.store import Pointer
from weft.runtime import replay


class Resident:
    """Ready to launch. As many programs as the device runs at once: they wait for each other."""

    def __init__(self, code: Code, frames: Mapping[int, Frame], table: Tensor, tiles: Tiles) -> None:
        device = table.device
        self.function, self.tiles = code.function, tiles
        self.programs = replay.processors(device) * tiles.per_processor if replay.is_accelerator(device) else 1
        self.meeting = torch.zeros(1, dtype=torch.int32, device=device)
        self.arguments: list[Any] = []
        for klass, argument in code.arguments:
            frame = frames[klass]
            if isinstance(argument, Pointer):
                self.arguments.append(frame.argument(argument))
            else:
                high, low = frame.matrix(argument, tiles.precision == "tf32x3")
                self.arguments += [high, low, *high.stride()]
        self.arguments += [table, self.meeting, *(frames[k].block.edge_start for k in code.classes)]
        self.options = {"launch_cooperative_grid": True} if replay.is_accelerator(device) else {}

    def launch(self) -> None:
        self.meeting.zero_()
        self.function[(self.programs,)](*self.arguments, **self.tiles.constants(), num_warps=self.tiles.warps, **self.options)
