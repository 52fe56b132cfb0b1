"""Collectives between ranks of one host as programs run them there, for `weft calibrate` to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.cluster.local import torch_calls
from weft.core import native
from weft.runtime.intra_host import host_group_of
from weft.runtime.peers import connect


def local_calls(device: str, whole: torch.Tensor, part: torch.Tensor) -> Mapping[str, Callable[[], Any]]:
    """Through memory that the ranks share; torch's own on accelerators and where no kernels can be built."""
    if device != "cpu" or not native.available():
        return torch_calls(device, whole, part)
    near = host_group_of(None, connect(None, device))
    return {
        "all_reduce": lambda: near.all_reduce_list([whole], "sum", [False]),
        "all_gather": lambda: near.all_gather(part),
        "reduce_scatter": lambda: near.reduce_scatter(whole.view(near.world, -1)),
        "all_to_all": lambda: near.all_to_all(whole.view(near.world, -1)),
    }
