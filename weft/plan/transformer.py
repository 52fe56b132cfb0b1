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
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden


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
