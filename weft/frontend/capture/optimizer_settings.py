"""What an optimizer's groups say besides their parameters, and what it has in attributes of its own: numbers, which may be inputs of a
program, and all the rest."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

COUNT = "count"  # among the settings that are inputs: each parameter counts its own updates
HOW = {"foreach": False, "fused": False, "capturable": False}  # which of torch's own forms of an update is run
OWN = "own"  # among the groups: what an optimizer keeps in attributes of its own
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


def settings_home(optimizer: torch.optim.Optimizer, group: str) -> dict[str, Any]:
    """Where the settings of a group are kept; those of the optimizer itself are its attributes."""
    return vars(optimizer) if group == OWN else optimizer.param_groups[int(group)]


@functools.cache
def _of_torch() -> set[str]:
    """The attributes that every optimizer has. Making one loads Dynamo, so none is made before there is another."""
    return {*vars(torch.optim.Optimizer([torch.zeros(1)], {})), "_opt_called", "_warned_capturable_if_run_uncaptured"}


def all_settings(optimizer: torch.optim.Optimizer, keys: Mapping[str, Collection[str]] | None = None) -> dict[str, Settings]:
    """Of every group by its number, and of the attributes of an optimizer that is not torch's own; of these keys alone, where given."""
    homes: dict[str, Mapping[str, Any]] = {str(i): group for i, group in enumerate(optimizer.param_groups)}
    if not type(optimizer).__module__.startswith("torch.optim."):
        homes[OWN] = {k: x for k, x in vars(optimizer).items() if k not in _of_torch() and isinstance(x, (bool, int, float, str, type(None)))}
    return {g: settings_of({k: x for k, x in home.items() if keys is None or g not in keys or k in keys[g]}) for g, home in homes.items()}


def is_given(name: str, given: Collection[str]) -> bool:
    return name == "lr" or name in given
