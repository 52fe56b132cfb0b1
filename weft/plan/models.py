"""Shapes of named transformers, as the catalog's entries tell them."""

from __future__ import annotations

from typing import Any

from weft.core.errors import UnknownName
from weft.plan.transformer import Shape


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
    """Whether this is a named model that is a stack of transformer layers, which are planned by their sizes alone."""
    from weft.frontend.catalog import entry

    return ":" not in name and entry(name).shape is not None
