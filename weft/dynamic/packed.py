"""Graphs as one tensor, a row of numbers for each sample, so that they are a tensor of a batch like any other.

A row holds the number of vertices n, then n kinds, n rows of inputs (0: none), n numbers of children, and all children (0: absent), counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.core.errors import StructureError
from weft.dynamic.native import spans
from weft.dynamic.structure import NO_CHILD, Structure, bounds_of


@dataclass(frozen=True)
class Packed:
    """What stands for the graphs of a batch while a step is traced: their tensor, and the names of kinds. All else differs from batch to batch."""

    graphs: Tensor
    kinds: tuple[str, ...]

    def batch_parts(self) -> list[tuple[str, Any]]:
        return [("packed", self.graphs), ("kinds", ", ".join(self.kinds))]

    def with_batch_parts(self, parts: list[tuple[str, Any]]) -> Packed:
        return Packed(dict(parts)["packed"], self.kinds)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StructureError(
            f"a step reads .{name} of the graphs of its batch", needed="graphs that only a dynamic.Model reads", found=f"graphs.{name}",
            try_="work it out before the step, and put it into the batch as a tensor",
        )  # fmt: skip


def pack(s: Structure) -> Tensor:
    """The tensor of some graphs; each must have one root, the row of which is the sample's."""
    n, first = np.diff(s.sample), s.first[s.sample]
    roots = np.bincount(np.searchsorted(s.sample, s.roots, side="right") - 1, minlength=len(s))
    if (roots != 1).any():
        at = int(np.argmax(roots != 1))
        raise StructureError(
            f"sample {at} of a batch has {roots[at]} roots", needed="one root in every sample: a step has a row for each", found=str(roots[at]),
            try_="a vertex above them that gathers from all",
        )  # fmt: skip
    s.depth  # noqa: B018 - refuses cycles
    edges = np.diff(first)
    out = np.zeros((len(s), _wide(int((1 + 3 * n + edges).max(initial=1)))), np.int64)
    flat, start = out.reshape(-1), np.arange(len(s)) * out.shape[1]
    out[:, 0] = n
    for k, values in enumerate((s.kind, s.row + 1, s.arity)):
        flat[spans(start + 1 + k * n, n)] = values
    flat[spans(start + 1 + 3 * n, edges)] = np.where(s.child < 0, 0, s.child - np.repeat(s.sample[:-1], edges) + 1)
    with _disable_current_modes():  # a step may be being traced
        return torch.from_numpy(out)


def unpack(graphs: Tensor, kinds: tuple[str, ...]) -> Structure:
    """The graphs of a tensor. Whatever its numbers are, they are graphs: what names no vertex is absent."""
    table = np.ascontiguousarray(graphs.detach().cpu().numpy())
    flat, start = table.reshape(-1), np.arange(len(table)) * table.shape[1]
    n = np.clip(table[:, 0], 0, (table.shape[1] - 1) // 3) if len(table) else np.empty(0, np.int64)
    kind, row, arity = (flat[spans(start + 1 + k * n, n)] for k in range(3))
    sample, owner = bounds_of(n), np.repeat(np.arange(len(table)), n)
    room = (table.shape[1] - 1 - 3 * n)[owner] if len(owner) else arity
    arity = np.where(arity.clip(0) <= room, arity.clip(0), 0)
    first = bounds_of(arity)
    edges = np.diff(first[sample])
    parent = np.repeat(np.arange(len(arity)), arity)
    child = flat[np.minimum(spans(start + 1 + 3 * n, edges), max(len(flat) - 1, 0))] - 1 if len(flat) else parent
    there = (child >= 0) & (child < n[owner[parent]]) & (child + sample[owner[parent]] != parent)
    child = np.where(there, child + sample[owner[parent]], NO_CHILD)
    return Structure(first, child, row - 1, sample, kind % len(kinds), kinds)


def _wide(width: int) -> int:
    """A width with room for larger graphs, so that few batches have another shape."""
    step = max(8, 1 << max(0, width.bit_length() - 3))
    return -(-width // step) * step
