"""Tokens sent to the ranks that hold an expert they picked, and to no other: an all_to_all whose sizes the moment decides.

All ranks know all picks, so each finds what it sends and what it gets; the host reads the sizes once. A token goes once to a rank, with all its
picks there, and their sum comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.runtime.comm import far

Through = Callable[..., Any]  # a rank's experts on some tokens
ALL = slice(None)


@dataclass(frozen=True)
class _Routing:
    """Which of this rank's tokens go where, which of all come here, and how many to and from each rank."""

    group: Any
    out: Tensor
    into: Tensor
    sends: list[int]
    gets: list[int]

    def there(self, x: Tensor) -> Tensor:
        return self._swapped(x[self.out], self.sends, self.gets)

    def back(self, y: Tensor, tokens: int, columns: slice, shape: tuple[int, ...]) -> Tensor:
        """What the other ranks made of this rank's tokens, of these columns alone, summed."""
        y = y[:, columns]
        return y.new_zeros(tokens, *y.shape[1:]).index_add(0, self.out, self._swapped(y, self.gets, self.sends)).reshape(shape)

    def _swapped(self, rows: Tensor, sends: list[int], gets: list[int]) -> Tensor:
        got = rows.new_empty(sum(gets), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), gets, sends, group=self.group)
        return got


def _routing(picks: Tensor, each: int, group: Any) -> _Routing:
    """`picks` of all tokens; rank r holds the experts from r * each on, and an equal share of the tokens."""
    group = far(group)
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    hits = (picks.div(each, rounding_mode="floor").unsqueeze(-1) == torch.arange(ranks, device=picks.device)).any(1)  # [tokens, ranks]
    own, here = hits.chunk(ranks)[me], hits[:, me]
    sends, gets = torch.stack([own.sum(0), here.view(ranks, -1).sum(1)]).tolist()
    return _Routing(group, own.t().nonzero()[:, 1], here.nonzero().squeeze(1), sends, gets)


def experts(
    x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, *more: Tensor, group: Any, through: Through, shape: tuple[int, ...], columns: slice = ALL
) -> Tensor:
    """This rank's tokens x [t, d] through the experts of all ranks; picks and weights are of all tokens, up and `more` of the experts held."""
    routing = _routing(picks, up.shape[0], group)
    y = through(routing.there(x), picks[routing.into], weights[routing.into], up, *more)
    return routing.back(y, x.shape[0], columns, shape)


def experts_backward(
    ct: Tensor, x: Tensor, picks: Tensor, weights: Tensor, up: Tensor, *more: Tensor, group: Any, through: Through, shape: tuple[int, ...], columns: slice = ALL
) -> Any:
    """The gradient of this rank's tokens; and, in their places of the tuple, that of the weights of all tokens by the experts held, and of these."""
    routing = _routing(picks, up.shape[0], group)
    dx, dw, *rest = through(routing.there(ct), routing.there(x), picks[routing.into], weights[routing.into], up, *more)
    return routing.back(dx, x.shape[0], columns, shape), (None, torch.zeros_like(weights).index_copy(0, routing.into, dw), *rest)
