"""Sizes of a transformer: of a model known by name, as the catalog's entries tell them, or of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.core.errors import UnknownName


@dataclass(frozen=True)
class Shape:
    """Sizes of a transformer. `chosen` of `experts` feed-forwards serve a token, in every `moe_every`-th layer."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    kv_heads: int = 0
    ffn: int = 0
    name: str = "transformer"
    gated: bool = False
    causal: bool = True
    rotary: bool = False
    bias: bool = True
    tied: bool = True
    dropout: bool = False
    experts: int = 0
    chosen: int = 1
    moe_every: int = 1
    head: int = 0  # width of a head, where it is not hidden / heads

    @property
    def head_dim(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def attention_params(self) -> int:
        return self.hidden * (2 * self.heads + 2 * self.kv) * self.head_dim

    @property
    def ffn_params(self) -> int:
        """Of one feed-forward, or of one expert."""
        return self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def norm_params(self) -> int:
        """Norms and biases of a layer."""
        biases = (2 * self.hidden + self.inner + (self.heads + 2 * self.kv) * self.head_dim) if self.bias else 0
        return self.hidden * (4 if self.bias else 2) + biases

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden + (0 if self.rotary else self.seq * self.hidden)

    @property
    def moe_layers(self) -> int:
        return self.layers // self.moe_every if self.experts else 0

    @property
    def params(self) -> float:
        dense = self.layers * (self.attention_params + self.norm_params) + self.embedding_params
        mixed = self.moe_layers * (self.ffn_params * self.experts + self.hidden * self.experts)
        head = 0 if self.tied else self.vocab * self.hidden
        return dense + mixed + (self.layers - self.moe_layers) * self.ffn_params + head

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward as MFU is usually counted: six per parameter met, and all scores, masked or not."""
        met = self.layers * self.attention_params + (self.layers - self.moe_layers + self.moe_layers * self.chosen) * self.ffn_params
        scores = 12 * self.layers * self.seq * self.heads * self.head_dim
        return 6.0 * (met + self.vocab * self.hidden) + scores


def shape(name: str, **changes: Any) -> Shape:
    """The shape of a named model; keyword arguments change fields of its settings (`layers=2`, `seq=4096`)."""
    from weft.frontend.catalog import entry, resized

    found = entry(name)
    settings = resized(found, changes)
    if found.shape is None:
        raise UnknownName(
            f"{name} is not a stack of transformer layers", needed="a model with layers, hidden and heads, such as gpt2 or llama3-8b", found=name,
            try_=f"weft plan {name} --cluster SPEC, which predicts any model",
        )  # fmt: skip
    return Shape(**found.shape(settings), name=name)


def is_transformer(name: str) -> bool:
    """Whether this is a named model that is a stack of transformer layers, known by their sizes."""
    from weft.frontend.catalog import entry

    return ":" not in name and entry(name).shape is not None
