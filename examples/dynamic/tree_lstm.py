"""Tree-LSTM, child-sum (any number of children) and N-ary (left and right have weights of their own).

Words sit at the leaves here; a vertex without a word pulls zeros, and weft leaves its input matmul out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import dynamic


class ChildSum(nn.Module):
    """h = o * tanh(c), c = i * u + sum over children k of sigmoid(h_k U_f + b_f) * c_k."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.word = nn.Linear(inputs, 3 * hidden)
        self.below = nn.Linear(hidden, 3 * hidden, bias=False)
        self.forget = nn.Linear(hidden, hidden)

    def forward(self, v: dynamic.Vertex) -> None:
        x, h, c = v.pull("x", optional=True), v.gather("h"), v.gather("c")
        i, o, u = (self.word(x) + self.below(v.reduce(h, "sum"))).chunk(3, dim=1)
        kept = v.reduce(torch.sigmoid(self.forget(h)) * c, "sum")
        c = torch.sigmoid(i) * torch.tanh(u) + kept
        h = torch.sigmoid(o) * torch.tanh(c)
        v.scatter(h=h, c=c)
        v.push(h=h)

    def alone(self, x: Tensor | None, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """One vertex, in plain torch: what a recursion over a single sample runs."""
        gates = self.word.bias if x is None else self.word(x)
        kept: Tensor | float = 0.0
        if children:
            gates = gates + self.below(torch.stack([h for h, _ in children]).sum(0))
            kept = torch.stack([torch.sigmoid(self.forget(h)) * c for h, c in children]).sum(0)
        i, o, u = gates.chunk(3, dim=-1)
        c = torch.sigmoid(i) * torch.tanh(u) + kept
        return torch.sigmoid(o) * torch.tanh(c), c


class Binary(nn.Module):
    """Two children, each with its own recurrent weights and forget gate."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.word = nn.Linear(inputs, 5 * hidden)
        self.below = nn.Linear(2 * hidden, 5 * hidden, bias=False)

    def forward(self, v: dynamic.Vertex) -> None:
        h = torch.cat([v.gather("h", 0), v.gather("h", 1)], dim=1)
        gates = self.word(v.pull("x", optional=True)) + self.below(h)
        h, c = self._gates(gates, v.gather("c", 0), v.gather("c", 1))
        v.scatter(h=h, c=c)
        v.push(h=h)

    def alone(self, x: Tensor | None, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        gates = self.word.bias if x is None else self.word(x)
        if not children:
            none = torch.zeros_like(gates[: gates.shape[0] // 5])
            return self._gates(gates, none, none)
        (h0, c0), (h1, c1) = children
        return self._gates(gates + self.below(torch.cat([h0, h1])), c0, c1)

    @staticmethod
    def _gates(gates: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u, f0, f1 = gates.chunk(5, dim=-1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f0) * left + torch.sigmoid(f1) * right
        return torch.sigmoid(o) * torch.tanh(c), c


def model(cell: nn.Module, hidden: int) -> dynamic.Model:
    return dynamic.Model(cell, states={"h": hidden, "c": hidden})


def main() -> None:
    """Two sentences at once; then the same by recursion."""
    torch.manual_seed(0)
    cell, words = ChildSum(16, 32), torch.randn(7, 16)
    trees = [((0, 1), (2, 3)), (4, (5, 6))]
    roots = model(cell, 32)(dynamic.trees(trees), words)

    def walk(tree: object) -> tuple[Tensor, Tensor]:
        return cell.alone(words[tree], []) if isinstance(tree, int) else cell.alone(None, [walk(t) for t in tree])

    print("largest difference:", float((roots - torch.stack([walk(t)[0] for t in trees])).abs().max().detach()))


if __name__ == "__main__":
    main()
