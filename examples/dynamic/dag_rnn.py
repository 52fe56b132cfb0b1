"""An RNN over directed acyclic graphs: a vertex reads any number of others, and any number may read it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import dynamic


class DagRNN(nn.Module):
    """h = tanh(W x + U mean of children + V max of children)."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, hidden)
        self.mean, self.max = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, v: dynamic.Vertex) -> None:
        below = self.mean(v.gather("h", reduce="mean")) + self.max(v.gather("h", reduce="max"))
        h = torch.tanh(self.own(v.pull("x")) + below)
        v.scatter(h=h)
        v.push(h=h)

    def alone(self, x: Tensor, children: list[Tensor]) -> Tensor:
        out = self.own(x)
        if children:
            rows = torch.stack(children)
            out = out + self.mean(rows.mean(0)) + self.max(rows.amax(0))
        return torch.tanh(out)


def model(cell: DagRNN) -> dynamic.Model:
    return dynamic.Model(cell, states={"h": cell.mean.in_features})


def main() -> None:
    """A diamond: vertex 0 is read by 1 and 2, and both by 3."""
    torch.manual_seed(0)
    graphs = dynamic.edges([(4, [(0, 1), (0, 2), (1, 3), (2, 3)])])
    out = model(DagRNN(8, 16))(graphs, torch.randn(4, 8), at="all")
    print("one row per vertex:", tuple(out.shape))


if __name__ == "__main__":
    main()
