"""Which ranks share a host, told once by every rank to all: what is shared there need not be sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import torch.distributed as dist

from weft.runtime.shm import host_identity

_hosts: list[str] = []


def meet() -> None:
    """Learn every rank's host. All ranks call it together."""
    global _hosts
    _hosts = [""] * dist.get_world_size() if dist.is_initialized() else []
    if _hosts:
        dist.all_gather_object(_hosts, host_identity())


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
