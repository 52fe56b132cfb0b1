"""Vision transformer: patches, a class token, learned positions, pre-norm encoder (Dosovitskiy 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, reals, register
from weft_zoo.precision import wide


@dataclass(frozen=True)
class Settings:
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int = 3072
    image: int = 224
    patch: int = 16
    classes: int = 1000
    dropout: float = 0.0
    eps: float = 1e-6


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.qkv, self.out = nn.Linear(s.hidden, 3 * s.hidden), nn.Linear(s.hidden, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, n, h = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, h // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, n, h)), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.norm1, self.attention = nn.LayerNorm(s.hidden, s.eps), Attention(s)
        self.norm2 = nn.LayerNorm(s.hidden, s.eps)
        self.up, self.down = nn.Linear(s.hidden, s.ffn), nn.Linear(s.ffn, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = F.dropout(F.gelu(self.up(self.norm2(x))), self.dropout, self.training)
        return x + F.dropout(self.down(y), self.dropout, self.training)


class ViT(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.patches = nn.Conv2d(3, s.hidden, s.patch, stride=s.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, s.hidden))
        self.positions = nn.Parameter(torch.empty(1, (s.image // s.patch) ** 2 + 1, s.hidden))
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.head = nn.LayerNorm(s.hidden, s.eps), nn.Linear(s.hidden, s.classes)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(wide(model(batch["images"])), batch["labels"])


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"images": reals(batch, 3, s.image, s.image), "labels": ids(batch, high=s.classes)}


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it: patches in place of words, and one answer per sample."""
    return {
        "layers": s.layers, "hidden": s.hidden, "heads": s.heads, "ffn": s.ffn, "vocab": s.classes, "seq": (s.image // s.patch) ** 2 + 1,
        "causal": False, "dropout": s.dropout > 0,
    }  # fmt: skip


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "image": 16, "patch": 4, "classes": 10}

for _name, _settings in {
    "vit": Settings(),
    "vit-b16": Settings(),
    "vit-l16": Settings(24, 1024, 16, 4096),
    "vit-h14": Settings(32, 1280, 16, 5120, patch=14),
}.items():
    register(_name, _settings, ViT, classify, fields, SMALL, shape=shape)
