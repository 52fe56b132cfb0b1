"""Packed sequences: recurrent layers over the padded batch, in which a sequence that has ended stays as it is.

Torch keeps a packed batch as rows of all sequences, step by step, whose number the batch decides; here those rows know the padded batch they
were taken from, so that layers and padding go from one to the other without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.frontend.capture.handlers import function
from weft.frontend.capture.recorder import Recorder
from weft.frontend.capture.values import TAG

PACKED = "_weft_packed"


@dataclass(frozen=True)
class _Packed:
    """What rows are packed of: the padded batch (time, sample, ...), and which of it there is; `version` counts writes into the rows."""

    padded: Tensor
    lengths: Tensor
    version: int = 0

    @property
    def alive(self) -> Tensor:
        """Of every time and sample, whether the sequence has not ended."""
        return torch.arange(self.padded.shape[0]).unsqueeze(1) < self.lengths.unsqueeze(0)


def _rows(padded: Tensor, lengths: Tensor) -> Tensor:
    """The rows of sequences that have not ended, one time after another."""
    packed = _Packed(padded, lengths)
    data = padded.flatten(0, 1)[packed.alive.flatten()]
    setattr(data, PACKED, _Packed(padded, lengths, getattr(data, TAG).cell.version))
    return data


def _of(data: Tensor, batch_sizes: Tensor) -> _Packed:
    """What rows are packed of; those that the user computed are put where they belong."""
    found, sizes = getattr(data, PACKED, None), getattr(batch_sizes, PACKED)
    if found is not None and found.version == getattr(data, TAG).cell.version:
        return found  # type: ignore[no-any-return]
    time, many = sizes.padded.shape[:2]
    places = sizes.alive.flatten().nonzero()[:, 0]
    padded = data.new_zeros(time * many, *data.shape[1:]).index_add(0, places, data)
    return _Packed(padded.unflatten(0, (time, many)), sizes.lengths)


@function(torch._VF._pack_padded_sequence, tensors=True)  # type: ignore[attr-defined]
def _pack(r: Recorder, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    padded = x.transpose(0, 1) if batch_first else x
    data = _rows(padded, lengths)
    sizes = _Packed(padded, lengths).alive.sum(1)[: int(lengths.max())]
    setattr(sizes, PACKED, getattr(data, PACKED))
    return data, sizes


@function(torch._VF._pad_packed_sequence, tensors=True)  # type: ignore[attr-defined]
def _pad(r: Recorder, data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int) -> tuple[Tensor, Tensor]:
    packed = _of(data, batch_sizes)
    many, time = batch_sizes.shape[0], packed.padded.shape[0]
    alive = packed.alive.reshape(*packed.padded.shape[:2], *(1 for _ in packed.padded.shape[2:]))
    out = torch.where(alive, packed.padded, value)
    if max(many, total) > time:
        out = torch.cat([out, out.new_full((max(many, total) - time, *out.shape[1:]), value)])
    out = out[: max(many, total)]
    return out.transpose(0, 1) if batch_first else out, packed.lengths


Cell = Callable[[Tensor, tuple[Tensor, ...], Tensor, Any], tuple[Tensor, ...]]


def lstm(x: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    i, f, g, o = (x + F.linear(state[0], weight, bias)).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Any) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), F.linear(state[0], weight, bias).chunk(3, -1)
    z, n = (xz + hz).sigmoid(), (xn + (xr + hr).sigmoid() * hn).tanh()
    return ((state[0] - n) * z + n,)


def plain(act: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, state, weight, bias: (act(x + F.linear(state[0], weight, bias)),)


def _layer(cell: Cell, packed: _Packed, state: tuple[Tensor, ...], weights: Sequence[Tensor], projection: Any, back: bool) -> Any:
    """One direction of a layer: what it gives at every time, zeros where a sequence has ended, and the state it ends with."""
    weight, recurrent, *biases = weights
    alive, outs = packed.alive, []
    steps = F.linear(packed.padded, weight, biases[0] if biases else None).unbind(0)
    for t in reversed(range(len(steps))) if back else range(len(steps)):
        new = cell(steps[t], state, recurrent, biases[1] if biases else None)
        new = new if projection is None else (F.linear(new[0], projection), *new[1:])
        state = tuple(torch.where(alive[t].unsqueeze(1), now, before) for now, before in zip(new, state, strict=True))
        outs.append(torch.where(alive[t].unsqueeze(1), new[0], 0.0))
    return torch.stack(outs[::-1] if back else outs), state


def _recurrent(cell: Cell, plain: Any) -> Any:
    def run(r: Recorder, data: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], Tensor) or not hasattr(args[0], PACKED):
            return plain(data, *args, **kwargs)
        return _over_packed(cell, _of(data, args[0]), *args[1:], **kwargs)

    function(plain, tensors=True)(run)
    return run


def _over_packed(cell: Cell, packed: _Packed, hx: Any, weights: Any, biases: bool, layers: int, dropout: float, train: bool, both: bool) -> Any:
    start = hx if isinstance(hx, (tuple, list)) else (hx,)
    each = len(weights) // (layers * (1 + both))
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outs = []
        for back in (False, True)[: 1 + both]:
            at = 2 * layer + back if both else layer
            own = list(weights[at * each : (at + 1) * each])
            projection = own.pop() if each % 2 else None
            out, end = _layer(cell, packed, tuple(s[at] for s in start), own, projection, back)
            outs.append(out)
            ends.append(end)
        out = torch.cat(outs, -1)
        packed = _Packed(F.dropout(out, dropout, train) if layer < layers - 1 and dropout else out, packed.lengths)
    return _rows(packed.padded, packed.lengths), *(torch.stack(s) for s in zip(*ends, strict=True))


for _name, _cell in {"lstm": lstm, "gru": gru, "rnn_tanh": plain(torch.tanh), "rnn_relu": plain(torch.relu)}.items():
    _recurrent(_cell, getattr(torch._VF, _name))  # type: ignore[attr-defined]
