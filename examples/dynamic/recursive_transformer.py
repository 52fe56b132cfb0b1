"""A transformer block at every vertex of a tree: attention over the children, then a feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft import dynamic


class Block(nn.Module):
    """h = y + mlp(norm(y)), y = q + attention(q; children), q = token, or the learned query where there is none."""

    def __init__(self, inputs: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.query = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.key, self.value = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden)
        self.out, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, v: dynamic.Vertex) -> None:
        x, below = self.token(v.pull("x", optional=True)), v.gather("h")
        q, k, w = (self._heads(f(a)) for f, a in ((self.query, x), (self.key, below), (self.value, below)))
        y = x + self.out(v.attend(q, k, w).flatten(1))
        h = self._feed(y)
        v.scatter(h=h)
        v.push(h=h)

    def alone(self, x: Tensor | None, children: list[Tensor]) -> Tensor:
        x = self.token.bias if x is None else self.token(x)
        seen = torch.zeros_like(x)
        if children:
            rows = torch.stack(children)
            q, k, w = (self._heads(a) for a in (self.query(x)[None], self.key(rows), self.value(rows)))
            scores = torch.einsum("qhd,khd->hk", q, k) * q.shape[-1] ** -0.5
            seen = torch.einsum("hk,khd->hd", scores.softmax(-1), w).flatten()
        return self._feed(x + self.out(seen))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1))

    def _feed(self, y: Tensor) -> Tensor:
        return y + self.down(F.gelu(self.up(self.norm(y))))


def model(cell: Block) -> dynamic.Model:
    return dynamic.Model(cell, states={"h": cell.out.out_features})


def main() -> None:
    torch.manual_seed(0)
    cell, x = Block(8, 16, heads=4), torch.randn(6, 8)
    tree = ((0, 1, 2), (3, (4, 5)))

    def walk(t: object) -> Tensor:
        return cell.alone(x[t], []) if isinstance(t, int) else cell.alone(None, [walk(s) for s in t])

    root = model(cell)(dynamic.trees([tree]), x)[0]
    print("largest difference:", float((root - walk(tree)).abs().max().detach()))


if __name__ == "__main__":
    main()
