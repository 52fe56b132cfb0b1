"""HTML and SVG as nested calls: text is escaped, what a call returned is not escaped again."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

VOID = {"meta", "br", "hr", "input", "path", "rect", "line", "circle", "polyline", "polygon"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *inner: Any, **attrs: Any) -> Markup:
    """An element. `cls` is its class; an underscore in a name stands for a hyphen; None leaves an attribute out."""
    named = {("class" if k == "cls" else k.rstrip("_").replace("_", "-")): v for k, v in attrs.items() if v is not None and v is not False}
    attributes = "".join(f" {k}" if v is True else f' {k}="{html.escape(_text(v))}"' for k, v in named.items())
    body = join(inner)
    return Markup(f"<{name}{attributes}/>" if name in VOID and not body else f"<{name}{attributes}>{body}</{name}>")


def join(parts: Iterable[Any]) -> Markup:
    """Parts one after the other; None is nothing, lists are opened."""
    out = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, Markup):
            out.append(part)
        elif isinstance(part, (list, tuple)):
            out.append(join(part))
        else:
            out.append(Markup(html.escape(_text(part), quote=False)))
    return Markup("".join(out))


def _text(value: Any) -> str:
    """Numbers in pictures need no more than two places."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
