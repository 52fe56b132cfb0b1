"""Values for the inputs of a program, each drawn from its type, a kind and a seed, so that a text and a seed reproduce them.

Kinds: `normal`, `positive` (at least 1/2), `flags`, `below N` (integers from 0).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.core.node import Type
from weft.core.program import Program


def draw(type_: Type, kind: str, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    word, _, bound = kind.partition(" ")
    if word == "below":
        return torch.randint(0, int(bound), type_.shape, generator=gen).to(type_.dtype)
    if word == "flags":
        return torch.rand(type_.shape, generator=gen) < 0.5
    if word == "positive":
        return (torch.rand(type_.shape, generator=gen, dtype=torch.float64) + 0.5).to(type_.dtype)
    return torch.randn(type_.shape, generator=gen, dtype=torch.float64).to(type_.dtype)


def usual_kind(type_: Type) -> str:
    """What an input is when nothing more is known of it."""
    return "flags" if type_.dtype == torch.bool else "normal" if type_.dtype.is_floating_point else "below 2"


def draw_inputs(program: Program, seed: int = 0, kinds: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
    """One value per input. An input keeps its value when others come or go."""
    given = kinds or {}
    return {name: draw(n.type, given.get(name, usual_kind(n.type)), seed_of(name, seed)) for name, n in program.input_names.items()}


def seed_of(name: str, seed: int) -> int:
    return (seed * 1_000_003 + int.from_bytes(name.encode()[-6:], "big")) % 2**62
