"""Numbers that Python asked for while a step was traced, and that the batch and the state at hand decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import RuntimeFault
from weft.core.evaluate import values_of
from weft.core.node import Node, toposort


class SharedLayer(Exception):
    """Inside a layer that is traced once for several Python asks for a number, or keeps what was computed: so does each of them."""


@dataclass
class Answers:
    """What is known at one call: the step's state in full on every rank, and what was computed of it and of the batch for earlier questions."""

    state: Callable[[str], Tensor | None]
    found: dict[Node, Tensor] = field(default_factory=dict)
    read: dict[str, Tensor | None] = field(default_factory=dict)

    def value(self, name: str) -> Tensor | None:
        if name not in self.read:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                self.read[name] = self.state(name)
        return self.read[name]

    def forget(self) -> None:
        self.found.clear()
        self.read.clear()


@dataclass
class BatchNumber:
    """A number that Python asked for: the trace serves batches, and a state, that give the same."""

    node: Node
    constant_values: dict[Node, Tensor]  # constants it reads
    words: str
    value: Any = None

    @property
    def of_state(self) -> bool:
        return any(n.op.is_input and n not in self.constant_values and not n.attr("name").startswith("batch") for n in toposort([self.node]))

    def of(self, batch: Mapping[str, Tensor], answers: Answers | None = None) -> Any:
        found = dict(self.constant_values) if answers is None or self.constant_values else answers.found
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return values_of([self.node], found, lambda n: _full_value(n, batch, answers))[0].item()

    def holds(self, batch: Mapping[str, Tensor], answers: Answers | None = None) -> bool:
        now = self.of(batch, answers)
        return bool(now == self.value or (now != now and self.value != self.value))


def _full_value(n: Node, batch: Mapping[str, Tensor], answers: Answers | None) -> Tensor:
    x = batch[n.attr("name")] if n.attr("name") in batch else answers.value(n.attr("name")) if answers is not None else None
    assert x is not None
    if tuple(x.shape) != n.shape:
        raise RuntimeFault(
            "Python asks for a number that the full batch decides",
            needed=f"the full batch on every rank: {n.attr('name').removeprefix('batch.')} {list(n.shape)}",
            found=f"{list(x.shape)}, a part of it",
            try_="give every rank the full batch",
        )
    return x.detach().cpu()
