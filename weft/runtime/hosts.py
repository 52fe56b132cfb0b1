"""Which ranks share a host, and which a GPU of it, sent once by every rank to all: what they share need not be sent."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import product

import torch
import torch.distributed as dist

from weft.runtime.agree import from_all
from weft.runtime.shm import host_identity

_hosts: list[str] = []
_places: list[tuple[str, str]] = []


def meet(device: torch.device) -> None:
    """Learn every rank's host and device. All ranks call it together."""
    global _hosts, _places
    _places = from_all(place(device)) if dist.is_initialized() else []
    _hosts = [host for host, _ in _places]


def place(device: torch.device) -> tuple[str, str]:
    """This rank's host, and which GPU of it."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return host_identity(), gpu


def own_accelerator() -> torch.device | None:
    """This rank's accelerator, where the process group has a backend made for its kind (NCCL, not gloo)."""
    kind = torch.accelerator.current_accelerator()
    backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    if kind is None or backends.get(kind.type, "gloo") == "gloo":
        return None
    index = torch.accelerator.current_device_index() or int(os.environ.get("LOCAL_RANK", dist.get_rank())) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


def sharing(where: tuple[str, str]) -> int:
    """How many of the ranks that were met are at a place."""
    return _places.count(where)


def share(sizes: Mapping[str, int], axis: str) -> bool:
    """Whether ranks that differ only along an axis of the mesh are on one host. Ranks that were not met are taken to be."""
    if math.prod(sizes.values()) != len(_hosts):
        return True
    at = dict(zip(product(*map(range, sizes.values())), _hosts, strict=True))
    where = list(sizes).index(axis)
    groups: dict[tuple[int, ...], set[str]] = {}
    for place, host in at.items():
        groups.setdefault((*place[:where], *place[where + 1 :]), set()).add(host)
    return all(len(hosts) == 1 for hosts in groups.values())
