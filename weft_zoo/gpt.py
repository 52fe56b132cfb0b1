"""GPT-2 and GPT-3: pre-norm decoder, learned positions, tied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, register
from weft_zoo.precision import wide


@dataclass(frozen=True)
class Settings:
    """Sizes of a GPT; `ffn` None means four times `hidden`."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    ffn: int | None = None
    vocab: int = 50257
    seq: int = 1024
    dropout: float = 0.1
    tied: bool = True


class Attention(nn.Module):
    """Causal self-attention with one matrix for q, k and v."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.qkv = nn.Linear(s.hidden, 3 * s.hidden)
        self.out = nn.Linear(s.hidden, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, n, h = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, h // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0, is_causal=True,
        )  # fmt: skip
        return F.dropout(self.out(y.transpose(1, 2).reshape(b, n, h)), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.up = nn.Linear(s.hidden, s.ffn or 4 * s.hidden)
        self.down = nn.Linear(s.ffn or 4 * s.hidden, s.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(s.hidden), Attention(s)
        self.norm2, self.mlp = nn.LayerNorm(s.hidden), MLP(s)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.tokens = nn.Embedding(s.vocab, s.hidden)
        self.positions = nn.Embedding(s.seq, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.tokens.weight
        self.apply(_start)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):  # GPT-2 scales what is added to the residual by depth
                nn.init.normal_(p, std=0.02 / (2 * s.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token."""
    return F.cross_entropy(wide(model(batch["tokens"]).flatten(0, 1)), batch["targets"].flatten())


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"tokens": ids(batch, s.seq, high=s.vocab), "targets": ids(batch, s.seq, high=s.vocab)}


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it."""
    return {
        "layers": s.layers, "hidden": s.hidden, "heads": s.heads, "ffn": s.ffn or 4 * s.hidden, "vocab": s.vocab, "seq": s.seq, "tied": s.tied,
        "dropout": s.dropout > 0,
    }  # fmt: skip


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": None, "vocab": 67, "seq": 16, "dropout": 0.0}

# name: layers, hidden, heads, vocab, seq. GPT-2 (Radford 2019), GPT-3 (Brown 2020, table 2.1),
# Alpa's weak scaling (Zheng 2022), Megatron-LM (Narayanan 2021, Korthikanti 2022).
SIZES = {
    "gpt2": (12, 768, 12, 50257, 1024),
    "gpt2-medium": (24, 1024, 16, 50257, 1024),
    "gpt2-large": (36, 1280, 20, 50257, 1024),
    "gpt2-xl": (48, 1600, 25, 50257, 1024),
    "gpt3-125m": (12, 768, 12, 50257, 2048),
    "gpt3-350m": (24, 1024, 16, 50257, 2048),
    "gpt3-760m": (24, 1536, 16, 50257, 2048),
    "gpt3-1.3b": (24, 2048, 16, 50257, 2048),
    "gpt3-2.7b": (32, 2560, 32, 50257, 2048),
    "gpt3-6.7b": (32, 4096, 32, 50257, 2048),
    "gpt3-13b": (40, 5120, 40, 50257, 2048),
    "gpt3-175b": (96, 12288, 96, 50257, 2048),
    "gpt-350m": (24, 1024, 16, 51200, 1024),
    "gpt-760m": (24, 1536, 16, 51200, 1024),
    "gpt-1.3b": (24, 2048, 32, 51200, 1024),
    "gpt-2.6b": (32, 2560, 32, 51200, 1024),
    "gpt-6.7b": (32, 4096, 32, 51200, 1024),
    "gpt-15b": (48, 5120, 40, 51200, 1024),
    "gpt-39b": (48, 8192, 64, 51200, 1024),
    "gpt-22b": (48, 6144, 64, 51200, 2048),
    "gpt-145b": (80, 12288, 96, 51200, 2048),
    "gpt-175b": (96, 12288, 96, 51200, 2048),
    "gpt-530b": (105, 20480, 128, 51200, 2048),
    "gpt-1t": (128, 25600, 160, 51200, 2048),
}

for _name, (_layers, _hidden, _heads, _vocab, _seq) in SIZES.items():
    register(
        _name,
        Settings(_layers, _hidden, _heads, None, _vocab, _seq, dropout=0.1 if _name.startswith("gpt2") else 0.0),
        GPT, next_token, fields, SMALL, shape=shape,
    )  # fmt: skip
