"""Grouped experts: every token visits the experts its router chose, and sums what they say, weighted by the router.

Each expert is a type of vertex, so all tokens of a batch that go to one expert are one matmul; a `combine` vertex per token
sums over however many experts it has. The graph is made from the router's choice with a few array operations.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from weft import dynamic


class Expert(nn.Module):
    """gate * down(silu(up(x)))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, v: dynamic.Vertex) -> None:
        v.scatter(y=v.pull("gate") * self.output(v.pull("x")))

    def output(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def combine(v: dynamic.Vertex) -> None:
    v.push(y=v.gather("y", reduce="sum"))


class Experts(nn.Module):
    """A mixture of experts, top-k."""

    def __init__(self, hidden: int, inner: int, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.router = top, nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(experts))
        named = {f"expert{i}": e for i, e in enumerate(self.experts)}
        self.model = dynamic.Model({**named, "combine": combine}, states={"y": hidden})

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.route(x)
        graph = route(chosen.numpy(), len(self.experts))
        visits = {"x": x.repeat_interleave(self.top, 0), "gate": gates.reshape(-1, 1)}
        return self.model(graph, visits)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.router(x).softmax(-1), self.top)

    def alone(self, x: Tensor) -> Tensor:
        """One token in plain torch."""
        gates, chosen = self.route(x)
        return sum(g * self.experts[int(e)].output(x) for g, e in zip(gates, chosen, strict=True))


def route(chosen: np.ndarray, experts: int) -> dynamic.Structure:
    """One sample per token: its visits (of type expert0, expert1, ...) and then the vertex that combines them."""
    tokens, top = chosen.shape
    kinds = tuple(f"expert{i}" for i in range(experts)) + ("combine",)
    first = np.arange(tokens)[:, None] * (top + 1)
    kind = np.concatenate([chosen, np.full((tokens, 1), experts)], axis=1).reshape(-1)
    row = np.concatenate([np.arange(tokens * top).reshape(tokens, top), np.full((tokens, 1), -1)], axis=1).reshape(-1)
    ends = np.zeros((tokens, top + 1), np.int64)
    ends[:, -1] = top
    return dynamic.Structure(
        first=np.concatenate([[0], np.cumsum(ends.reshape(-1))]), child=(first + np.arange(top)).reshape(-1), row=row,
        sample=np.arange(tokens + 1) * (top + 1), kind=kind, kinds=kinds,
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    layer, x = Experts(16, 32, experts=4, top=2), torch.randn(10, 16)
    print("largest difference:", float((layer(x) - torch.stack([layer.alone(t) for t in x])).abs().max().detach()))


if __name__ == "__main__":
    main()
