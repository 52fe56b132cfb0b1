"""Low-rank adapters on some linear layers of a module whose own parameters are frozen, as fine-tuning runs have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

TARGETS = {"qkv": ("q", "k", "v"), "proj": ("o",), "gate": ("gate",), "up": ("up",), "down": ("down",)}


class Adapted(nn.Module):
    """A frozen linear layer and, added to it, the product of two narrow ones."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base, self.down, self.up = base, nn.Linear(base.in_features, rank, bias=False, **kind), nn.Linear(rank, base.out_features, bias=False, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@cache
def adapters(rank: int, targets: str) -> Callable[[nn.Module], None]:
    """Freezes a module and adapts the layers that a row's words name."""
    names = {name for word in targets.split() for name in TARGETS.get(word, (word,))}

    def adapt(model: nn.Module) -> None:
        model.requires_grad_(False)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if name in names and isinstance(child, nn.Linear):
                    with torch.no_grad():
                        setattr(parent, name, Adapted(child, rank))

    return adapt
