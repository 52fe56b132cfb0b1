"""Mixtral: a Llama whose feed-forward is eight experts, two per token, none dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, register
from weft_zoo.gpt import _start
from weft_zoo.llama import Attention, rotary_tables
from weft_zoo.llama import Settings as LlamaSettings
from weft_zoo.llama import shape as llama_shape
from weft_zoo.precision import wide


@dataclass(frozen=True)
class Settings:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    experts: int = 8
    chosen: int = 2
    vocab: int = 32000
    seq: int = 8192
    theta: float = 1000000.0
    eps: float = 1e-5
    balance: float = 0.02
    tied: bool = False
    head: int = 0

    def attention(self) -> LlamaSettings:
        return LlamaSettings(self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab, self.seq, tied=self.tied, head=self.head)


class Experts(nn.Module):
    """SwiGLU experts as three stacked matrices; each token goes through the experts in its row of `picks`."""

    def __init__(self, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor, picks: Tensor, weights: Tensor) -> Tensor:
        """x [tokens, hidden]; picks, weights [tokens, chosen]. The matrices of its experts are gathered for each token."""
        gate, up = (torch.einsum("td,tkfd->tkf", x, w[picks]) for w in (self.gate, self.up))
        return torch.einsum("tkf,tkdf,tk->td", F.silu(gate) * up, self.down[picks], weights)


class Sparse(nn.Module):
    """Route each token to its `chosen` best experts, their softmax weights scaled to sum to one."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.chosen = s.chosen
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = Experts(s.experts, s.hidden, s.ffn)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, -2)
        chances = F.softmax(wide(self.router(flat)), -1)
        weights, picks = chances.topk(self.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return self.experts(flat, picks, weights).view_as(x), _imbalance(chances, picks)


def _imbalance(chances: Tensor, picks: Tensor) -> Tensor:
    """Experts x sum over experts of (share of tokens sent) x (mean chance): `chosen` when even (Fedus 2021)."""
    experts = chances.shape[-1]
    sent = F.one_hot(picks, experts).to(chances.dtype).mean(0).sum(0)
    return experts * (sent * chances.mean(0)).sum()


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(s.hidden, s.eps), Attention(s.attention())
        self.norm2, self.sparse = nn.RMSNorm(s.hidden, s.eps), Sparse(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), cos, sin)
        y, imbalance = self.sparse(self.norm2(x))
        return x + y, imbalance


class Mixtral(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings = s
        self.tokens = nn.Embedding(s.vocab, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, s.eps)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.tokens.weight
        self.apply(_start)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        s = self.settings
        cos, sin = rotary_tables(torch.arange(tokens.shape[1], device=tokens.device), s.attention().width, s.theta)
        x, uneven = self.tokens(tokens), torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, imbalance = block(x, cos, sin)
            uneven = uneven + imbalance
        return self.head(self.norm(x)), uneven / len(self.blocks)


def balanced_next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Next-token loss plus the price of uneven experts."""
    logits, uneven = model(batch["tokens"])
    price = model.settings.balance
    return F.cross_entropy(wide(logits.flatten(0, 1)), batch["targets"].flatten()) + price * uneven


def fields(s: Settings, batch: int) -> dict[str, Field]:
    return {"tokens": ids(batch, s.seq, high=s.vocab), "targets": ids(batch, s.seq, high=s.vocab)}


def shape(s: Settings) -> dict[str, Any]:
    """As planners take it."""
    return llama_shape(s.attention()) | {"experts": s.experts, "chosen": s.chosen}


SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 40, "experts": 4, "vocab": 67, "seq": 16}

register("mixtral-8x7b", Settings(), Mixtral, balanced_next_token, fields, SMALL, shape=shape)
register(
    "mixtral-8x22b", Settings(layers=56, hidden=6144, heads=48, ffn=16384, vocab=32768, seq=65536),
    Mixtral, balanced_next_token, fields, SMALL, batch=1, shape=shape,
)  # fmt: skip
