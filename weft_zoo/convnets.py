"""Residual convolution nets: ResNet, ResNeXt and the two Wide-ResNets (Zagoruyko's and the one Alpa scales).

A bottleneck goes in -> `squeeze` (1x1) -> `middle` (3x3, grouped) -> `out` (1x1); families differ in those widths only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Field, ids, reals, register
from weft_zoo.vit import classify


@dataclass(frozen=True)
class Settings:
    """At stage i, f = `base` * 2**i: squeeze f*`squeeze`, middle f*`middle`, out f*4."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    base: int = 64
    squeeze: float = 1
    middle: float = 1
    groups: int = 1
    image: int = 224
    classes: int = 1000


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, squeeze: int, middle: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, squeeze, 1, bias=False), nn.BatchNorm2d(squeeze)
        self.conv2 = nn.Conv2d(squeeze, middle, 3, stride, padding=1, groups=groups, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.conv3, self.norm3 = nn.Conv2d(middle, out, 1, bias=False), nn.BatchNorm2d(out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != out:
            self.skip = nn.Sequential(nn.Conv2d(inputs, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, s.base, 7, 2, padding=3, bias=False), nn.BatchNorm2d(s.base)
        blocks, inputs = [], s.base
        for i, depth in enumerate(s.stages):
            f = s.base * 2**i
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(Bottleneck(inputs, int(f * s.squeeze), int(f * s.middle), 4 * f, stride, s.groups))
                inputs = 4 * f
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, s.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, 2, padding=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"images": reals(batch, 3, s.image, s.image), "labels": ids(batch, high=s.classes)}


DEEP = (3, 4, 23, 3)


def _alpa(base: int, width: int, stages: tuple[int, ...] = (3, 4, 6, 3)) -> Settings:
    return Settings(stages, base, 1, width, classes=1024)


# He 2016, Xie 2017, Zagoruyko 2016; the rest are Alpa's weak-scaling sizes, of which `wide-resnet` is the largest.
SIZES = {
    "resnet50": Settings(),
    "resnet101": Settings(DEEP),
    "resnext50": Settings(squeeze=2, middle=2, groups=32),
    "resnext101": Settings(DEEP, squeeze=4, middle=4, groups=32),
    "wide-resnet50-2": Settings(squeeze=2, middle=2),
    "wide-resnet101-2": Settings(DEEP, squeeze=2, middle=2),
    "wide-resnet": _alpa(320, 16, DEEP),
    "wide-resnet-250m": _alpa(160, 2),
    "wide-resnet-500m": _alpa(224, 2),
    "wide-resnet-1b": _alpa(320, 2),
    "wide-resnet-2b": _alpa(448, 2),
    "wide-resnet-4b": _alpa(640, 2),
    "wide-resnet-6.8b": _alpa(320, 16),
    "wide-resnet-13b": _alpa(320, 16, DEEP),
}

for _name, _settings in SIZES.items():
    register(
        _name, _settings, ResNet, classify, fields, batch=32,
        small={"stages": (2, 1), "base": 8, "image": 32, "classes": 10, "groups": min(_settings.groups, 4)},
    )  # fmt: skip
