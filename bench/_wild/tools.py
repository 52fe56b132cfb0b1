"""What the shipped cases share: a table that fills itself, numbers that are always the same, and dropout turned off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS = 5
SAMPLES, LENGTH, WORDS, CLASSES = 8, 12, 64, 4

Make = Callable[[], tuple[Any, ...]]


class Table(dict[str, Make]):
    """Cases by name; a name that is there already is refused."""

    def case(self, make: Make) -> Make:
        """A case named as its function is."""
        return self.add(make.__name__, make)

    def add(self, name: str, make: Make) -> Make:
        assert name not in self, f"two cases are named {name}"
        self[name] = make
        return make


def draw(k: int) -> torch.Generator:
    return torch.Generator().manual_seed(7000 + k)


def reals(k: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=draw(k))


def ints(k: int, high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=draw(k))


def batches(make: Callable[[int], Any], steps: int = STEPS) -> list[Any]:
    """A different batch for every step; numbers of one batch are drawn apart from each other by the caller."""
    return [make(10 * i) for i in range(steps)]


def vectors(width: int = 8, classes: int = CLASSES, samples: int = SAMPLES) -> list[dict[str, Tensor]]:
    return batches(lambda k: {"x": reals(k, samples, width), "y": ints(k + 1, classes, samples)})


def images(channels: int = 3, size: int = 8, classes: int = CLASSES) -> list[dict[str, Tensor]]:
    return batches(lambda k: {"x": reals(k, SAMPLES, channels, size, size), "y": ints(k + 1, classes, SAMPLES)})


def words(classes: int = CLASSES, length: int = LENGTH) -> list[dict[str, Tensor]]:
    return batches(lambda k: {"x": ints(k, WORDS, SAMPLES, length), "y": ints(k + 1, classes, SAMPLES)})


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()


def mlp(width: int = 8, hidden: int = 16, out: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, out))


def quiet(model: nn.Module) -> nn.Module:
    """Dropout off, however a model spells it, so that torch's own run can be compared with."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else []:
                if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                    setattr(holder, name, 0.0)
    return model.train()
