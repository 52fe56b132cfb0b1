"""Graph attention (GAT) over a batch of graphs: a vertex of a layer reads itself and its neighbours one layer below.

The layers are unrolled, so any directed graph will do, cycles too; softmax and sum over neighbours are one pass over the edges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import dynamic


class GAT(nn.Module):
    def __init__(self, wide: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads, self.layers = heads, layers
        self.project = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(layers))
        self.source, self.target = (nn.ParameterList(torch.randn(heads, wide // heads) * 0.1 for _ in range(layers)) for _ in range(2))
        types = {"node": self.node} | {f"layer{i}": self.vertex(i) for i in range(layers)}
        self.net = dynamic.Model(types, states={"x": wide, "s": heads})

    def node(self, v: dynamic.Vertex) -> None:
        self._scatter(v, v.pull("x"), 0)

    def vertex(self, i: int) -> Any:
        def function(v: dynamic.Vertex) -> None:
            score = v.gather("s", after=1) + v.spread(self._score(v.gather("x", 0), self.target[i]))
            weight = v.softmax(F.leaky_relu(score, 0.2)).unsqueeze(-1)
            h = torch.relu(v.reduce(weight * v.gather("x", after=1).unflatten(1, (self.heads, -1)))).flatten(1)
            if i + 1 == self.layers:
                v.push(h=h)
            else:
                self._scatter(v, h, i + 1)

        return function

    def _scatter(self, v: dynamic.Vertex, h: Tensor, i: int) -> None:
        x = self.project[i](h)
        v.scatter(x=x, s=self._score(x, self.source[i]))

    def _score(self, x: Tensor, by: Tensor) -> Tensor:
        return (x.unflatten(1, (self.heads, -1)) * by).sum(-1)

    def plain(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """The same as PyG writes it: messages of all edges, scattered."""
        for i in range(self.layers):
            x = self.project[i](h)
            score = self._score(x, self.source[i]).index_select(0, source) + self._score(x, self.target[i]).index_select(0, target)
            score = F.leaky_relu(score, 0.2)
            at = target.unsqueeze(1).expand_as(score)
            top = torch.full((len(x), self.heads), float("-inf"), dtype=x.dtype).scatter_reduce(0, at, score.detach(), "amax")
            weight = (score - top.index_select(0, target)).exp()
            weight = weight / torch.zeros_like(top).index_add(0, target, weight).index_select(0, target)
            message = x.unflatten(1, (self.heads, -1)).index_select(0, source) * weight.unsqueeze(-1)
            h = torch.relu(x.new_zeros(len(x), *message.shape[1:]).index_add(0, target, message)).flatten(1)
        return h


def unrolled(n: int, edges: Any, layers: int) -> dynamic.Structure:
    """Vertex (layer, i) for `edges` of rows source and target: its children are (layer - 1, i), then its sources there."""
    source, target = edges
    order, degree = np.argsort(target, kind="stable"), np.bincount(target, minlength=n)
    own = np.zeros(len(source) + n, bool)
    own[np.concatenate([[0], np.cumsum(degree + 1)[:-1]])] = True
    one = np.empty(len(own), np.int64)
    one[own], one[~own] = np.arange(n), source[order]
    first = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(n, np.int64), *[degree + 1] * layers]))])
    rows = np.concatenate([np.arange(n), np.full(n * layers, -1)])
    kinds = ("node", *(f"layer{i}" for i in range(layers)))
    below = np.concatenate([one + i * n for i in range(layers)])
    return dynamic.Structure(first, below, rows, np.array([0, n * (layers + 1)]), np.repeat(np.arange(layers + 1), n), kinds)


def main() -> None:
    """Two triangles joined by an edge, every vertex its own neighbour too."""
    torch.manual_seed(0)
    net = GAT(16, 4, layers=2)
    edges = np.array([[0, 1, 2, 3, 4, 5, 2, *range(6)], [1, 2, 0, 4, 5, 3, 3, *range(6)]])
    x = torch.randn(6, 16)
    with torch.no_grad():
        out = net.net(unrolled(6, edges, 2), x, at=np.arange(12, 18))
    print("largest difference:", float((out - net.plain(x, *torch.from_numpy(edges)).detach()).abs().max()))


if __name__ == "__main__":
    main()
