"""Inception-v3 with its auxiliary head (Szegedy 2016, in the widths of the published checkpoints)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, reals, register
from weft_zoo.precision import wide


@dataclass(frozen=True)
class Settings:
    """`width` scales every channel count; `auxiliary` needs an image of 299 or so."""

    image: int = 299
    classes: int = 1000
    width: float = 1.0
    dropout: float = 0.5
    auxiliary: bool = True


class Conv(nn.Module):
    """Convolution without bias, batch norm, relu."""

    def __init__(self, inputs: int, out: int, kernel: int | tuple[int, int], stride: int = 1,
                 padding: int | tuple[int, int] = 0) -> None:  # fmt: skip
        super().__init__()
        self.conv = nn.Conv2d(inputs, out, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, padding=1)


class Shrink(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2)


class Branches(nn.Module):
    """Several towers over one input, joined along channels."""

    def __init__(self, *towers: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], 1)


def _row(inputs: int, out: int, k: int) -> Conv:
    return Conv(inputs, out, (1, k), padding=(0, k // 2))


def _column(inputs: int, out: int, k: int) -> Conv:
    return Conv(inputs, out, (k, 1), padding=(k // 2, 0))


def _grid35(n: int, c: Settings, pool: int) -> Branches:
    w = _widths(c)
    return Branches(
        Conv(n, w(64), 1),
        nn.Sequential(Conv(n, w(48), 1), Conv(w(48), w(64), 5, padding=2)),
        nn.Sequential(Conv(n, w(64), 1), Conv(w(64), w(96), 3, padding=1), Conv(w(96), w(96), 3, padding=1)),
        nn.Sequential(Pool(), Conv(n, w(pool), 1)),
    )


def _to17(n: int, c: Settings) -> Branches:
    w = _widths(c)
    return Branches(
        Conv(n, w(384), 3, 2),
        nn.Sequential(Conv(n, w(64), 1), Conv(w(64), w(96), 3, padding=1), Conv(w(96), w(96), 3, 2)),
        Shrink(),
    )


def _grid17(n: int, c: Settings, m: int) -> Branches:
    w = _widths(c)
    return Branches(
        Conv(n, w(192), 1),
        nn.Sequential(Conv(n, w(m), 1), _row(w(m), w(m), 7), _column(w(m), w(192), 7)),
        nn.Sequential(
            Conv(n, w(m), 1), _column(w(m), w(m), 7), _row(w(m), w(m), 7), _column(w(m), w(m), 7), _row(w(m), w(192), 7)
        ),
        nn.Sequential(Pool(), Conv(n, w(192), 1)),
    )


def _to8(n: int, c: Settings) -> Branches:
    w = _widths(c)
    return Branches(
        nn.Sequential(Conv(n, w(192), 1), Conv(w(192), w(320), 3, 2)),
        nn.Sequential(
            Conv(n, w(192), 1), _row(w(192), w(192), 7), _column(w(192), w(192), 7), Conv(w(192), w(192), 3, 2)
        ),
        Shrink(),
    )


def _grid8(n: int, c: Settings) -> Branches:
    w = _widths(c)

    def fork() -> Branches:
        return Branches(_row(w(384), w(384), 3), _column(w(384), w(384), 3))

    return Branches(
        Conv(n, w(320), 1),
        nn.Sequential(Conv(n, w(384), 1), fork()),
        nn.Sequential(Conv(n, w(448), 1), Conv(w(448), w(384), 3, padding=1), fork()),
        nn.Sequential(Pool(), Conv(n, w(192), 1)),
    )


def _widths(c: Settings):
    return lambda channels: max(1, int(channels * c.width))


class Inception(nn.Module):
    def __init__(self, c: Settings) -> None:
        super().__init__()
        w, self.dropout = _widths(c), c.dropout
        self.stem = nn.Sequential(
            Conv(3, w(32), 3, 2), Conv(w(32), w(32), 3), Conv(w(32), w(64), 3, padding=1), Shrink(),
            Conv(w(64), w(80), 1), Conv(w(80), w(192), 3), Shrink(),
        )  # fmt: skip
        a, a1 = 2 * w(64) + w(96) + w(32), 3 * w(64) + w(96)
        b, e = w(384) + w(96) + a1, w(320) + 4 * w(384) + w(192)
        d = w(320) + w(192) + 4 * w(192)
        self.grid35 = nn.Sequential(_grid35(w(192), c, 32), _grid35(a, c, 64), _grid35(a1, c, 64))
        seventeen = [_to17(a1, c)]
        seventeen += [_grid17(n, c, m) for n, m in ((b, 128), (4 * w(192), 160), (4 * w(192), 160), (4 * w(192), 192))]
        self.grid17 = nn.Sequential(*seventeen)
        self.grid8 = nn.Sequential(_to8(4 * w(192), c), _grid8(d, c), _grid8(e, c))
        self.head = nn.Linear(e, c.classes)
        self.auxiliary = _auxiliary(4 * w(192), c) if c.auxiliary else None

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.grid17(self.grid35(self.stem(images)))
        side = self.auxiliary(x) if self.auxiliary is not None and self.training else None
        x = F.dropout(self.grid8(x).mean((2, 3)), self.dropout, self.training)
        return self.head(x), side


def _auxiliary(n: int, c: Settings) -> nn.Sequential:
    w = _widths(c)
    return nn.Sequential(
        nn.AvgPool2d(5, 3), Conv(n, w(128), 1), Conv(w(128), w(768), 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(w(768), c.classes),
    )  # fmt: skip


def classify_twice(model: nn.Module, batch: Batch) -> Tensor:
    """The main loss, and 0.4 of the auxiliary head's."""
    main, side = model(batch["images"])
    loss = F.cross_entropy(wide(main), batch["labels"])
    return loss if side is None else loss + 0.4 * F.cross_entropy(wide(side), batch["labels"])


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"images": reals(batch, 3, s.image, s.image), "labels": ids(batch, high=s.classes)}


register(
    "inception-v3", Settings(), Inception, classify_twice, fields, batch=64,
    small={"image": 107, "classes": 10, "width": 0.125, "dropout": 0.0, "auxiliary": False},
)  # fmt: skip
