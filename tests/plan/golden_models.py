"""Small models as a user writes them, FILE.py:FUNCTION, for goldens of plans of captured programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Made = tuple[nn.Module, Any, dict[str, Tensor]]


def _mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def perceptron() -> Made:
    model = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))
    return model, _mean_square, {"x": torch.empty(64, 2048), "y": torch.empty(64, 2048)}


def wide() -> Made:
    """Weights that outweigh the batch, so that tensors are sharded."""
    model = nn.Sequential(nn.Linear(8192, 16384, bias=False), nn.GELU(), nn.Linear(16384, 8192, bias=False))
    return model, _mean_square, {"x": torch.empty(8, 8192), "y": torch.empty(8, 8192)}


def pictures() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000),
    )  # fmt: skip
    return model, _cross_entropy, {"x": torch.empty(32, 3, 64, 64), "y": torch.zeros(32, dtype=torch.int64)}


class Words(nn.Module):
    """Embedding, one block of attention and feed-forward, tied head."""

    def __init__(self, words: int = 8192, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x @ self.embed.weight.T


def words() -> Made:
    return Words(), _cross_entropy, {"x": torch.zeros(8, 256, dtype=torch.int64), "y": torch.zeros(8, 256, dtype=torch.int64)}


class Table(nn.Module):
    """A table of rows, few of which a step reads, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.EmbeddingBag(200_000, 64, mode="sum"), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x))


def table() -> Made:
    return Table(), _mean_square, {"x": torch.zeros(256, 4, dtype=torch.int64), "y": torch.empty(256, 1)}
