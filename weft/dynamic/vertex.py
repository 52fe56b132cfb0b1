"""The vertex a vertex function sees: it gathers from children, pulls inputs, scatters to parents, pushes outputs.

A vertex function runs on many vertices at once: every tensor has one row per vertex, or one per edge to a child.
It is ordinary torch, and must treat each row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.errors import StructureError
from weft.dynamic.schedule import REST, Reads


@dataclass(frozen=True, order=True)
class Source:
    """Where a value of a vertex function comes from."""

    role: str  # pull, slot, edge, at (the edge's vertex); in gradients also d_state, d_push
    name: str = ""
    slot: int = 0

    def __str__(self) -> str:
        return f"{self.role}_{self.name}_{self.slot}" if self.role == "slot" else f"{self.role}_{self.name}"


@dataclass
class Use:
    """What a vertex function asked for and gave, in one call of it."""

    sources: dict[Source, Tensor] = field(default_factory=dict)
    optional: set[Source] = field(default_factory=set)
    after: int | None = None  # where the children read together begin
    states: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    @property
    def reads(self) -> Reads:
        slots = 1 + max((s.slot for s in self.sources if s.role == "slot"), default=-1)
        optional = {s.slot if s.role == "slot" else REST for s in self.optional if s.role in ("slot", "edge")}
        if self.after is not None and slots > self.after:
            raise StructureError(
                "a vertex function reads a child both by itself and together with others",
                needed=f"after={slots} or more where several are read together", found=f"gather of child {slots - 1}, and of all with after={self.after}",
                try_=f"after={slots}, and what comes of child {slots - 1} added by hand",
            )  # fmt: skip
        optional |= set(range(self.after or slots)) - {s.slot for s in self.sources if s.role == "slot"}
        return Reads(slots if self.after is None else self.after, self.after is not None, frozenset(optional))


class Vertex:
    """The handle passed to a vertex function. Rows are vertices unless a method says edges."""

    def __init__(self, rows: int, edges: int, supply: Callable[[Source], Tensor], use: Use) -> None:
        self._rows, self._edges, self._supply, self._use = rows, edges, supply, use

    def pull(self, name: str = "x", *, optional: bool = False) -> Tensor:
        """This vertex's row of the external input `name`; zeros where it has none and that is `optional`."""
        return self._take(Source("pull", name), optional)

    def gather(
        self,
        name: str,
        child: int | None = None,
        *,
        reduce: str | None = None,
        after: int = 0,
        optional: bool = False,
    ) -> Tensor:
        """State `name` of one child, or of all children from number `after` on.

        With `child`, one row per vertex. Without, one row per edge; `reduce` (sum, mean, max) makes that one per vertex.
        A vertex without children reads zeros, and so does an `optional` child that is absent.
        """
        if child is not None:
            return self._take(Source("slot", name, child), optional)
        rows = self._take(Source("edge", name), optional)
        if self._use.after not in (None, after):
            raise StructureError(
                "a vertex function reads two different sets of children together",
                needed=f"after={self._use.after} in every gather of several children", found=f"after={after}",
            )  # fmt: skip
        self._use.after = after
        return rows if reduce is None else self.reduce(rows, reduce)

    def spread(self, value: Tensor) -> Tensor:
        """A value of the vertex, once per edge."""
        return value.index_select(0, self.edge_rows)

    def reduce(self, edges: Tensor, how: str = "sum") -> Tensor:
        """One row per vertex from one row per edge: sum, mean or max over its children (0 without children)."""
        total = edges.new_zeros((self._rows, *edges.shape[1:]))
        if how == "sum":
            return total.index_add(0, self.edge_rows, edges)
        if how == "max":
            at = self.edge_rows.reshape(-1, *[1] * (edges.dim() - 1)).expand_as(edges)
            return total.scatter_reduce(0, at, edges, "amax", include_self=False)
        if how == "mean":
            count = self.count(edges.dtype).clamp(min=1)
            return self.reduce(edges) / count.reshape(-1, *[1] * (edges.dim() - 1))
        raise StructureError("unknown reduction over children", needed="sum, mean or max", found=repr(how))

    def count(self, dtype: torch.dtype | None = None) -> Tensor:
        """How many children each vertex reads together."""
        return self.reduce(torch.ones(self._edges, dtype=dtype, device=self.edge_rows.device))

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax of edge scores over the children of each vertex."""
        top = self.reduce(scores.detach(), "max")
        weight = torch.exp(scores - self.spread(top))
        return weight / self.spread(self.reduce(weight))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of each vertex over its children: query per vertex; key and value per edge, [rows, heads, size]."""
        scores = (self.spread(query) * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
        return self.reduce(self.softmax(scores) * value)

    def scatter(self, **states: Tensor) -> None:
        """What parents may gather from this vertex."""
        self._use.states |= states

    def push(self, **outputs: Tensor) -> None:
        """What the caller of the model gets from this vertex."""
        self._use.outputs |= outputs

    @property
    def scattered(self) -> dict[str, Tensor]:
        """What this vertex has scattered so far."""
        return dict(self._use.states)

    @property
    def edge_rows(self) -> Tensor:
        """For every edge the row of the vertex it belongs to."""
        return self._take(Source("at"), False)

    def _take(self, source: Source, optional: bool) -> Tensor:
        if optional:
            self._use.optional.add(source)
        if source not in self._use.sources:
            self._use.sources[source] = self._supply(source)
        return self._use.sources[source]


def check_use(use: Use, name: str, states: Mapping[str, tuple[int, ...]], rows: int, dtype: torch.dtype) -> None:
    """The states scattered are those declared, one row per vertex, all of one dtype."""
    for state, value in use.states.items():
        if state not in states:
            raise StructureError(
                f"vertex function {name!r} scatters an unknown state {state!r}",
                needed=f"one of {', '.join(states)}", found=state, try_=f"declare it: states={{{state!r}: size, ...}}",
            )  # fmt: skip
        if tuple(value.shape) != (rows, *states[state]):
            raise StructureError(
                f"vertex function {name!r} scatters state {state!r} in the wrong shape",
                needed=f"[vertices, {', '.join(map(str, states[state]))}]", found=_shape(value, rows),
            )  # fmt: skip
        if value.dtype != dtype:
            raise StructureError(
                f"vertex function {name!r} mixes dtypes in state {state!r}", needed=str(dtype), found=str(value.dtype),
                try_="convert inputs and parameters to one dtype",
            )  # fmt: skip
    for output, value in use.outputs.items():
        if value.dim() == 0 or value.shape[0] != rows:
            raise StructureError(
                f"vertex function {name!r} pushes {output!r} without one row per vertex",
                needed="[vertices, ...]", found=_shape(value, rows),
            )  # fmt: skip


def _shape(value: Tensor, rows: int) -> str:
    return "[" + ", ".join("vertices" if n == rows else str(n) for n in value.shape) + "]"
