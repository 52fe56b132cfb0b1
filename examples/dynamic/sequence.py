"""LSTM and GRU over sequences of any length: each step is a vertex with the step before it as its child.

The input matmuls of all steps are one matmul before the wavefronts, the weight gradients one matmul after them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import dynamic


class LSTM(nn.Module):
    """The weights of torch's own LSTMCell."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.word, self.before = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden)

    def forward(self, v: dynamic.Vertex) -> None:
        h, c = self._gates(self.word(v.pull("x")) + self.before(v.gather("h", 0)), v.gather("c", 0))
        v.scatter(h=h, c=c)
        v.push(h=h)

    def alone(self, x: Tensor, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        none = x.new_zeros(self.before.in_features)
        h, c = children[0] if children else (none, none)
        return self._gates(self.word(x) + self.before(h), c)

    @staticmethod
    def _gates(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


class GRU(nn.Module):
    """The weights of torch's own GRUCell."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.word, self.before = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden)

    def forward(self, v: dynamic.Vertex) -> None:
        before = v.gather("h", 0)
        h = self._gates(self.word(v.pull("x")), self.before(before), before)
        v.scatter(h=h)
        v.push(h=h)

    def alone(self, x: Tensor, children: list[Tensor]) -> Tensor:
        before = children[0] if children else x.new_zeros(self.before.in_features)
        return self._gates(self.word(x), self.before(before), before)

    @staticmethod
    def _gates(word: Tensor, before: Tensor, h: Tensor) -> Tensor:
        r, z, n = word.chunk(3, dim=-1)
        hr, hz, hn = before.chunk(3, dim=-1)
        reset, update = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        new = torch.tanh(n + reset * hn)
        return new + update * (h - new)


def lstm(cell: LSTM) -> dynamic.Model:
    return dynamic.Model(cell, states={"h": cell.before.in_features, "c": cell.before.in_features})


def gru(cell: GRU) -> dynamic.Model:
    return dynamic.Model(cell, states={"h": cell.before.in_features})


def main() -> None:
    """Against torch's LSTM, sequence by sequence."""
    torch.manual_seed(0)
    cell, theirs, lengths = LSTM(8, 16), nn.LSTM(8, 16, batch_first=True), [3, 1, 5]
    with torch.no_grad():
        for ours, name in ((cell.word, "ih"), (cell.before, "hh")):
            getattr(theirs, f"weight_{name}_l0").copy_(ours.weight)
            getattr(theirs, f"bias_{name}_l0").copy_(ours.bias)
        x = torch.randn(sum(lengths), 8)
        every = lstm(cell)(dynamic.chains(lengths), x, at="all")
        expected = torch.cat([theirs(part[None])[0][0] for part in x.split(lengths)])
    print("largest difference:", float((every - expected).abs().max()))


if __name__ == "__main__":
    main()
