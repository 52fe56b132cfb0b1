"""Lattice LSTM: a chain of characters, crossed by the words of a lexicon that span several of them.

Two types of vertex. A character reads the character before it (child 0) and every word that ends with it; a word reads the
character before its first one (child 0). A character mixes what words bring with its own cell, by gates that sum to one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft import dynamic


class Lattice(nn.Module):
    """Characters and words of one size."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.char, self.before = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.word, self.start = nn.Linear(inputs, 3 * hidden), nn.Linear(hidden, 3 * hidden, bias=False)
        self.link, self.from_word = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)

    def character(self, v: dynamic.Vertex) -> None:
        x = v.pull("x")
        i, o, g = self._split(self.char(x) + self.before(v.gather("h", 0)))
        words = v.gather("c", after=1)
        gate = torch.exp(torch.sigmoid(v.spread(self.link(x)) + self.from_word(words)))
        own = torch.exp(i)
        total = own + v.reduce(gate, "sum")
        alone = i * g + (1 - i) * v.gather("c", 0)
        mixed = (own * g + v.reduce(gate * words, "sum")) / total
        crossed = (v.count(x.dtype) > 0).unsqueeze(1)
        c = torch.where(crossed, mixed, alone)
        h = o * torch.tanh(c)
        v.scatter(h=h, c=c)
        v.push(h=h)

    def lexeme(self, v: dynamic.Vertex) -> None:
        i, f, g = self._split(self.word(v.pull("x")) + self.start(v.gather("h", 0)))
        v.scatter(c=f * v.gather("c", 0) + i * g)

    @staticmethod
    def _split(gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, g = gates.chunk(3, dim=-1)
        return torch.sigmoid(a), torch.sigmoid(b), torch.tanh(g)

    def sentence(self, chars: Tensor, words: Sequence[tuple[int, int]], lexicon: Tensor) -> Tensor:
        """One sentence in plain torch: the last hidden state."""
        none = chars.new_zeros(self.before.in_features)
        hs, cs = list[Tensor](), list[Tensor]()
        for j, x in enumerate(chars):
            h, c = (hs[j - 1], cs[j - 1]) if j else (none, none)
            i, o, g = self._split(self.char(x) + self.before(h))
            brought = [self._lexeme(lexicon[n], hs, cs, begin, none) for n, (begin, end) in enumerate(words) if end == j]
            c = self._mix(x, i, g, brought) if brought else i * g + (1 - i) * c
            hs.append(o * torch.tanh(c))
            cs.append(c)
        return hs[-1]

    def _lexeme(self, x: Tensor, hs: list[Tensor], cs: list[Tensor], begin: int, none: Tensor) -> Tensor:
        h, c = (hs[begin - 1], cs[begin - 1]) if begin else (none, none)
        i, f, g = self._split(self.word(x) + self.start(h))
        return f * c + i * g

    def _mix(self, x: Tensor, i: Tensor, g: Tensor, words: list[Tensor]) -> Tensor:
        gates = [torch.exp(torch.sigmoid(self.link(x) + self.from_word(c))) for c in words]
        own = torch.exp(i)
        return (own * g + sum(a * c for a, c in zip(gates, words, strict=True))) / (own + sum(gates))


def model(cell: Lattice) -> dynamic.Model:
    size = cell.before.in_features
    out = dynamic.Model({"char": cell.character, "word": cell.lexeme}, states={"h": size, "c": size})
    out.cell = cell
    return out


def graph(sentences: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> dynamic.Structure:
    """(characters, [(first, last), ...] of the words in it) per sentence; rows count characters, then words, by sentence."""
    build, row = dynamic.Builder(), 0
    for length, words in sentences:
        build.sample()
        vertex: list[int] = []
        for j in range(length):
            before = vertex[j - 1] if j else None
            ends = [n for n, (_, end) in enumerate(words) if end == j]
            found = [build.add([vertex[words[n][0] - 1]] if words[n][0] else [], kind="word", row=row + length + n) for n in ends]
            children = [before, *found] if before is not None or found else []
            vertex.append(build.add(children, kind="char", row=row + j))
        row += length + len(words)
    return build.done()


def main() -> None:
    torch.manual_seed(0)
    cell, x = Lattice(8, 16), torch.randn(7, 8)
    out = model(cell)(graph([(5, [(0, 1), (2, 4)])]), x)
    alone = cell.sentence(x[:5], [(0, 1), (2, 4)], x[5:])
    print("largest difference:", float((out[-1] - alone).abs().max().detach()))


if __name__ == "__main__":
    main()
