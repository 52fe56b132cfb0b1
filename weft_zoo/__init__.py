"""Models by name and by settings, on plain torch: `zoo.get("llama3-8b", layers=2)`.

Every model is the published one: its parameter count is checked against the published count. `zoo.small(name)` is the
same architecture at test size. `zoo.load` also takes `module.py:function` and Hugging Face configs and models.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.frontend.catalog import Batch, Entry, Field, Workload, assemble, entry, get, names, register, resized
from weft.frontend.source import load
from weft_zoo import bert, convnets, dense, gpt, gshard, inception, llama, mixtral, recommend, unet, vit

__all__ = [
    "Batch", "Entry", "Field", "Workload", "bert", "convnets", "dense", "entry", "get", "gpt", "gshard", "inception",
    "llama", "load", "mixtral", "names", "recommend", "register", "small", "unet", "vit",
]  # fmt: skip


def small(
    name: str, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, seed: int = 0, **settings: Any
) -> Workload:
    """The same architecture at test size."""
    found = entry(name)
    return assemble(found, resized(found, {**found.small, **settings}), device, dtype, seed)
