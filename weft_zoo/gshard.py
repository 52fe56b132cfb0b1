"""GShard mixture of experts: every other layer's feed-forward is experts with a fixed capacity, two per token.

Tokens are routed in groups. A token over an expert's capacity is dropped by it; dispatch and combine are dense
einsums over one-hot masks, as published (Lepikhin 2021, algorithm 1), in the sizes Alpa scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, register
from weft_zoo import bert
from weft_zoo.gpt import _start
from weft_zoo.precision import wide


@dataclass(frozen=True)
class Settings:
    """`group` tokens are routed together, 2 * group / experts to an expert; `ffn` None means eight times `hidden`."""

    layers: int = 32
    hidden: int = 2048
    heads: int = 16
    experts: int = 64
    ffn: int | None = None
    vocab: int = 32000
    seq: int = 1024
    group: int = 2048
    dropout: float = 0.0
    balance: float = 0.01

    def encoder(self) -> bert.Settings:
        ffn = self.ffn or 8 * self.hidden
        return bert.Settings(self.layers, self.hidden, self.heads, ffn, self.vocab, self.seq, dropout=self.dropout)


def top2(chances: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """chances [g, s, e] -> weights [g, s, e, capacity] of each token's place at its experts, and the imbalance.

    First choices take places before second ones; what finds no place has weight zero.
    """
    experts = chances.shape[-1]
    first = F.one_hot(chances.argmax(-1), experts)
    second = F.one_hot((chances * (1 - first)).argmax(-1), experts)
    imbalance = experts * (first.to(chances.dtype).mean(1) * chances.mean(1)).sum(-1).mean()
    place1 = first.cumsum(1) - first
    place2 = second.cumsum(1) - second + first.sum(1, keepdim=True)
    kept = [m * (p < capacity) for m, p in ((first, place1), (second, place2))]
    gates = [(chances * m).sum(-1) for m in kept]
    total = (gates[0] + gates[1]).clamp(min=1e-9)
    weights = torch.zeros((), dtype=chances.dtype, device=chances.device)
    for m, p, gate in zip(kept, (place1, place2), gates, strict=True):
        slot = F.one_hot((p * m).sum(-1).clamp(max=capacity - 1), capacity).to(chances.dtype)
        weights = weights + torch.einsum("gse,gsc->gsec", m * (gate / total)[..., None], slot)
    return weights, imbalance


class Experts(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.experts, self.group, ffn = s.experts, s.group, s.ffn or 8 * s.hidden
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.up = nn.Parameter(torch.empty(s.experts, s.hidden, ffn))
        self.down = nn.Parameter(torch.empty(s.experts, ffn, s.hidden))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = math.gcd(self.group, x.shape[0] * x.shape[1])
        tokens = x.reshape(-1, size, x.shape[-1])
        chances = F.softmax(wide(self.router(tokens)), -1)
        weights, imbalance = top2(chances, max(1, 2 * size // self.experts))
        weights = weights.to(x.dtype)
        sent = torch.einsum("gsec,gsm->egcm", (weights > 0).to(x.dtype), tokens)
        y = torch.einsum("egcm,emh->egch", sent, self.up)
        y = torch.einsum("egch,ehm->egcm", F.relu(y), self.down)
        return torch.einsum("gsec,egcm->gsm", weights, y).view_as(x), imbalance


class SparseBlock(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout, e = s.dropout, s.encoder()
        self.attention, self.norm1 = bert.Attention(e), nn.LayerNorm(s.hidden, e.eps)
        self.experts, self.norm2 = Experts(s), nn.LayerNorm(s.hidden, e.eps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm1(x + self.attention(x, None))
        y, imbalance = self.experts(x)
        return self.norm2(x + F.dropout(y, self.dropout, self.training)), imbalance


class Pair(nn.Module):
    """One layer with experts, one without: the unit that repeats."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.sparse, self.dense = SparseBlock(s), bert.Block(s.encoder())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, imbalance = self.sparse(x)
        return self.dense(x, None), imbalance


class GShard(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings = s
        self.words, self.positions = nn.Embedding(s.vocab, s.hidden), nn.Embedding(s.seq, s.hidden)
        self.norm = nn.LayerNorm(s.hidden, s.encoder().eps)
        self.pairs = nn.ModuleList(Pair(s) for _ in range(s.layers // 2))
        self.bias = nn.Parameter(torch.zeros(s.vocab))
        self.apply(_start)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device)))
        uneven = torch.zeros((), device=words.device)
        for pair in self.pairs:
            x, imbalance = pair(x)
            uneven = uneven + imbalance
        return F.linear(x, self.words.weight, self.bias), uneven / len(self.pairs)


def balanced_words(model: nn.Module, batch: Batch) -> Tensor:
    logits, uneven = model(batch["words"])
    loss = F.cross_entropy(wide(logits.flatten(0, 1)), batch["labels"].flatten())
    return loss + model.settings.balance * uneven


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"words": ids(batch, s.seq, high=s.vocab), "labels": ids(batch, s.seq, high=s.vocab)}


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it."""
    return bert.shape(s.encoder()) | {"experts": s.experts, "chosen": 2, "moe_every": 2}


SMALL = {"layers": 4, "hidden": 32, "heads": 4, "experts": 4, "ffn": 64, "vocab": 67, "seq": 16, "group": 32}

# Alpa's weak scaling: layers, hidden, experts; 16 heads. `gshard-moe` is the largest.
SIZES = {
    "gshard-moe": (32, 2048, 64),
    "gshard-moe-380m": (8, 768, 8),
    "gshard-moe-690m": (8, 768, 16),
    "gshard-moe-1.3b": (16, 768, 16),
    "gshard-moe-2.4b": (16, 1024, 16),
    "gshard-moe-10b": (16, 1536, 32),
    "gshard-moe-27b": (16, 2048, 48),
    "gshard-moe-70b": (32, 2048, 64),
}

for _name, (_layers, _hidden, _experts) in SIZES.items():
    register(_name, Settings(_layers, _hidden, 16, _experts), GShard, balanced_words, fields, SMALL, shape=shape)
