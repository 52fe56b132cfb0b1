"""Speculative decoding: verify the draft trees of many requests in one pass.

A request has tokens already accepted (a chain) and a tree of drafted continuations. Vertex (token, layer) reads its own layer
below (child 0) and the keys and values of itself and its ancestors there. All tokens of all requests of a layer are one batch, so
a pass takes layers + 1 batches whatever the trees look like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft import dynamic


class Layer(nn.Module):
    """One decoder layer; it also makes the keys and values its successor reads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.query, self.out = heads, nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down, self.norm = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden), nn.LayerNorm(hidden)

    def forward(self, h: Tensor, seen: Tensor) -> Tensor:
        h = h + self.out(seen)
        return h + self.down(torch.relu(self.up(self.norm(h))))


class Decoder(nn.Module):
    """A small causal transformer; positions come from the depth of a token in its tree."""

    def __init__(self, vocabulary: int, hidden: int, heads: int, layers: int, longest: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(longest, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.key = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.value = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        types = {"token": self.embed} | {f"layer{i}": self.vertex(i) for i in range(layers)}
        self.net = dynamic.Model(types, states={"h": hidden, "k": hidden, "v": hidden})

    def embed(self, v: dynamic.Vertex) -> None:
        h = self.token(v.pull("token")) + self.position(v.pull("position"))
        v.scatter(h=h, k=self.key[0](h), v=self.value[0](h))

    def vertex(self, i: int) -> object:
        """The vertex function of layer i."""
        layer, last = self.layers[i], i + 1 == len(self.layers)

        def function(v: dynamic.Vertex) -> None:
            h = v.gather("h", 0)
            q, k, w = (self._heads(a) for a in (layer.query(h), v.gather("k", after=1), v.gather("v", after=1)))
            h = layer(h, v.attend(q, k, w).flatten(1))
            if last:
                v.push(logits=self.head(h))
            else:
                v.scatter(h=h, k=self.key[i + 1](h), v=self.value[i + 1](h))

        return function

    def verify(self, requests: Sequence[Sequence[int]], tokens: Tensor) -> Tensor:
        """Logits after every token. `requests` are parent arrays over the tokens of each request, -1 at the first."""
        paths = [_paths(parents) for parents in requests]
        position = torch.tensor([len(p) - 1 for request in paths for p in request])
        graph, last = unroll(paths, len(self.layers))
        return self.net(graph, {"token": tokens, "position": position}, at=last)

    def along(self, tokens: Tensor) -> Tensor:
        """A single sequence in plain torch: logits after each of its tokens."""
        h = self.token(tokens) + self.position(torch.arange(len(tokens)))
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for i, layer in enumerate(self.layers):
            q, k, w = (self._heads(a).transpose(0, 1) for a in (layer.query(h), self.key[i](h), self.value[i](h)))
            seen = nn.functional.scaled_dot_product_attention(q, k, w, attn_mask=mask)
            h = layer(h, seen.transpose(0, 1).flatten(1))
        return self.head(h)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1))


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """The ancestors of every token, from the first one down to itself."""
    out: list[list[int]] = []
    for token, parent in enumerate(parents):
        out.append([*(out[parent] if parent >= 0 else ()), token])
    return out


def unroll(paths: Sequence[Sequence[Sequence[int]]], layers: int) -> tuple[dynamic.Structure, list[int]]:
    """Vertices (token, layer) of every request, and the numbers of those of the last layer."""
    build, last, row = dynamic.Builder(), list[int](), 0
    for request in paths:
        build.sample()
        start, size = build.vertices, len(request)
        for token in range(size):
            build.add(kind="token", row=row + token)
        for i in range(layers):
            below = i * size
            for token, path in enumerate(request):
                build.add([below + token, *(below + p for p in path)], kind=f"layer{i}")
        last += range(start + layers * size, start + (layers + 1) * size)
        row += size
    return build.done(), last


def accept(parents: Sequence[int], tokens: Sequence[int], best: Sequence[int], known: int) -> list[int]:
    """The drafted tokens a greedy decoder would have chosen, from the last of `known` accepted ones on."""
    at, out = known - 1, list[int]()
    while True:
        right = [t for t in range(known, len(parents)) if parents[t] == at and tokens[t] == best[at]]
        if not right:
            return out
        at = right[0]
        out.append(at)


def main() -> None:
    """Two requests: a chain of three tokens each, and small trees of drafts."""
    torch.manual_seed(0)
    net = Decoder(vocabulary=11, hidden=16, heads=4, layers=2)
    requests = [[-1, 0, 1, 2, 2, 3, 3], [-1, 0, 1, 2, 3]]
    tokens = torch.randint(11, (12,))
    with torch.no_grad():
        logits = net.verify(requests, tokens)
        path = [0, 1, 2, 3, 5]
        alone = net.along(tokens[path])
    print("largest difference:", float((logits[path] - alone).abs().max()))
    print("accepted drafts:", accept(requests[0], tokens[:7].tolist(), logits[:7].argmax(-1).tolist(), known=3))


if __name__ == "__main__":
    main()
