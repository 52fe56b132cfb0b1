"""What is counted as live while a step is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from weft.runtime.comm import InFlight
from weft.runtime.trace import live_bytes


def _lambda(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: x[:1]


def _one_of_a_list(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def take(k: int) -> torch.Tensor:
        return x[k : k + 1]

    return functools.partial(take, 0)


def _argument(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return functools.partial(torch.neg, x)


@pytest.mark.parametrize("finish", [_lambda, _one_of_a_list, _argument])
def test_what_a_collective_in_flight_will_give_is_live(finish: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> None:
    x = torch.zeros(100)
    assert live_bytes([InFlight(None, finish(x))], x.device) == x.untyped_storage().nbytes()
