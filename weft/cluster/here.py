"""The processes at hand as a cluster: a profile that `weft calibrate` wrote, else the shipped one nearest to the device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from weft.cluster.profile import names
from weft.cluster.spec import Cluster, cluster
from weft.core.errors import ClusterError

PROFILE = "profile.json"  # what `weft calibrate` writes


def here(world: int, device: torch.device) -> Cluster:
    """`world` processes on this kind of device. `WEFT_PROFILE` names a calibrated profile; one in the working folder is found."""
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    own = os.environ.get("WEFT_PROFILE") or (PROFILE if Path(PROFILE).is_file() else "")
    if own and local == world:
        return cluster(f"{world}x{own}")
    return cluster(f"{world // local}x{local}x{shipped(device)}")


def shipped(device: torch.device) -> str:
    """The shipped profile for a kind of device."""
    if device.type == "cpu":
        return "x86-2"
    name = torch.cuda.get_device_name(device)
    known = [n for n in names() if n in name]
    if not known:
        raise ClusterError(
            f"no profile for {name}", needed=f"one of {', '.join(names())}", found=name, try_=f"weft calibrate --out {PROFILE}"
        )  # fmt: skip
    return max(known, key=len)
