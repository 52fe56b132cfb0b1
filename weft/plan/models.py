"""Shapes of the zoo's transformers by name, read off the zoo's own settings, so that there is one table of sizes."""

from __future__ import annotations

from typing import Any

from weft.core.errors import UnknownName
from weft.plan.transformer import Shape


def shape(name: str, **changes: Any) -> Shape:
    """The shape of a named model; keyword arguments change fields of its settings (`layers=2`, `seq=4096`)."""
    from weft.frontend import zoo
    from weft.frontend.zoo.entry import resized

    found = of_settings(resized(zoo.entry(name), changes), name)
    if found is None:
        raise UnknownName(
            f"{name} is not a stack of transformer layers", needed="a model with layers, hidden and heads, such as gpt2 or llama3-8b", found=name,
            try_=f"weft plan {name} --cluster SPEC, which foresees any model",
        )  # fmt: skip
    return found


def is_transformer(name: str) -> bool:
    """Whether this is a model of the zoo that is a stack of transformer layers, which are planned by their sizes alone."""
    from weft.frontend import zoo

    return ":" not in name and of_settings(zoo.entry(name).settings, name) is not None


def of_settings(settings: Any, name: str) -> Shape | None:
    """A shape of any settings that have layers, hidden and heads; None of others."""
    if not all(hasattr(settings, field) for field in ("layers", "hidden", "heads")):
        return None
    get = vars(settings).get
    rotary, experts = "theta" in vars(settings), get("experts", 0)
    words, length = get("vocab"), get("seq")
    if words is None:  # pictures: patches in place of words, and one answer per sample
        words, length = get("classes"), (get("image") // get("patch")) ** 2 + 1
    return Shape(
        settings.layers, settings.hidden, settings.heads, words, length, get("kv_heads") or 0, _ffn(settings), name,
        gated=rotary, causal="kinds" not in vars(settings) and "image" not in vars(settings) and "group" not in vars(settings),
        rotary=rotary, bias=not rotary, tied=bool(get("tied", not rotary)), dropout=bool(get("dropout", 0.0)),
        experts=experts, chosen=get("chosen", 2) if experts else 1, moe_every=2 if "group" in vars(settings) else 1,
    )  # fmt: skip


def _ffn(settings: Any) -> int:
    """Four times the width unless said otherwise; eight times where experts take turns with plain layers."""
    return int(settings.ffn or settings.hidden * (8 if hasattr(settings, "group") else 4))
