"""What an optimizer's groups say besides their parameters: numbers, which may be inputs of a program, and all the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

COUNT = "count"  # among the settings that are inputs: each parameter counts its own updates
HOW = {"foreach": False, "fused": False, "capturable": False}  # which of torch's own forms of an update is run
_SKIPPED = {"params", "param_names", *HOW}


@dataclass(frozen=True)
class Settings:
    """A parameter group without its parameters: numbers by the names they have as inputs, and all the rest, with which it is another program."""

    numbers: dict[str, float]
    form: tuple[Any, ...]


def number(x: Any) -> float:
    """A setting, which torch also takes as a tensor, as a number."""
    if isinstance(x, Tensor):
        with _disable_current_modes():
            return float(x.detach())
    return float(x)


def is_single_number(x: Any) -> bool:
    return (isinstance(x, (int, float)) and not isinstance(x, bool)) or (isinstance(x, Tensor) and x.numel() == 1)


def settings_of(group: Mapping[str, Any]) -> Settings:
    numbers: dict[str, float] = {}
    form = []
    for key, x in group.items():
        if key in _SKIPPED:
            continue
        several = isinstance(x, (tuple, list)) and bool(x) and all(map(is_single_number, x))
        numbers |= {f"{key}_at_{i}": number(v) for i, v in enumerate(x)} if several else {key: number(x)} if is_single_number(x) else {}
        form.append((key, str(x.dtype) if isinstance(x, Tensor) else len(x) if several else None if is_single_number(x) else repr(x)))
    return Settings(numbers, tuple(form))


def is_given(name: str, given: Collection[str]) -> bool:
    return name == "lr" or name in given
