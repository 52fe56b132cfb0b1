"""Numbers that Python asked for while a step was traced, and that the batch alone decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import RuntimeFault
from weft.core.node import Node, toposort


@dataclass
class BatchNumber:
    """A number that the batch alone decides and Python asked for: the trace serves batches that give the same."""

    node: Node
    constant_values: dict[Node, Tensor]  # constants it reads
    words: str
    value: Any = None

    def of(self, batch: Mapping[str, Tensor]) -> Any:
        found = dict(self.constant_values)
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for n in toposort([self.node]):
                if n not in found:
                    found[n] = _full_value(n, batch) if n.op.name == "input" else n.op.run(*(found[a] for a in n.args), **dict(n.attrs))
            return found[self.node].item()

    def holds(self, batch: Mapping[str, Tensor]) -> bool:
        now = self.of(batch)
        return bool(now == self.value or (now != now and self.value != self.value))


def _full_value(n: Node, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch[n.attr("name")]
    if tuple(x.shape) != n.shape:
        raise RuntimeFault(
            "Python asks for a number that the full batch decides",
            needed=f"the full batch on every rank: {n.attr('name').removeprefix('batch.')} {list(n.shape)}",
            found=f"{list(x.shape)}, a part of it",
            try_="give every rank the full batch",
        )
    return x.detach().cpu()
