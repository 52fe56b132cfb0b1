"""Dense nets: a plain MLP; CANDLE-Uno, which joins encoded cell and drug features with doses; late fusion of encoders; a mixture of wide layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.frontend.catalog import Batch, Field, ids, reals, register
from weft_zoo.precision import wide
from weft_zoo.recommend import stack


@dataclass(frozen=True)
class MLPSettings:
    """`layers` linear layers, all `hidden` wide but the last, which is `classes` wide."""

    layers: int = 16
    hidden: int = 8192
    inputs: int = 8192
    classes: int = 8192
    bias: bool = True


class MLP(nn.Module):
    def __init__(self, s: MLPSettings) -> None:
        super().__init__()
        self.layers = stack(s.inputs, (s.hidden,) * (s.layers - 1) + (s.classes,), s.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(wide(model(batch["x"])), batch["labels"])


def mlp_fields(s: MLPSettings, batch: int) -> dict[str, Field]:
    return {"x": reals(batch, s.inputs), "labels": ids(batch, high=s.classes)}


@dataclass(frozen=True)
class UnoSettings:
    """Widths of the feature encoders and of the head; feature sizes are those of the CANDLE data."""

    encoder: tuple[int, ...] = (4192,) * 8
    head: tuple[int, ...] = (4192,) * 4
    cell: int = 942
    descriptors: int = 5270
    fingerprints: int = 2048
    dropout: float = 0.0


class Uno(nn.Module):
    """Drug response: both drugs go through the same two encoders, as in CANDLE's own model."""

    def __init__(self, s: UnoSettings) -> None:
        super().__init__()
        self.dropout = s.dropout
        sizes = {"cell": s.cell, "descriptors": s.descriptors, "fingerprints": s.fingerprints}
        self.encoders = nn.ModuleDict({k: self._tower(n, s.encoder) for k, n in sizes.items()})
        self.head = self._tower(2 + 5 * s.encoder[-1], s.head)
        self.out = nn.Linear(s.head[-1], 1)

    @staticmethod
    def _tower(inputs: int, widths: tuple[int, ...]) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(i, o) for i, o in zip((inputs, *widths), widths, strict=False))

    def _climb(self, tower: nn.Module, x: Tensor) -> Tensor:
        for layer in tower:
            x = F.dropout(F.relu(layer(x)), self.dropout, self.training)
        return x

    def forward(self, doses: Tensor, cell: Tensor, descriptors: Tensor, fingerprints: Tensor) -> Tensor:
        """doses [batch, 2]; cell [batch, n]; descriptors and fingerprints [2, batch, n] -> growth [batch]."""
        parts = [doses, self._climb(self.encoders["cell"], cell)]
        for drug in range(2):
            parts.append(self._climb(self.encoders["descriptors"], descriptors[drug]))
            parts.append(self._climb(self.encoders["fingerprints"], fingerprints[drug]))
        return self.out(self._climb(self.head, torch.cat(parts, 1))).squeeze(1)


def regress(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "growth"}
    return F.mse_loss(model(**inputs), batch["growth"])


def uno_fields(s: UnoSettings, batch: int) -> dict[str, Field]:
    return {
        "doses": reals(batch, 2), "cell": reals(batch, s.cell), "descriptors": reals(2, batch, s.descriptors),
        "fingerprints": reals(2, batch, s.fingerprints), "growth": reals(batch),
    }  # fmt: skip


@dataclass(frozen=True)
class FusionSettings:
    """`encoders` of `inputs` features each, or of the same features mixed by a gate; all they give is joined by one layer."""

    encoders: int = 12
    inputs: int = 2048
    hidden: tuple[int, ...] = (8192,)
    joint: int = 512
    classes: int = 16


class Fusion(nn.Module):
    """Late fusion: every kind of features through an encoder of its own, then side by side into one layer."""

    def __init__(self, s: FusionSettings) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(nn.Sequential(stack(s.inputs, s.hidden), nn.ReLU()) for _ in range(s.encoders))
        self.joint = nn.Linear(s.encoders * s.hidden[-1], s.joint)
        self.out = nn.Linear(s.joint, s.classes)

    def join(self, parts: list[Tensor]) -> Tensor:
        return self.out(F.relu(self.joint(torch.cat(parts, 1))))

    def forward(self, x: Tensor) -> Tensor:
        """x [encoders, batch, inputs]."""
        return self.join([encoder(x[k]) for k, encoder in enumerate(self.encoders)])


class Mixture(Fusion):
    """Wide layers that share their input, each weighed by a gate: a dense mixture of experts."""

    def __init__(self, s: FusionSettings) -> None:
        super().__init__(s)
        self.gate = nn.Linear(s.inputs, s.encoders)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, inputs]."""
        weights = self.gate(x).softmax(1)
        return self.join([weights[:, k : k + 1] * encoder(x) for k, encoder in enumerate(self.encoders)])


def fusion_fields(s: FusionSettings, batch: int) -> dict[str, Field]:
    return {"x": reals(s.encoders, batch, s.inputs), "labels": ids(batch, high=s.classes)}


def mixture_fields(s: FusionSettings, batch: int) -> dict[str, Field]:
    return {"x": reals(batch, s.inputs), "labels": ids(batch, high=s.classes)}


_small_uno = {"encoder": (16, 16), "head": (16, 16), "cell": 9, "descriptors": 13, "fingerprints": 11}

_small_mlp = {"layers": 3, "hidden": 16, "inputs": 16, "classes": 16}

register("mlp", MLPSettings(), MLP, classify, mlp_fields, _small_mlp, batch=256)
# `candle-uno` has the widths of Unity's evaluation, `candle-uno-1000` the defaults of the CANDLE benchmark.
register("candle-uno", UnoSettings(), Uno, regress, uno_fields, _small_uno, batch=256)
register("candle-uno-1000", UnoSettings((1000,) * 3, (1000,) * 3), Uno, regress, uno_fields, _small_uno, batch=256)

_small_fusion = {"encoders": 3, "inputs": 6, "hidden": (8,), "joint": 4, "classes": 3}

register("fusion", FusionSettings(), Fusion, classify, fusion_fields, _small_fusion, batch=1024)
register("mixture", FusionSettings(), Mixture, classify, mixture_fields, _small_fusion, batch=1024)
