"""Collectives between ranks of one host as programs run them there, for `weft calibrate` to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.cluster.local import torch_calls
from weft.core import native
from weft.runtime.intra_host import host_group_of
from weft.runtime.peers import connect


def local_calls(device: str, full: torch.Tensor, part: torch.Tensor) -> Mapping[str, Callable[[], Any]]:
    """Through memory that the ranks share; torch's own on accelerators and where no kernels can be built."""
    if device != "cpu" or not native.available():
        return torch_calls(device, full, part)
    host_group = host_group_of(None, connect(None, device))
    return {
        "all_reduce": lambda: host_group.all_reduce_list([full], "sum", [False]),
        "all_gather": lambda: host_group.all_gather(part),
        "reduce_scatter": lambda: host_group.reduce_scatter(full.view(host_group.world, -1)),
        "all_to_all": lambda: host_group.all_to_all(full.view(host_group.world, -1)),
    }
