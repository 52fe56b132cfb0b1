"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU; decoding with a key-value cache.

Rotation pairs element i with i + d/2, as in the published safetensors checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Field, ids, register
from weft_zoo.gpt import _start, next_token


@dataclass(frozen=True)
class Settings:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    seq: int = 8192
    theta: float = 500000.0
    eps: float = 1e-5
    tied: bool = False
    head: int = 0  # width of a head, where it is not hidden / heads

    @property
    def width(self) -> int:
        return self.head or self.hidden // self.heads


def rotary_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, [len, dim], both halves the same."""
    frequencies = theta ** -(torch.arange(0, dim, 2, device=positions.device).float() / dim)
    angle = positions.float()[:, None] * frequencies
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its angle."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Cache(nn.Module):
    """Keys and values of one layer for sequences up to `length`, written in place."""

    def __init__(self, s: Settings, batch: int, length: int) -> None:
        super().__init__()
        shape = batch, s.kv_heads, length, s.width
        self.register_buffer("k", torch.zeros(shape))
        self.register_buffer("v", torch.zeros(shape))

    def update(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.k.index_copy_(2, positions, k)
        self.v.index_copy_(2, positions, v)
        return self.k, self.v


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.dim = s.width
        self.q = nn.Linear(s.hidden, s.heads * self.dim, bias=False)
        self.k = nn.Linear(s.hidden, s.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(s.hidden, s.kv_heads * self.dim, bias=False)
        self.o = nn.Linear(s.heads * self.dim, s.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None, positions: Tensor | None = None
    ) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, -1, self.dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, mask = rotate(q, cos, sin).to(v), rotate(k, cos, sin).to(v), None
        if cache is not None and positions is not None:
            k, v = cache.update(k, v, positions)
            mask = torch.arange(k.shape[2], device=x.device) <= positions[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(s.hidden, s.eps), Attention(s)
        self.norm2, self.mlp = nn.RMSNorm(s.hidden, s.eps), SwiGLU(s.hidden, s.ffn)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None, positions: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, cache, positions)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """With `make_cache`, `forward(tokens, positions)` is one inference step: prefill or decode."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings = s
        self.tokens = nn.Embedding(s.vocab, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, s.eps)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.tokens.weight
        self.caches: nn.ModuleList | None = None
        self.apply(_start)

    def make_cache(self, batch: int, length: int) -> Llama:
        weight = self.tokens.weight
        self.caches = nn.ModuleList(Cache(self.settings, batch, length) for _ in self.blocks)
        self.caches.to(device=weight.device, dtype=weight.dtype)
        return self

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        s = self.settings
        at = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        cos, sin = rotary_tables(at, s.width, s.theta)
        x = self.tokens(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, cos, sin, self.caches[i] if self.caches is not None else None, positions)
        return self.head(self.norm(x))


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"tokens": ids(batch, s.seq, high=s.vocab), "targets": ids(batch, s.seq, high=s.vocab)}


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it."""
    return {
        "layers": s.layers, "hidden": s.hidden, "heads": s.heads, "kv_heads": s.kv_heads, "ffn": s.ffn, "vocab": s.vocab, "seq": s.seq,
        "gated": True, "rotary": True, "bias": False, "tied": s.tied, "head": s.head,
    }  # fmt: skip


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 56, "vocab": 67, "seq": 16}

# Touvron 2023, table 1 and published configs; Grattafiori 2024, table 3.
SIZES = {
    "llama3-1b": Settings(16, 2048, 32, 8, 8192, tied=True),
    "llama3-3b": Settings(28, 3072, 24, 8, 8192, tied=True),
    "llama3-8b": Settings(32, 4096, 32, 8, 14336),
    "llama3-70b": Settings(80, 8192, 64, 8, 28672),
    "llama3-405b": Settings(126, 16384, 128, 8, 53248),
    "llama2-7b": Settings(32, 4096, 32, 32, 11008, 32000, 4096, 10000.0),
    "llama2-13b": Settings(40, 5120, 40, 40, 13824, 32000, 4096, 10000.0),
    "llama2-70b": Settings(80, 8192, 64, 8, 28672, 32000, 4096, 10000.0),
}

for _name, _settings in SIZES.items():
    register(_name, _settings, Llama, next_token, fields, SMALL, shape=shape)
