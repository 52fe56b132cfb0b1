"""BERT pre-training: masked words and next sentence, post-norm encoder, padding mask, tied decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, register
from weft_zoo.gpt import _start
from weft_zoo.precision import wide

IGNORE = -100  # a label at a position that was not masked


@dataclass(frozen=True)
class Settings:
    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    ffn: int = 4096
    vocab: int = 30522
    seq: int = 512
    kinds: int = 2
    dropout: float = 0.1
    eps: float = 1e-12


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.q, self.k, self.v, self.o = (nn.Linear(s.hidden, s.hidden) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, n, h = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        return F.dropout(self.o(y.transpose(1, 2).reshape(b, n, h)), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.attention, self.norm1 = Attention(s), nn.LayerNorm(s.hidden, s.eps)
        self.up, self.down = nn.Linear(s.hidden, s.ffn), nn.Linear(s.ffn, s.hidden)
        self.norm2 = nn.LayerNorm(s.hidden, s.eps)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        y = F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)
        return self.norm2(x + y)


class Bert(nn.Module):
    """`forward` gives the word logits and the next-sentence logits; `keep` [batch, seq] is true at real words."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.words = nn.Embedding(s.vocab, s.hidden)
        self.positions = nn.Embedding(s.seq, s.hidden)
        self.kinds = nn.Embedding(s.kinds, s.hidden)
        self.norm = nn.LayerNorm(s.hidden, s.eps)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.pool = nn.Linear(s.hidden, s.hidden)
        self.follows = nn.Linear(s.hidden, 2)
        self.transform, self.norm2 = nn.Linear(s.hidden, s.hidden), nn.LayerNorm(s.hidden, s.eps)
        self.bias = nn.Parameter(torch.zeros(s.vocab))
        self.apply(_start)

    def forward(self, words: Tensor, kinds: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        at = torch.arange(words.shape[1], device=words.device)
        x = self.norm(self.words(words) + self.positions(at) + self.kinds(kinds))
        x = F.dropout(x, self.dropout, self.training)
        mask = None if keep is None else keep.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        follows = self.follows(torch.tanh(self.pool(x[:, 0])))
        masked = self.norm2(F.gelu(self.transform(x)))
        return F.linear(masked, self.words.weight, self.bias), follows


def pretraining(model: nn.Module, batch: Batch) -> Tensor:
    words, follows = model(batch["words"], batch["kinds"], batch["keep"])
    masked = F.cross_entropy(wide(words.flatten(0, 1)), batch["labels"].flatten(), ignore_index=IGNORE)
    return masked + F.cross_entropy(wide(follows), batch["follows"])


def fields(s: Settings, batch: int) -> dict[str, Field]:
    grid = batch, s.seq
    return {
        "words": ids(*grid, high=s.vocab), "kinds": ids(*grid, high=s.kinds), "keep": Field(grid, 2, torch.bool),
        "labels": ids(*grid, high=s.vocab), "follows": ids(batch, high=2),
    }  # fmt: skip


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it."""
    return {
        "layers": s.layers, "hidden": s.hidden, "heads": s.heads, "ffn": s.ffn, "vocab": s.vocab, "seq": s.seq, "causal": False,
        "dropout": s.dropout > 0,
    }  # fmt: skip


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 67, "seq": 16, "dropout": 0.0}

# Devlin 2019; the larger two are those of CoCoNet's memory table (Megatron's BERT family).
for _name, _settings in {
    "bert-base": Settings(12, 768, 12, 3072),
    "bert-large": Settings(),
    "bert-1.2b": Settings(24, 2048, 32, 8192),
    "bert-3.9b": Settings(48, 2560, 40, 10240),
}.items():
    register(_name, _settings, Bert, pretraining, fields, SMALL, shape=shape)
