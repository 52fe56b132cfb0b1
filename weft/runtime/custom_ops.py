"""torch ops of weft's own: a traced graph has each as one node, and a compiler keeps their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("weft", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op of a schema: what it does, and what it gives in shapes alone."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=_library)
    return getattr(torch.ops.weft, name)
