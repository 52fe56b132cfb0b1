"""Packed sequences through recurrent layers, as torch has them, for batches of other lengths at every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from weft import parallelize

KINDS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(4, 3, batch_first=True),
    "two layers both ways": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "projected": lambda: nn.LSTM(4, 3, proj_size=2, bias=False, batch_first=True),
    "gru both ways": lambda: nn.GRU(4, 3, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


def last(layer: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    end = layer(pack_padded_sequence(x, n, layer.batch_first, enforce_sorted=False))[1]
    return sum(e.square().sum() for e in end) if isinstance(end, tuple) else end.square().sum()


def padded(layer: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    out, lengths = pad_packed_sequence(layer(pack_padded_sequence(x, n, layer.batch_first, enforce_sorted=False))[0], layer.batch_first, 0.5)
    return out.tanh().mean() + lengths.max() * out.square().mean()


def rows(layer: nn.Module, x: Tensor, n: Tensor) -> Tensor:
    """What users do to the rows themselves."""
    packed = pack_padded_sequence(x, n.sort(descending=True)[0], layer.batch_first)
    out = layer(PackedSequence(packed.data * 2, packed.batch_sizes))[0]
    return out.data.square().mean() + pad_packed_sequence(out, layer.batch_first, total_length=7)[0].sum() / packed.data.shape[0]


@pytest.mark.parametrize(("kind", "loss"), [(k, last) for k in KINDS] + [("lstm", padded), ("two layers both ways", rows), ("gru both ways", padded)])
def test_packed_sequences(kind: str, loss: Any) -> None:
    torch.manual_seed(0)
    ours = KINDS[kind]().double()
    theirs = copy.deepcopy(ours)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    lengths = [[3, 5, 1, 4], [5, 2, 2, 5], [4, 4, 3, 1]]
    shape = (4, 5, 4) if ours.batch_first else (5, 4, 4)
    batches = [{"x": torch.randn(shape, dtype=torch.float64), "n": torch.tensor(n)} for n in lengths]
    step = parallelize(ours, lambda m, b: loss(m, b["x"], b["n"]), first, batches[0], "dp1")
    for b in batches:
        second.zero_grad()
        want = loss(theirs, b["x"], b["n"])
        want.backward()
        second.step()
        torch.testing.assert_close(step(b), want.detach(), rtol=1e-10, atol=1e-12)
    for n, p in theirs.named_parameters():
        torch.testing.assert_close(step.full(f"param.{n}"), p.detach(), rtol=1e-10, atol=1e-12, msg=n)
